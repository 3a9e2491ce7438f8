"""One tuner per study at a time. The lease names its holder; a dead holder's lease is taken over at once.

On the same boot of the same host the holder lives if its process does, known by pid and start time; a stopped or slow
tuner keeps its lease for as long as it exists. Seen from another host, or from another PID namespace of the same one
(a container), it lives until the lease expires.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError, OperationalError

from tuner.errors import StudyStopped, UsageError
from tuner.study.tables import leases

RENEW_EVERY_S = 30.0
EXPIRES_S = 300.0
"""Ten missed renewals: a holder on another host is taken for dead."""


@dataclass(frozen=True)
class Holder:
    """A process, told apart from all others that ever had its pid. `boot` is a boot's id, "/" and a PID namespace."""

    host: str
    boot: str
    pid: int
    pid_started: str


def this_process() -> Holder:
    """The holder that we are."""
    return Holder(socket.gethostname(), f"{_boot_id()}/{_pid_namespace()}", os.getpid(), _started(os.getpid()) or "")


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


def holder(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> Holder | None:
    """Who works on the study now; None when nobody alive does."""
    with engine.connect() as connection:
        row = connection.execute(sa.select(leases).where(leases.c.study == study)).first()
    if row is None:
        return None
    found = Holder(row.host, row.boot, row.pid, row.pid_started)
    return found if alive(found, row.expires_at, clock()) else None


class Lease:
    """A held lease. `check` before every commit of consequence: it may have been taken over while we were stopped."""

    def __init__(self, engine: Engine, study: str, token: str, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._study = study
        self._token = token
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, daemon=True, name="lease")

    def check(self) -> None:
        """Raises when the lease is not ours any more.

        Raises:
            StudyStopped: another tuner has taken the study over.
        """
        with self._engine.connect() as connection:
            query = sa.select(leases.c.token).where(leases.c.study == self._study)
            if connection.execute(query).scalar() != self._token:
                raise StudyStopped(f"another tuner has taken over the study '{self._study}'; this one has stopped")

    def release(self) -> None:
        """Gives the lease back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        with self._engine.begin() as connection:
            connection.execute(sa.delete(leases).where(leases.c.study == self._study, leases.c.token == self._token))

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            now = self._clock()
            mine = (leases.c.study == self._study) & (leases.c.token == self._token)
            try:
                with self._engine.begin() as connection:
                    values = {"renewed_at": now, "expires_at": now + EXPIRES_S}
                    connection.execute(sa.update(leases).where(mine).values(values))
            except OperationalError:
                continue  # the database is busy; nine more renewals follow before the lease expires


@contextmanager
def hold(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> Iterator[Lease]:
    """Holds the study's lease for the block.

    Raises:
        UsageError: another tuner that is alive holds it.
    """
    lease = acquire(engine, study, clock)
    lease._thread.start()
    try:
        yield lease
    finally:
        lease.release()


def acquire(engine: Engine, study: str, clock: Callable[[], float] = time.time) -> Lease:
    """Takes the lease, from a dead holder too, by compare-and-swap.

    Raises:
        UsageError: another tuner that is alive holds it.
    """
    us, token = this_process(), uuid.uuid4().hex
    now = clock()
    values = {
        "study": study,
        "token": token,
        "host": us.host,
        "boot": us.boot,
        "pid": us.pid,
        "pid_started": us.pid_started,
        "renewed_at": now,
        "expires_at": now + EXPIRES_S,
    }
    with engine.connect() as connection:
        row = connection.execute(sa.select(leases).where(leases.c.study == study)).first()
    if row is not None and alive(Holder(row.host, row.boot, row.pid, row.pid_started), row.expires_at, now):
        raise _held(study, row.host, row.pid)
    try:
        with engine.begin() as connection:
            if row is None:
                connection.execute(sa.insert(leases).values(values))
            else:
                theirs = (leases.c.study == study) & (leases.c.token == row.token)
                if connection.execute(sa.update(leases).where(theirs).values(values)).rowcount != 1:
                    raise _held(study, "another host or process", 0)
    except IntegrityError:
        raise _held(study, "another process", 0) from None
    return Lease(engine, study, token, clock)


def _held(study: str, host: str, pid: int) -> UsageError:
    who = f"process {pid} on {host}" if pid else host
    return UsageError(
        f"another tuner ({who}) is working on the study '{study}'. Nothing was started; wait for it, or end it and run "
        "the same again"
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
