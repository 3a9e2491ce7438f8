"""What earlier tuners left behind: processes and containers of a launch whose tuner is dead, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.launch import container, shm
from tuner.launch.marker import orphaned, parse_marker
from tuner.launch.notes import Note, notes
from tuner.launch.ports import listening
from tuner.launch.processes import Process, marker_of, ourselves, snapshot, sockets
from tuner.launch.reap import marked, reap

__all__ = ["Leftover", "clean", "leftovers", "orphaned", "parse_marker"]


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
        if not found and not self.containers:
            return f"shared memory {', '.join(self.segments)}"
        return ", ".join([*found, *(f"{runtime} container {name[:12]}" for runtime, name in self.containers)])


def leftovers(folder: Path = shm.FOLDER) -> list[Leftover]:
    """Every launch of a dead tuner of which something is left; those of a living one are at work."""
    processes = snapshot()
    ours = ourselves(processes)
    by_marker: dict[str, list[Process]] = {}
    for pid, process in processes.items():
        if pid not in ours and not process.zombie and (marker := marker_of(pid)):
            by_marker.setdefault(marker, []).append(process)
    noted = {note.marker: note for note in notes()}
    for note in noted.values():
        known = by_marker.setdefault(note.marker, [])
        missing = note.living(processes) - ours - {process.pid for process in known}
        known += [processes[pid] for pid in missing]
    contained: dict[str, list[tuple[str, str]]] = {}
    for runtime in container.RUNTIMES:
        for state in container.everything(runtime):
            contained.setdefault(state.marker, []).append((runtime, state.id))
    found = [
        _leftover(marker, by_marker.get(marker, []), contained.get(marker, []), folder, noted.get(marker))
        for marker in sorted({*by_marker, *contained})
        if orphaned(marker)
    ]
    return [left for left in found if left.pids or left.containers or left.segments]


def _leftover(
    marker: str, members: list[Process], containers: list[tuple[str, str]], folder: Path, note: Note | None
) -> Leftover:
    names = parse_marker(marker)
    inodes = frozenset[int]().union(*(sockets(process.pid) for process in members))
    held = {segment.inode for segment in shm.noted(note.segments if note else (), folder)}
    held |= set[int]().union(*(shm.held(process.pid, folder) for process in members))
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
        problems += [f"process {process.pid} cannot be ended" for process in marked(leftover.marker)]
    return problems
