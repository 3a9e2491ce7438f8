"""Where rounds run: in the caller, on a thread of their own or queued on a device while the scheduler handles the round
before.

Work on a lane runs in the order in which it was given, and never two pieces at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Ticket(Generic[T]):
    """Work that was given to a lane."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def run(self) -> None:
        """Called by the lane, once."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`, in the thread that gave the work
            self._error = error
        self._done.set()

    def wait(self) -> T:
        """The result. Raises what the work raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Lane(Protocol):
    """See this module."""

    overlaps: bool
    """Whether the scheduler goes on to the next round before it asks for this one's outcome."""
    idle_s: float
    """Seconds between the end of a piece of work and the beginning of the next."""

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Run it after all that was submitted before."""
        ...

    def close(self) -> None:
        """Wait for what was submitted, and end."""
        ...


class InlineLane:
    """Runs work at once, in the caller: synchronous scheduling."""

    overlaps = False
    idle_s = 0.0

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """See `Lane.submit`."""
        ticket = Ticket(work)
        ticket.run()
        return ticket

    def close(self) -> None:
        """See `Lane.close`."""


class QueueLane(InlineLane):
    """Overlap where rounds run on a device: the caller only queues them there, and the device goes on beside it."""

    overlaps = True


class ThreadLane:
    """One worker thread. Kernels release Python's lock, so the scheduler's thread goes on beside it."""

    overlaps = True

    def __init__(self, trace: list[tuple[float, float]] | None = None) -> None:
        """`trace` is given the beginning and end of each piece of work, by `time.perf_counter`."""
        self._queue: queue.SimpleQueue[Ticket[Any] | None] = queue.SimpleQueue()
        self._trace = trace
        self.idle_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="lane", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """See `Lane.submit`."""
        ticket = Ticket(work)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """See `Lane.close`."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        ended = time.perf_counter()
        while (ticket := self._queue.get()) is not None:
            began = time.perf_counter()
            self.idle_s += began - ended
            ticket.run()
            ended = time.perf_counter()
            if self._trace is not None:
                self._trace.append((began, ended))
