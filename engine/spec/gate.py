"""When and how deep to speculate: with few requests a verify step is nearly free, with many it is not.

Decisions depend on batch sizes and acceptance alone, never on the clock, so that all ranks of a model agree.
"""

from __future__ import annotations

from bisect import bisect_right

from engine.config import DraftShape, SpecConfig

HOLD_ROUNDS = 8
"""A deeper depth is taken only after it has been called for this many rounds running; a shallower one at once.

A batch that hovers at a boundary would otherwise switch every few rounds.
"""


class SpecGate:
    """Decides the shape of each round from the number of running requests, and counts the switches."""

    def __init__(self, config: SpecConfig) -> None:
        self.config = config
        self._shape = config.shape
        table = config.steps_by_batch
        if table is None:
            table = ((1, config.num_steps),)
            if config.disable_batch_threshold is not None:
                table = (*table, (config.disable_batch_threshold + 1, 0))
        self._sizes = [size for size, _ in table]
        self._steps = [steps for _, steps in table]
        self._policy = Adaptive(config.num_steps) if config.policy == "adaptive" else None
        self.transitions = 0
        self.current: int | None = None
        self._waited = 0

    def shape(self, running: int) -> DraftShape:
        """Of a round with this many running requests."""
        wanted = self._steps[max(0, bisect_right(self._sizes, running) - 1)]
        if self._policy is not None and wanted:
            wanted = min(wanted, self._policy.steps(running))
        if self.current is None:
            self.current = wanted
        elif wanted <= self.current:
            self._waited = 0
            self._switch(wanted)
        else:
            self._waited += 1
            if self._waited >= HOLD_ROUNDS:
                self._waited = 0
                self._switch(wanted)
        return self._shape.limited(self.current)

    def shapes(self) -> tuple[DraftShape, ...]:
        """All that `shape` can give, the deepest first."""
        steps = set(self._steps)
        if self._policy is not None:
            steps |= {min(most, depth) for most in self._steps for depth in self._policy.depths}
        return tuple(self._shape.limited(depth) for depth in sorted(steps, reverse=True))

    def observe(self, steps: int, verified: int, accepted: int) -> None:
        """A round drafted `steps` deep for `verified` requests, and so many drafts were right in all."""
        if self._policy is not None and verified:
            self._policy.observe(steps, accepted / verified)

    def _switch(self, wanted: int) -> None:
        if wanted != self.current:
            self.transitions += 1
            self.current = wanted


class Adaptive:
    """Depth from a moving average of accepted drafts, among the depths that a batch size is worth.

    After SGLang's adaptive table (0.5.23, speculative/adaptive): deeper while nearly everything is accepted, shallower
    when even the next shallower depth would not be filled, and from 0 a look at the smallest depth now and then.
    """

    _WEIGHT, _WARM, _EVERY, _SLACK, _PROBE_EVERY = 0.2, 10, 5, 0.25, 200
    _TABLE = ((1, (1, 3, 5, 8)), (8, (0, 1, 3)), (32, (0, 1)), (64, (0,)))

    def __init__(self, num_steps: int) -> None:
        self._most = num_steps
        self._steps = num_steps
        self._average: float | None = None
        self._rounds = self._idle = 0

    @property
    def depths(self) -> frozenset[int]:
        """All that `steps` can give."""
        return frozenset(min(steps, self._most) for _, allowed in self._TABLE for steps in allowed)

    def steps(self, running: int) -> int:
        """For a round with this many running requests."""
        table = [steps for size, steps in self._TABLE if running >= size][-1]
        allowed = sorted({min(steps, self._most) for steps in table})
        if self._steps not in allowed:
            self._steps = max((s for s in allowed if s <= self._steps), default=allowed[0])
        if self._steps == 0:
            self._idle += 1
            if self._idle >= self._PROBE_EVERY and len(allowed) > 1:
                self._idle, self._rounds, self._average, self._steps = 0, 0, None, allowed[1]
            return self._steps
        self._idle = 0
        if self._average is None or self._rounds < self._WARM or self._rounds % self._EVERY:
            return self._steps
        at = allowed.index(self._steps)
        below = allowed[at - 1] if at else None
        if below is not None and self._average <= (below - 0.5 - self._SLACK if below else 0.5):
            self._steps = below
        elif at + 1 < len(allowed) and self._average > self._steps - 0.5:
            self._steps = allowed[at + 1]
        return self._steps

    def observe(self, steps: int, accepted: float) -> None:
        """A request's mean number of right drafts in a round of this depth."""
        if not steps:
            return
        self._rounds += 1
        old = self._average
        self._average = accepted if old is None else old + self._WEIGHT * (accepted - old)
