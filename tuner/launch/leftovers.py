"""What earlier tuners left behind: processes and containers with our marker whose tuner is dead, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from tuner.launch import container, shm
from tuner.launch.ports import listening
from tuner.launch.processes import Process, look, marker_of, ourselves, snapshot, sockets
from tuner.launch.reap import reap


@dataclass(frozen=True)
class Leftover:
    """One launch whose tuner is dead: its marker, its processes, the ports they listen on, the segments they hold.

    `containers` are its containers, as (runtime, id); they are known by their label.
    """

    marker: str
    study: str
    launch: str
    pids: tuple[int, ...]
    ports: tuple[int, ...]
    segments: tuple[str, ...]
    containers: tuple[tuple[str, str], ...] = ()

    @property
    def named(self) -> str:
        """What still runs, in words."""
        found = [f"process {pid}" for pid in self.pids]
        return ", ".join([*found, *(f"{runtime} container {name[:12]}" for runtime, name in self.containers)])


def parse_marker(text: str) -> dict[str, str]:
    """The entries of a marker; `marker_text` reversed."""
    entries = (entry.partition("=") for entry in text.split(";") if "=" in entry)
    return {unquote(key): unquote(value) for key, _, value in entries}


def orphaned(marker: str) -> bool:
    """Whether the tuner that a marker names is dead. A marker that names none is left alone."""
    pid, _, started = parse_marker(marker).get("tuner", "").partition(".")
    if not (pid.isdigit() and started.isdigit()):
        return False
    tuner = look(int(pid))
    return tuner is None or tuner.zombie or tuner.started != int(started)


def leftovers(folder: Path = shm.FOLDER) -> list[Leftover]:
    """Every launch of a dead tuner that still has processes; those of a living one are at work."""
    processes = snapshot()
    ours = ourselves(processes)
    by_marker: dict[str, list[Process]] = {}
    for pid, process in processes.items():
        if pid not in ours and not process.zombie and (marker := marker_of(pid)):
            by_marker.setdefault(marker, []).append(process)
    contained: dict[str, list[tuple[str, str]]] = {}
    for runtime in container.RUNTIMES:
        for state in container.everything(runtime):
            contained.setdefault(state.marker, []).append((runtime, state.id))
    return [
        _leftover(marker, by_marker.get(marker, []), contained.get(marker, []), folder)
        for marker in sorted({*by_marker, *contained})
        if orphaned(marker)
    ]


def _leftover(marker: str, members: list[Process], containers: list[tuple[str, str]], folder: Path) -> Leftover:
    names = parse_marker(marker)
    inodes = frozenset[int]().union(*(sockets(process.pid) for process in members))
    held = set[int]().union(*(shm.held(process.pid, folder) for process in members))
    return Leftover(
        marker=marker,
        study=names.get("study", "?"),
        launch=names.get("launch", "?"),
        pids=tuple(sorted(process.pid for process in members)),
        ports=tuple(sorted({port for port, inode in listening() if inode in inodes})),
        segments=tuple(sorted(s.name for s in shm.snapshot(folder).values() if s.inode in held)),
        containers=tuple(sorted(containers)),
    )


def clean(found: list[Leftover], grace_s: float = 3.0, folder: Path = shm.FOLDER) -> list[str]:
    """Ends those processes and containers, and removes those segments; returns what could not be cleared, in words."""
    problems = []
    for leftover in found:
        if not orphaned(leftover.marker):
            continue
        before = shm.snapshot(folder)
        for runtime, name in leftover.containers:
            if not container.end(runtime, name, grace_s):
                problems.append(f"{runtime} container {name[:12]} cannot be removed")
        reap(leftover.marker, grace_s=grace_s)
        _, left = shm.remove([before[name] for name in leftover.segments if name in before], folder)
        problems += [f"segment {name} cannot be removed" for name in left]
        for pid in leftover.pids:
            if (process := look(pid)) and not process.zombie and marker_of(pid) == leftover.marker:
                problems.append(f"process {pid} cannot be ended")
    return problems
