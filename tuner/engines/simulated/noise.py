"""What makes two equal measurements differ: within a launch, from launch to launch, and over the hours."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """Standard deviations, relative. Drift is the change from the study's start to its end, in either direction.

    `autocorrelation` is that of neighbouring blocks, across launches as well: what disturbs a machine lasts.
    """

    block_sd: float = 0.012
    launch_sd: float = 0.006
    drift: float = 0.015
    autocorrelation: float = 0.6

    def times(self, factor: float) -> Noise:
        """The same, so many times as large."""
        return Noise(self.block_sd * factor, self.launch_sd * factor, self.drift * factor, self.autocorrelation)


class Disturbance:
    """The noise of one study: a function of its seed and of the order of what is asked."""

    def __init__(self, noise: Noise, seed: int, horizon_s: float) -> None:
        self.noise = noise
        self.horizon_s = horizon_s
        self._random = random.Random(seed)
        self._direction = self._random.choice((-1.0, 1.0))
        self._block = self._random.gauss(0.0, noise.block_sd)
        self._launch = 0.0

    def launched(self) -> None:
        """Another launch: with its own effect."""
        self._launch = self._random.gauss(0.0, self.noise.launch_sd)

    def factor(self, elapsed_s: float, share: float = 1.0) -> float:
        """By what the next block's rate is off, `elapsed_s` after the study began; more in a part of the window."""
        keep = self.noise.autocorrelation
        fresh = self._random.gauss(0.0, self.noise.block_sd)
        self._block = keep * self._block + math.sqrt(1 - keep * keep) * fresh
        drift = self._direction * self.noise.drift * (elapsed_s / self.horizon_s - 0.5)
        part = self._random.gauss(0.0, self.noise.block_sd * math.sqrt(1 / share - 1)) if share < 1 else 0.0
        return math.exp(self._block + part + self._launch + drift)
