"""What the kernel counts of the processes that it has ended for want of memory."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(*, everywhere: bool = False) -> tuple[int, ...]:
    """Counters that rise with each process so ended: of our own control group, where it can be read, or the machine.

    `everywhere`: of the machine in any case; what a container runtime starts is in a group of its own.
    """
    own = None if everywhere else _own()
    found = own if own is not None else _counter(Path("/proc/vmstat"))
    return () if found is None else (found,)


def _own() -> int | None:
    """That of our own group, of either version of control groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {
        kind: path.lstrip("/") for kind, path in (line.split(":", 2)[1:] for line in lines if line.count(":") > 1)
    }
    if "" in groups and (found := _counter(_CGROUPS / groups[""] / "memory.events")) is not None:
        return found
    return _counter(_CGROUPS / "memory" / groups["memory"] / "memory.oom_control") if "memory" in groups else None


def _counter(path: Path) -> int | None:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == "oom_kill"), None)
    except (OSError, ValueError, IndexError):
        return None
