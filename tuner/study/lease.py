"""Who works on a study: one worker for each place, each with a lease that it renews.

A place is a host, or some of its devices. Workers of disjoint places share a study; where two would use the same
device, the second is refused. A dead worker's lease is taken over: on the same boot of the same host at once, for there
a worker lives if its process does, known by pid and start time; a stopped or slow one keeps its lease for as long as it
exists. Seen from another host, or from another PID namespace of the same one (a container), it lives until the lease
expires.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from tuner.errors import StudyStopped, UsageError
from tuner.study.place import Place, hostname
from tuner.study.tables import workers
from tuner.study.turn import turn

RENEW_EVERY_S = 30.0
EXPIRES_S = 300.0
"""Ten missed renewals: a worker on another host is taken for dead."""


@dataclass(frozen=True)
class Holder:
    """A process, told apart from all others that ever had its pid. `boot` is a boot's id, "/" and a PID namespace."""

    host: str
    boot: str
    pid: int
    pid_started: str


@dataclass(frozen=True)
class Worker:
    """A worker of a study, and where it launches its servers."""

    place: Place
    holder: Holder


@dataclass(frozen=True)
class Sign(Worker):
    """A worker that is alive; `age_s` is how long ago it last renewed its lease."""

    age_s: float


def this_process() -> Holder:
    """The holder that we are."""
    return Holder(hostname(), f"{_boot_id()}/{_pid_namespace()}", os.getpid(), _started(os.getpid()) or "")


def alive(holder: Holder, expires_at: float, now: float) -> bool:
    """Whether the holder still runs, as far as this machine can tell."""
    us = this_process()
    if holder.host != us.host:
        return now < expires_at
    boot, _, namespace = holder.boot.partition("/")
    our_boot, _, our_namespace = us.boot.partition("/")
    if boot != our_boot:
        return False
    if namespace not in ("", our_namespace):
        return now < expires_at
    return _started(holder.pid) == holder.pid_started


