"""Blocks straight from the model, on a clock that only blocks and launches move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.engines.simulated.machine import Profile, Work, predict
from tuner.engines.simulated.noise import Disturbance, Noise
from tuner.records import Block, Gate, Percentiles, Role

LAUNCH_S = 60.0
BLOCK_S = 45.0
WARMUP_S = 10.0
HORIZON_S = 24 * (LAUNCH_S + 2 * BLOCK_S)
"""A study of the default budget at two levels: the time over which drift is counted."""

REQUESTS_PER_STREAM = 5
UNKNOWN = Percentiles(0, None, None, None, None)
MARK = Gate("simulated", 0.0, 0.0, True, "from a model of a machine; nothing was measured")
"""The only gate of a simulated block: nothing was sent, so nothing can have gone wrong."""

Truth = Callable[[Mapping[str, Any], int], float]
"""Settings and level → tokens per second without noise."""


class Clock:
    """Seconds that pass when something is simulated."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        """The time."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


class BlockSource:
    """One simulated study's blocks. `truth` is the machine; seeds that are equal give equal studies."""

    def __init__(
        self, truth: Truth, noise: Noise, seed: int, *, clock: Clock | None = None, horizon_s: float = HORIZON_S
    ) -> None:
        self.truth = truth
        self.clock = clock or Clock()
        self._begin = self.clock.now
        self._disturbance = Disturbance(noise, seed, horizon_s)

    def launch(self) -> None:
        """A server start."""
        self.clock.now += LAUNCH_S
        self._disturbance.launched()

    def block(self, settings: Mapping[str, Any], level: int, role: Role, share: float = 1.0) -> Block:
        """One measured level of the server that was launched last, in this share of the window."""
        rate = self.truth(settings, level) * self._disturbance.factor(self.clock.now - self._begin, share)
        started = self.clock.now + WARMUP_S
        window_s = share * (BLOCK_S - WARMUP_S)
        self.clock.now += WARMUP_S + window_s
        return block(level, role, rate, started_at=started, window_s=window_s)


def profile_truth(profile: Profile, work: Work) -> Truth:
    """A profile's predictions as a truth."""
    return lambda settings, level: predict(profile, settings, level, work).tokens_per_s


def block(
    level: int,
    role: Role,
    rate: float,
    *,
    started_at: float = 0.0,
    window_s: float = BLOCK_S - WARMUP_S,
    output_tokens: float = 200.0,
    accept_length: float | None = None,
) -> Block:
    """A block of this rate, marked as simulated. Latencies are left unknown."""
    return Block(
        concurrency=level,
        role=role,
        prompt_ids=(),
        started_at=started_at,
        warmup_s=WARMUP_S,
        window_s=window_s,
        tokens=rate * window_s,
        tokens_per_s=rate,
        per_stream_tokens_per_s=rate / level,
        requests=REQUESTS_PER_STREAM * level,
        failed_requests=0,
        mean_output_tokens=output_tokens,
        achieved_concurrency=float(level),
        ttft_ms=UNKNOWN,
        tpot_ms=UNKNOWN,
        chunk_gap_ms=UNKNOWN,
        e2e_ms=UNKNOWN,
        accept_length=accept_length,
        gates=(MARK,),
        counters={"simulated": 1.0},
    )
