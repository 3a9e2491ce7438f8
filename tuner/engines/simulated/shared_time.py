"""Virtual time that several workers share: of all, only the one that is furthest behind runs, so that none sees the
future of another. Every worker is a thread with a clock of its own.
"""

from __future__ import annotations

import threading

from tuner.engines.simulated.blocks import Clock


class SharedTime:
    """The order in which workers run. Make all clocks first, then start the threads."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start
        self._turn = threading.Condition()
        self._at: dict[int, float] = {}

    def clock(self) -> WorkerClock:
        """The clock of one more worker."""
        number = len(self._at)
        self._at[number] = self.start
        return WorkerClock(self, number)

    def wait(self, worker: int, until: float) -> None:
        """Lets the others run until this worker is the one furthest behind, at this time."""
        with self._turn:
            self._at[worker] = until
            self._turn.notify_all()
            self._turn.wait_for(lambda: min(self._at, key=lambda one: (self._at[one], one)) == worker)

    def leave(self, worker: int) -> None:
        """A worker has ended: nobody waits for it any more."""
        with self._turn:
            del self._at[worker]
            self._turn.notify_all()


class WorkerClock(Clock):
    """A clock whose time passes only when it is this worker's turn."""

    def __init__(self, shared: SharedTime, worker: int) -> None:
        self._shared = shared
        self._worker = worker
        self._now = shared.start

    @property
    def now(self) -> float:
        """The time."""
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        self._shared.wait(self._worker, value)
        self._now = value

    def begin(self) -> None:
        """Waits for the first turn."""
        self.now = self._now

    def end(self) -> None:
        """Ends the worker; its time stands still."""
        self._shared.leave(self._worker)
