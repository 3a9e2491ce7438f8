"""When to speculate: with few requests a verify step is nearly free, with many it is not."""

from __future__ import annotations

from engine.config import SpecConfig


class SpecGate:
    """Decides the draft depth from the number of running requests, and counts the switches."""

    def __init__(self, config: SpecConfig) -> None:
        self._steps = config.num_steps
        self._threshold = config.disable_batch_threshold
        self.transitions = 0
        self._on: bool | None = None

    @property
    def threshold(self) -> int | None:
        """Speculation is on up to this many running requests; None: always."""
        return self._threshold

    @property
    def steps_when_on(self) -> int:
        """Draft depth while speculation is on."""
        return self._steps

    def steps(self, running: int) -> int:
        """Draft depth for a round of this many running requests."""
        on = self._threshold is None or running <= self._threshold
        if self._on is not None and on != self._on:
            self.transitions += 1
        self._on = on
        return self._steps if on else 0
