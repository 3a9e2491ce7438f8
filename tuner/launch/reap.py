"""Ends what an earlier tuner left behind, known by the marker alone."""

from __future__ import annotations

import signal

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

    Raises:
        ValueError: for an empty prefix, which would match the servers of every study.
    """
    if not marker_prefix:
        raise ValueError("a marker prefix is needed: an empty one would match every study's servers")
    processes = snapshot()
    seeds = {
        pid
        for pid, process in processes.items()
        if not process.zombie and (marker_of(pid) or "").startswith(marker_prefix)
    }
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
    return sorted(pid for pid, _ in found)
