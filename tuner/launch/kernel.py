"""What the kernel counts of the processes that it has ended for want of memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")


class OomWatch:
    """Whether the kernel has ended a process for want of memory since this was made.

    It counts by control group: ours, and those that a server's processes were seen in, which may have been moved to
    one with a limit of its own.

    Args:
        everywhere: count the machine in any case; what a container runtime starts is in a group that is soon gone.
        ours: a process whose group is counted from now on, ours by default.
    """

    def __init__(self, *, everywhere: bool = False, ours: str = "self") -> None:
        self._machine = _count(_MACHINE) or 0
        self._groups: dict[Path, int] = {}
        own = None if everywhere else counter_of(ours)
        self._everywhere = own is None
        if own is not None:
            self._groups[own] = _count(own) or 0

    def look(self, pids: Iterable[int]) -> None:
        """Notes the groups of processes, before they have ended and nobody can tell any more."""
        if self._everywhere:
            return
        for pid in pids:
            path = counter_of(str(pid))
            if path is not None and path not in self._groups:
                self._groups[path] = _count(path) or 0

    def killed(self) -> bool:
        """Whether any of the counters has risen; of a group that is gone, the machine's counts in its place."""
        now = {path: _count(path) for path in self._groups}
        if self._everywhere or None in now.values():
            return (_count(_MACHINE) or 0) > self._machine
        return any(count > self._groups[path] for path, count in now.items() if count is not None)


def counter_of(pid: str) -> Path | None:
    """The file with the counter of a process's own group, of either version of control groups; None without one."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {
        kind: path.lstrip("/") for kind, path in (line.split(":", 2)[1:] for line in lines if line.count(":") > 1)
    }
    found = []
    if "" in groups:
        found.append(_CGROUPS / groups[""] / "memory.events")
    if "memory" in groups:
        found.append(_CGROUPS / "memory" / groups["memory"] / "memory.oom_control")
    return next((path for path in found if _count(path) is not None), None)


def _count(path: Path) -> int | None:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == "oom_kill"), None)
    except (OSError, ValueError, IndexError):
        return None
