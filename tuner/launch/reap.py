"""Ends what an earlier tuner left behind, known by the marker, or by the note of its launch where that is gone."""

from __future__ import annotations

import signal

from tuner.launch import shm
from tuner.launch.marker import same_namespace
from tuner.launch.notes import notes
from tuner.launch.processes import (
    Process,
    descendants,
    marker_of,
    ourselves,
    send,
    snapshot,
    wait_until,
)


def marked(marker_prefix: str) -> list[Process]:
    """The living processes whose marker begins with `marker_prefix`, and their descendants; never ourselves.

    A launch of a tuner in another PID namespace is as one on another host: its processes are let be.

    Raises:
        ValueError: for an empty prefix, which would match the servers of every study.
    """
    if not marker_prefix:
        raise ValueError("a marker prefix is needed: an empty one would match every study's servers")
    processes = snapshot()
    seeds = {
        pid
        for pid, process in processes.items()
        if not process.zombie and (marker := marker_of(pid) or "").startswith(marker_prefix) and same_namespace(marker)
    }
    for note in notes():
        if note.marker.startswith(marker_prefix):
            seeds |= note.living(processes)
    found = descendants(seeds - ourselves(processes), processes) - ourselves(processes)
    return [processes[pid] for pid in sorted(found) if not processes[pid].zombie]


def reap(marker_prefix: str, grace_s: float = 3.0, gone_s: float = 10.0) -> list[int]:
    """Ends every process whose marker begins with `marker_prefix`; returns the pids that were found.

    SIGTERM first, SIGKILL after `grace_s`. A process that the system will not let go (for instance one that waits
    in a driver) is still listed by `marked` afterwards.
    """
    first = marked(marker_prefix)
    found = {process.key: process for process in first}
    for process in first:
        send(process, signal.SIGTERM)

    def gone() -> bool:
        # A member found earlier may have lost its link to the marked ones: ask for it by pid and start time.
        processes = snapshot()
        for process in marked(marker_prefix):
            found[process.key] = process
        return not any(
            (current := processes.get(pid)) and current.started == started and not current.zombie
            for pid, started in found
        )

    if first and not wait_until(gone, grace_s):

        def killed() -> bool:
            if gone():
                return True
            for process in found.values():
                send(process, signal.SIGKILL)
            return False

        wait_until(killed, gone_s)
    clear_notes(marker_prefix)
    return sorted(pid for pid, _ in found)


def clear_notes(marker_prefix: str) -> list[str]:
    """Removes the segments of noted launches that have no process any more, and their notes; what stays, by name."""
    stay: list[str] = []
    processes = snapshot()
    for note in notes():
        if not note.marker.startswith(marker_prefix) or note.living(processes):
            continue
        _, left = shm.remove(shm.noted(note.segments))
        stay += left
        if not left:
            note.drop()
    return stay
