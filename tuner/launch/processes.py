"""Who belongs to a server: its process family, found by marker, session, ancestry and memory of earlier looks.

No single one of these is enough. A worker that leaves the session escapes the group, one whose parent has died
escapes the walk from parent to child, and one that rewrites its title may overwrite the environment that holds the
marker. Together they miss nothing that any of them would find.

Everything here reads `/proc`. Elsewhere `snapshot` is empty and a family is the server's process group alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

MARKER = "SPEC_TUNER_MARKER"
"""The environment variable that every process of a launch inherits."""

KEEPS_ENVIRONMENT = "SPT_NOENV"
"""Tells `setproctitle` to leave the environment, and with it the marker, as it is."""

_PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""Clock ticks per second, the unit of start times in /proc."""


@dataclass(frozen=True)
class Process:
    """One process at one moment. `started` (ticks since boot) tells it from a later one of the same pid."""

    pid: int
    ppid: int
    group: int
    session: int
    started: int
    cpu_s: float
    zombie: bool

    @property
    def key(self) -> tuple[int, int]:
        """What identifies a process for good: its pid and when it started."""
        return self.pid, self.started


def marker_text(marker: Mapping[str, str]) -> str:
    """One spelling of a marker: `key=value;` in order. The text of the first entries is a prefix of the whole."""
    return "".join(f"{quote(key, safe='')}={quote(value, safe='')};" for key, value in marker.items())


def snapshot() -> dict[int, Process]:
    """Every process that can be seen, by pid; empty where there is no /proc."""
    found = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    for name in names:
        if name.isdigit() and (process := look(int(name))):
            found[process.pid] = process
    return found


def look(pid: int) -> Process | None:
    """This process now; None when there is none (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, parentheses and spaces included.
    fields = text[text.rindex(")") + 2 :].split()
    # A process whose first thread has ended looks like a zombie, and serves on as long as another thread lives.
    dead = fields[0] in "ZX" and int(fields[17]) <= 1
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS,
        zombie=dead,
    )


def marker_of(pid: int) -> str | None:
    """The marker in a process's initial environment; None when it has none or may not be read."""
    return _marker_in(_environment(pid))


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()


def _marker_in(environment: Iterable[bytes]) -> str | None:
    prefix = MARKER.encode() + b"="
    for entry in environment:
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def pid_namespace() -> str:
    """Which numbering of processes we see; "" where there is none. Pids mean nothing in another one."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def ourselves(processes: Mapping[int, Process]) -> frozenset[int]:
    """This process and its ancestors: never to be signalled, whatever marker they carry."""
    found = {os.getpid(), os.getppid(), 1}
    pid = os.getppid()
    while (process := processes.get(pid)) and process.ppid not in found:
        pid = process.ppid
        found.add(pid)
    return frozenset(found)


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> set[int]:
    """`roots` and everything below them that is still linked to them by parent."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    open_ = list(roots)
    while open_:
        pid = open_.pop()
        if pid not in found:
            found.add(pid)
            open_ += children.get(pid, [])
    return found


