"""SIGINT, SIGTERM and SIGHUP as one exception that ends a study in order; commits and teardown are shielded from it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user, or the system, wants the tuner to end. `signum` tells which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP, as shells have it."""
        return 128 + self.signum


class Interrupts:
    """Turns the first signal into `Interrupted`. Later ones change nothing: the server is being stopped already."""

    def __init__(self) -> None:
        self._shields = 0
        self._pending: int | None = None
        self._raised: int | None = None

    def check(self) -> None:
        """Raises again when an earlier signal has had no effect.

        Its exception is lost where Python can pass none on: in a destructor, or in a callback that C code calls.
        """
        if self._raised is not None:
            raise Interrupted(self._raised)

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handles the signals for the block; does nothing outside of the main thread.

        A SIGHUP that is ignored, as under `nohup`, stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """A signal within the block takes effect at its end."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if not self._shields and self._pending is not None and self._raised is None:
            self._raise(self._pending)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._raised is not None:
            return
        if self._shields:
            self._pending = signum
        else:
            self._raise(signum)

    def _raise(self, signum: int) -> None:
        self._raised = signum
        raise Interrupted(signum)
