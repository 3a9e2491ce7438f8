"""Signals that ask the tuner to end, as one exception that ends a study in order; commits and teardown are shielded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user, or the system, wants the tuner to end. `signum` tells which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP, and so on, as shells have it."""
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

        They are SIGINT, SIGTERM, SIGHUP and SIGXCPU; one of the latter that is ignored, as under `nohup`, stays so.
        Workers of a dead server may send SIGQUIT, SIGUSR1 or SIGUSR2 to whoever their parent has become, and that is
        the tuner, which takes up orphans: they have no effect, but for SIGQUIT at a terminal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        end = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = dict.fromkeys(end, self._handle)
        handlers |= dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), _let_be)
        handlers[signal.SIGQUIT] = self._handle if _at_a_terminal() else _let_be
        ours = (signal.SIGINT, signal.SIGTERM)
        chosen = [n for n in handlers if n in ours or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, handlers[number]) for number in chosen}
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


def _let_be(_signum: int, _frame: FrameType | None) -> None:
    """Not `SIG_IGN`, which servers would inherit."""


def _at_a_terminal() -> bool:
    """Whether somebody sits there who may press ctrl-\\."""
    try:
        return os.isatty(0)
    except OSError:
        return False
