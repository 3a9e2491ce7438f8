"""Who computes on the GPUs that a study is to have, and is no server that a dead tuner has left."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.launch import container, gpu
from tuner.launch.gpu import GpuProcess
from tuner.launch.marker import orphaned
from tuner.launch.notes import notes
from tuner.launch.processes import descendants, marker_of, snapshot

LEAST_MIB = 512
"""A process that holds less is no more than a context: it is told of, and keeps nothing from being launched."""


def strangers(devices: Sequence[str] = (), *, but_ours: bool = False) -> list[GpuProcess]:
    """Processes that hold memory of these GPUs (all where none is named), but for what a dead tuner has left there.

    That is ended before anything is launched, or by `tuner doctor --clean`. With `but_ours` the servers of living
    tuners are none either.
    """
    found = [one for one in gpu.processes(devices) if one.used_mib is None or one.used_mib >= LEAST_MIB]
    ours = _ours(but_ours) if found else set()
    return [one for one in found if one.pid not in ours]


def held_unseen(devices: Sequence[str], share: float) -> list[gpu.Gpu]:
    """Of these GPUs those without room for such a share of their memory, though nobody is listed on any of them.

    So it is in a container, where the processes of its host are not listed.
    """
    if gpu.processes(devices):
        return []
    return [
        one
        for one in gpu.gpus()
        if str(one.index) in devices and one.memory_mib is not None and one.used_mib is not None
        if one.used_mib > LEAST_MIB + (1 - share) * one.memory_mib
    ]


def _ours(living: bool) -> set[int]:
    """Processes of servers that a dead tuner has left, and those of living ones if asked for."""
    processes = snapshot()

    def counts(marker: str | None) -> bool:
        return bool(marker) and (living or orphaned(str(marker)))

    seeds = {pid for pid in processes if counts(marker_of(pid))}
    for note in notes():
        seeds |= note.living(processes) if counts(note.marker) else set()
    for runtime in container.RUNTIMES:
        seeds |= {state.pid for state in container.everything(runtime) if state.pid and counts(state.marker)}
    return descendants(seeds, processes)
