"""One worker of a study at a time decides what is next. A turn is short: nothing is launched or measured in it.

A turn belongs to a connection (PostgreSQL) or an open file (SQLite), so that no dead worker keeps it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Engine

from tuner.errors import EnvironmentBroken

WAIT_S = 600.0
"""Longest wait for a turn: the longest one ends a study, and runs the user's check of answers."""

POLL_S = 0.05


@contextmanager
def turn(engine: Engine, study: str, *, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the study's turn for the block; `check` is called while it is waited for.

    Raises:
        EnvironmentBroken: another worker has kept it for too long.
    """
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            key = _key(study)
            _wait(lambda: bool(connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar()), study, check)
            try:
                yield
            finally:
                connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
        return
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:":
        yield
        return
    # Beside the database, never the database itself: closing a second handle of it would drop SQLite's own locks.
    descriptor = os.open(f"{Path(file)}.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait(lambda: _locked(descriptor), study, check)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def making_tables(engine: Engine) -> Iterator[None]:
    """Held while tables are made where there are none: of two that begin at once, the second finds them made."""
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.select(sa.func.pg_advisory_lock(_key(""))))
            try:
                yield
            finally:
                connection.execute(sa.select(sa.func.pg_advisory_unlock(_key(""))))
        return
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:":
        yield
        return
    # The folder, so that no file of ours is left where there may be no room or right for one.
    descriptor = os.open(Path(file).resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: whoever comes second is told by the database
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(taken: Callable[[], bool], study: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not taken():
        check()
        if time.monotonic() > deadline:
            raise EnvironmentBroken(
                f"another worker of the study '{study}' has been deciding for {WAIT_S / 60:.0f} minutes; it may hang. "
                "Nothing measured is lost; end it and run the same again"
            )
        time.sleep(POLL_S)


def _key(study: str) -> int:
    """A signed number of 64 bits, as PostgreSQL's locks have them."""
    return int.from_bytes(hashlib.sha256(f"spec-tuner/{study}".encode()).digest()[:8], "big", signed=True)
