"""Several workers on one simulated study, in virtual time: the real controllers, leases and database, no waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.engines.simulated.shared_time import SharedTime, WorkerClock
from tuner.study.data import StudyData
from tuner.study.place import Place
from tuner.study.progress import Observer, Silent
from tuner.study.session import run_study, seed_at
from tuner.study.simulated_world import SimulatedWorld
from tuner.study.store import StudyStore


@dataclass(frozen=True)
class FleetRun:
    """How a study went: its records, and the virtual seconds until the last worker had nothing left to do."""

    data: StudyData
    makespan_s: float


def run_fleet(
    open_store: Callable[[], StudyStore],
    folder: Path,
    speeds: Sequence[float],
    observer: Callable[[int], Observer] = lambda _worker: Silent(),
) -> FleetRun:
    """Runs a study to its end with one worker for each of `speeds`, which say how fast its host is.

    Args:
        open_store: opens the study; called once by every worker.
        folder: where logs would go.
        speeds: factors on the tokens per second of the simulated machine.
        observer: who is told of a worker's events.
    """
    shared = SharedTime()
    clocks = [shared.clock() for _ in speeds]
    failed: list[BaseException] = []

    def work(number: int, clock: WorkerClock) -> None:
        clock.begin()
        try:
            store = open_store()
            store.clock = clock
            try:
                data, place = store.data(), Place(f"host{number + 1}")
                world = SimulatedWorld(data.space, seed_at(data.seed, place), clock, speed=speeds[number])
                run_study(
                    store,
                    observer=observer(number),
                    world=world,
                    folder=folder / place.name,
                    clock=clock,
                    place=place,
                )
            finally:
                store.close()
        except BaseException as error:  # noqa: BLE001 - of a thread: raised again below
            failed.append(error)
        finally:
            clock.end()

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(clocks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    store = open_store()
    try:
        return FleetRun(store.data(), max(clock.now for clock in clocks))
    finally:
        store.close()
