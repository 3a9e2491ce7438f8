"""Time in which we ran ourselves, and time that nobody puts back or forward."""

from __future__ import annotations

import time
from collections.abc import Callable

GAP_S = 5.0
"""Between two looks that should be some 50 ms apart: we were stopped, not slow."""


class RunningClock:
    """Seconds that count against deadlines: a tuner that was stopped for an hour has not waited for an hour.

    `now` has to be asked often: a gap between two questions does not count.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._lost = 0.0

    @property
    def stopped(self) -> bool:
        """Whether there was such a gap."""
        return self._lost > 0

    def now(self) -> float:
        """Seconds, from no particular start."""
        real = time.monotonic()
        if real - self._last > GAP_S:
            self._lost += real - self._last
        self._last = real
        return real - self._lost


def steady() -> Callable[[], float]:
    """A clock of seconds since the epoch that goes on from now, whatever becomes of the system's."""
    wall, began = time.time(), time.monotonic()
    return lambda: wall + time.monotonic() - began
