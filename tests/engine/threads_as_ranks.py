"""Ranks as threads of one process: the same code as in processes, seconds faster to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from engine.collectives.base import Choice, Group, Place, backend
from engine.errors import EngineError

T = TypeVar("T")


class ThreadCrew:
    """One rank's side; the values of an exchange meet in a list."""

    def __init__(self, group: Group, name: str, values: list[Any], barrier: threading.Barrier) -> None:
        self.group, self._values, self._barrier = group, values, barrier
        self.choice: Choice | None = Choice(name, "for a test", True)

    def exchange(self, value: Any) -> list[Any]:
        self._values[self.group.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def tell(self, message: Any) -> None:
        """Every thread is driven by itself."""

    def await_message(self, connection: Connection) -> None: ...

    def explain(self, error: BaseException) -> BaseException:
        return error

    def dismiss(self) -> None: ...

    def close(self) -> None: ...


def on_ranks(ranks: int, work: Callable[[ThreadCrew], T], name: str = "shm", timeout_s: float = 30.0) -> list[T]:
    """What `work` gives on every rank. Raises the first rank's error, if one fails."""
    place, chosen = Place(ranks), backend(name)
    meeting = chosen.meeting(place)
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=60)
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            collective = chosen.open(meeting, rank, place, timeout_s)
            results[rank] = work(ThreadCrew(Group(rank, ranks, collective), name, values, barrier))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors[rank] = error
            if not isinstance(error, EngineError):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meeting.close()
    causes = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)] or list(errors.values())
    if causes:
        raise causes[0]
    return results