class Family:
    """The processes of one launch, remembered across looks.

    A process that empties its environment, leaves the session and outlives its parent is re-parented to us
    (`adopt_orphans`): what we did not start ourselves and was not there before is of the launch, too.

    Args:
        pid: the server, which leads its own session and process group.
        marker: the marker's text in its environment, unique to this launch.
        helper: a process of ours that carries the marker and is not of the family: the one that writes the log.
        adopts: whether orphans count. Not with a container runtime, which keeps processes beyond one container.
    """

    def __init__(
        self,
        pid: int,
        marker: str,
        helper: Callable[[], int | None] = lambda: None,
        adopts: bool = True,
    ) -> None:
        self.pid = pid
        self.marker = marker
        self._helper = helper
        self._lock = threading.RLock()
        leader = look(pid)
        self._leader_started = leader.started if leader else None
        self._known: set[tuple[int, int]] = {leader.key} if leader else set()
        self._adopts = adopts
        below_us = descendants([os.getpid()], processes := snapshot()) - descendants([pid], processes)
        self._before = {processes[other].key for other in below_us if other in processes}
        self._suspects: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()

    @property
    def key(self) -> tuple[int, int]:
        """Of the server."""
        return self.pid, self._leader_started or 0

    @property
    def settled(self) -> bool:
        """Whether the last look saw no orphan that only a second one can tell from a process in the making."""
        return not self._suspects - self._known

    def members(self) -> list[Process]:
        """Everything of the family that exists now, zombies included."""
        with self._lock:
            return self._members()

    def _members(self) -> list[Process]:
        processes = snapshot()
        leader = processes.get(self.pid)
        # A group id is never reused while a member lives, so only a foreign leader of that pid makes it foreign.
        group_is_ours = leader is None or leader.started == self._leader_started
        seeds = self._orphans(processes)
        for process in processes.values():
            known = process.key in self._known
            grouped = group_is_ours and self.pid in (process.group, process.session)
            if known or grouped or (not process.zombie and marker_of(process.pid) == self.marker):
                seeds.add(process.pid)
        pids = descendants(seeds, processes) - ourselves(processes) - {self._helper()}
        found = [processes[pid] for pid in sorted(pids)]
        self._known.update(process.key for process in found)
        return found

    def _orphans(self, processes: Mapping[int, Process]) -> set[int]:
        """Children of ours that we did not start: seen twice, for one that is about to be executed looks alike."""
        me = processes.get(os.getpid())
        if not self._adopts or me is None:
            return set()
        suspects = {
            process.key
            for process in processes.values()
            if process.ppid == me.pid
            and process.session not in (me.session, self.pid)  # what a server starts can never enter our session
            and process.key not in self._before
            and process.key not in self._known
            and process.pid != self._helper()
            and not process.zombie
            and _is_foreign(process.pid)
        }
        again, self._suspects = suspects & self._suspects, suspects
        self._seen |= suspects
        return {pid for pid, _ in again}

    def living(self) -> list[Process]:
        """The members that run: zombies are only waiting to be noticed by their parent."""
        return [process for process in self.members() if not process.zombie]

    def reap(self) -> None:
        """Collects those zombies that were re-parented to us (`adopt_orphans`); the server itself is its owner's."""
        me = os.getpid()
        self.members()
        with self._lock:
            keys = self._known | self._seen
        for process in snapshot().values():
            if process.key in keys and process.zombie and process.ppid == me and process.pid != self.pid:
                try:
                    os.waitpid(process.pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def _is_foreign(pid: int) -> bool:
    """Whether a child of ours was started by somebody else: what we start has our environment, or another's marker."""
    environment = _environment(pid)
    if _marker_in(environment) is not None or _command(pid) == _command(os.getpid()):
        return False
    ours = {os.fsencode(f"{name}={value}") for name, value in os.environ.items()}
    flagged = any(entry.startswith(KEEPS_ENVIRONMENT.encode()) for entry in environment - ours)
    return flagged or not ours <= environment


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def sockets(pid: int) -> frozenset[int]:
    """Inodes of the sockets that a process holds open; empty when it is gone or may not be read."""
    if found := _sockets(f"/proc/{pid}/fd"):
        return found
    # Of a process whose first thread has ended only the others tell.
    threads = [name for name in _names(f"/proc/{pid}/task") if name != str(pid)]
    return next((found for name in threads if (found := _sockets(f"/proc/{pid}/task/{name}/fd"))), frozenset())


def _sockets(folder: str) -> frozenset[int]:
    found = set()
    for descriptor in _names(folder):
        try:
            target = os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def bytes_read(pid: int) -> int:
    """Bytes that a process has read so far, from disk or by call; 0 when it cannot be told."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ") for line in lines)
    # `rchar` misses a memory-mapped file and `read_bytes` a cached one.
    return int(values["rchar"]) + int(values["read_bytes"])


def send(process: Process, number: signal.Signals) -> bool:
    """Signals exactly this process, never a later one with its pid. False when it was gone or may not be signalled."""
    if process.pid in (os.getpid(), os.getppid(), 1):
        raise ValueError(f"refusing to signal process {process.pid}: it is not part of a server")
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return _send_by_pid(process, number)
    try:
        current = look(process.pid)
        if current is None or current.started != process.started:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def _send_by_pid(process: Process, number: signal.Signals) -> bool:
    current = look(process.pid)
    if current is None or current.started != process.started:
        return False
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.02) -> bool:
    """Whether `condition` came true within the time; it is asked at least once."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def adopt_orphans() -> bool:
    """Makes this process the parent of descendants whose own parent dies (Linux); False where there is no such thing.

    Without it they would go to PID 1 and, in a container whose PID 1 does not reap, stay as zombies for good.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
