"""What is particular to PostgreSQL: what its errors mean to a person, and waiting for a server that comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine

from tuner.errors import EnvironmentBroken, TunerError, UsageError
from tuner.study.address import without_secrets

OUTAGE_S = 120.0
"""How long a study at work waits for a database that has gone away: a restart, or another server taking over."""

CONNECT_S = 10
"""How long one attempt to reach a server may take."""

_KEPT = "Everything measured is kept; run the same again"


def of_postgres(error: BaseException) -> bool:
    """Whether an error, or what it wraps, is PostgreSQL's driver's."""
    return type(getattr(error, "orig", None) or error).__module__.startswith("psycopg")


def postgres_problem(error: Exception) -> TunerError:
    """What went wrong, for a person. Passwords are in none of these messages: the server never repeats one."""
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    low, state = said.lower(), getattr(getattr(error, "orig", error), "sqlstate", None) or ""
    if "password authentication failed" in low or "no password supplied" in low or state in ("28P01", "28000"):
        return EnvironmentBroken(
            f"the database does not let us in: {said}. Nothing was started; mend the user or the password of --storage "
            "(a password can also stand in PGPASSWORD or ~/.pgpass)"
        )
    if "does not exist" in low and "database" in low and not state.startswith("42"):
        return EnvironmentBroken(
            f"the database is not there: {said}. Nothing was started; create it (createdb NAME), or name another"
        )
    if state.startswith("42P") or state == "42703":
        from tuner.study.database import ADVICE, OTHER_VERSION

        return UsageError(f"{OTHER_VERSION} ({said}). {ADVICE}")
    if state in ("42501", "25006"):
        return EnvironmentBroken(f"the database cannot be written: {said}. {_KEPT} once it may be written to")
    if state.startswith("53"):
        return EnvironmentBroken(f"the database is out of room or connections: {said}. {_KEPT} once it has some")
    return EnvironmentBroken(f"the database cannot be reached, or has gone away: {said}. {_KEPT} once it is back")


def patient(engine: Engine, tell: Callable[[str], None]) -> None:
    """From now on a connection that cannot be made is tried again for a while, and `tell` is told that it is.

    For studies at work alone: who only reads wants to know at once.
    """
    if engine.dialect.name == "sqlite":
        return

    @sa.event.listens_for(engine, "do_connect")
    def connect(dialect: Any, _record: Any, arguments: Any, keywords: Any) -> Any:
        deadline, pause, told = time.monotonic() + OUTAGE_S, 0.25, False
        while True:
            try:
                return dialect.connect(*arguments, **keywords)
            except dialect.dbapi.OperationalError as error:
                if time.monotonic() + pause > deadline:
                    raise
                if not told:
                    tell(
                        f"the database has gone away ({first_line(error, engine)}); waiting for it, {OUTAGE_S:.0f} s "
                        "at most. Nothing measured is lost"
                    )
                    told = True
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def first_line(error: BaseException, engine: Engine) -> str:
    """The first line of what an error says, without secrets of the address."""
    return without_secrets(next(iter(str(error).strip().splitlines()), type(error).__name__), engine.url)