def working(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> tuple[Worker, ...]:
    """The workers of a study that are alive, by place."""
    if not sa.inspect(engine).has_table(workers.name):
        return ()
    with engine.connect() as connection:
        return tuple(_worker(row) for row in _living(connection, study, _now(connection, clock)))


def working_since(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> tuple[Sign, ...]:
    """As `working`, with the last sign of each."""
    if not sa.inspect(engine).has_table(workers.name):
        return ()
    with engine.connect() as connection:
        now = _now(connection, clock)
        rows = [(_worker(row), row.renewed_at) for row in _living(connection, study, now)]
    return tuple(Sign(worker.place, worker.holder, now - renewed) for worker, renewed in rows)


def holder(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> Holder | None:
    """Who works on the study now, the first of several; None when nobody alive does."""
    return next((worker.holder for worker in working(engine, study, clock)), None)


class Lease:
    """A held lease. `check` before every commit of consequence: it may have been taken over while we were stopped."""

    def __init__(self, engine: Engine, study: str, place: Place, token: str, clock: Callable[[], float]) -> None:
        self.place = place
        self._engine = engine
        self._study = study
        self._token = token
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, daemon=True, name="lease")

    def check(self) -> None:
        """Raises when the lease is not ours any more.

        Raises:
            StudyStopped: another tuner has taken the place over.
        """
        with self._engine.connect() as connection:
            query = sa.select(workers.c.token).where(workers.c.study == self._study, workers.c.place == self.place.name)
            if connection.execute(query).scalar() != self._token:
                raise StudyStopped(f"another tuner has taken over the study '{self._study}'; this one has stopped")

    def others(self) -> frozenset[str]:
        """The places of the study's other living workers."""
        found = working(self._engine, self._study, self._clock)
        return frozenset(worker.place.name for worker in found) - {self.place.name}

    def sibling_pids(self) -> tuple[int, ...]:
        """The processes of the study's other living workers that launch their servers on this host."""
        found = working(self._engine, self._study, self._clock)
        return tuple(w.holder.pid for w in found if w.place != self.place and w.place.host == self.place.host)

    def release(self) -> None:
        """Gives the lease back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(workers).where(*self._mine))

    @property
    def _mine(self) -> tuple[sa.ColumnElement[bool], ...]:
        return workers.c.study == self._study, workers.c.token == self._token

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                with self._engine.begin() as connection:
                    now = _now(connection, self._clock)
                    values = {"renewed_at": now, "expires_at": now + EXPIRES_S}
                    connection.execute(sa.update(workers).where(*self._mine).values(values))
            except OperationalError:
                continue  # the database is busy; nine more renewals follow before the lease expires


@contextmanager
def hold(
    engine: Engine, study: str, clock: Callable[[], float] = time.time, place: Place | None = None
) -> Iterator[Lease]:
    """Holds the lease of a place, this host by default, for the block.

    Raises:
        UsageError: a worker that is alive holds it, or one whose place overlaps with it.
    """
    lease = acquire(engine, study, clock, place)
    lease._thread.start()
    try:
        yield lease
    finally:
        lease.release()


def acquire(engine: Engine, study: str, clock: Callable[[], float] = time.time, place: Place | None = None) -> Lease:
    """Takes the lease of a place, from a dead worker too.

    Raises:
        UsageError: a worker that is alive holds it, or one whose place overlaps with it; or workers of other hosts
            share a SQLite file.
    """
    us, token, place = this_process(), uuid.uuid4().hex, place or Place(hostname())
    with turn(engine, study), engine.begin() as connection:
        workers.create(connection, checkfirst=True)
        now = _now(connection, clock)
        for row in _living(connection, study, now):
            other = _worker(row)
            if other.place.overlaps(place):
                raise _held(study, other, place)
            if engine.dialect.name == "sqlite" and other.holder.host != us.host:
                raise UsageError(
                    f"a worker on {other.holder.host} works on the study '{study}' in this SQLite file, and SQLite "
                    "cannot be shared between hosts. Nothing was started; keep such a study in PostgreSQL: "
                    "--storage postgresql+psycopg://…"
                )
        values = {
            "study": study,
            "place": place.name,
            "token": token,
            "host": us.host,
            "devices": json.dumps(place.devices),
            "boot": us.boot,
            "pid": us.pid,
            "pid_started": us.pid_started,
            "renewed_at": now,
            "expires_at": now + EXPIRES_S,
        }
        connection.execute(sa.delete(workers).where(workers.c.study == study, workers.c.place == place.name))
        connection.execute(sa.insert(workers).values(values))
    return Lease(engine, study, place, token, clock)


def _living(connection: sa.Connection, study: str, now: float) -> list[Any]:
    rows = connection.execute(sa.select(workers).where(workers.c.study == study).order_by(workers.c.place)).all()
    return [row for row in rows if alive(_worker(row).holder, row.expires_at, now)]


def _worker(row: Any) -> Worker:
    place = Place(row.place.partition("/")[0], tuple(json.loads(row.devices)))
    return Worker(place, Holder(row.host, row.boot, row.pid, row.pid_started))


def _now(connection: sa.Connection, clock: Callable[[], float]) -> float:
    """The database's own time where workers of several hosts share it: their clocks may differ."""
    if clock is time.time and connection.dialect.name == "postgresql":
        return float(connection.execute(sa.text("select extract(epoch from clock_timestamp())")).scalar_one())
    return clock()


def _held(study: str, other: Worker, place: Place) -> UsageError:
    who = f"process {other.holder.pid} on {other.holder.host}"
    if other.place == place:
        hint = "wait for it, or end it and run the same again. Another worker on this host needs devices of its own: "
        return UsageError(
            f"another tuner ({who}) is working on the study '{study}'. Nothing was started; {hint}--devices 0,1"
        )
    theirs = f"devices {','.join(other.place.devices)}" if other.place.devices else "all devices"
    return UsageError(
        f"another tuner ({who}) is working on the study '{study}' with {theirs} of this host. Nothing was started; "
        "workers on one host need devices that no other one has: --devices 0,1"
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when there is none, or it is only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return _exists(pid) if not Path("/proc/self/stat").exists() else None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> str | None:
    """For systems without /proc: whether the pid is in use at all."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""
