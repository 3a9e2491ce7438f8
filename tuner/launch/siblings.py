"""What the other workers of a study compute on this host: they share it by right, and are no strangers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tuner.launch.processes import Process, descendants, marker_of, snapshot


class SiblingLoad:
    """CPU seconds of other tuners on this host and of the servers of their study.

    The figure never falls: what a process had spent when it was last seen stays counted once it has ended.

    Args:
        tuners: the pids of the other tuners, now.
        study: how the markers of this study's servers begin.
    """

    def __init__(self, tuners: Callable[[], Iterable[int]], study: str) -> None:
        self._tuners = tuners
        self._study = study
        self._seen: dict[tuple[int, int], float] = {}

    def cpu_s(self, ours: Iterable[int]) -> float:
        """What they have spent; `ours` are processes that are counted elsewhere, with all below them."""
        tuners = set(self._tuners())
        if tuners:
            processes = snapshot()
            mine = descendants(ours, processes) | set(ours)
            for process in self._family(tuners, processes):
                if process.pid not in mine:
                    self._seen[process.key] = process.cpu_s
        return sum(self._seen.values())

    def _family(self, tuners: set[int], processes: dict[int, Process]) -> list[Process]:
        pids = descendants(tuners, processes) | (tuners & processes.keys())
        # A server may have left its tuner's family; its marker tells.
        pids |= {pid for pid in processes if (marker_of(pid) or "").startswith(self._study)}
        return [processes[pid] for pid in pids]
