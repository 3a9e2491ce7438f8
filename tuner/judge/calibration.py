"""What A/A launches, the baseline against itself, say about a machine's noise, and how many pairs that asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.judge.intervals import ALPHA, MIN_PAIRS, PAIR_SD_FLOOR, block_variance
from tuner.judge.verdict import detectable_gain

MAX_PAIRS = 32
"""More pairs than this are no answer to noise; a quieter machine is. Longer windows need not be: on a shared host speed
wandered by as much from one 30 s to the next as from one 4 s to the next (docs/measuring.md)."""

GAIN = 0.05
"""The true gain that the default number of pairs is to find four times in five."""

CAUTION = 0.8
"""Of the upper bound of a pair's SD."""


@dataclass(frozen=True)
class Window:
    """One measured window: of which launch, the how-manyth at its level, output tokens per second, their 1-s series."""

    launch: int
    concurrency: int
    number: int
    tokens_per_s: float
    series: tuple[float, ...] = ()


@dataclass(frozen=True)
class LevelNoise:
    """Relative standard deviations at one level: of a window's mean by its own seconds, between windows of a launch,
    and between launches (what windows leave over; 0 when it drowns in them)."""

    concurrency: int
    within_window: float
    between_windows: float | None
    between_launches: float


@dataclass(frozen=True)
class Calibration:
    """Noise by level, and what follows. `pairs` None: even `MAX_PAIRS` would not find `gain` four times in five.

    `pair_sd` is the SD of a pair's composite log ratio, from successive launches, and `pair_sd_high` its upper bound at
    80 %, which counts: few launches tell a spread badly, and too few pairs cost a study its answer. `detectable` is the
    gain that `pairs` (or `MAX_PAIRS`) would find, `launches` a budget of that many pairs and eight candidates.
    """

    levels: tuple[LevelNoise, ...]
    pair_sd: float
    pair_sd_high: float
    gain: float
    pairs: int | None
    detectable: float

    @property
    def launches(self) -> int:
        """Baseline, eight candidates, one refreshed baseline, and the confirmation of one finalist."""
        return 10 + 2 * (self.pairs or MAX_PAIRS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        levels = [
            {
                "concurrency": level.concurrency,
                "within_window": level.within_window,
                "between_windows": level.between_windows,
                "between_launches": level.between_launches,
            }
            for level in self.levels
        ]
        own = {
            "pair_sd": self.pair_sd,
            "pair_sd_high": self.pair_sd_high,
            "gain": self.gain,
            "pairs": self.pairs,
            "detectable": self.detectable,
        }
        return {"levels": levels, **own, "launches": self.launches}


def calibrate(windows: Sequence[Window], weights: Mapping[int, float], *, gain: float = GAIN) -> Calibration:
    """The noise in A/A windows; launches in the order in which they were made, at least four of them.

    A pair is two neighbouring launches, so its SD comes from the differences of neighbours: drift over the hours is in
    no pair, and is not counted.

    Raises:
        ValueError: fewer launches, a level without a window in one of them, or a window without a rate.
    """
    from scipy import stats

    launches = sorted({window.launch for window in windows})
    if len(launches) < MIN_PAIRS:
        raise ValueError(f"{len(launches)} launches; at least {MIN_PAIRS} are needed")
    if not all(0 < window.tokens_per_s < math.inf for window in windows):
        raise ValueError("a window has no rate")
    logs = {
        level: [[math.log(w.tokens_per_s) for w in _of(windows, launch, level)] for launch in launches]
        for level in weights
    }
    if any(not group for groups in logs.values() for group in groups):
        raise ValueError("a launch has no window at one of the levels")
    total = sum(weights.values())
    composites = [sum(weights[c] * logs[c][i][0] for c in weights) / total for i in range(len(launches))]
    differences = np.diff(composites)
    pair_sd = max(float(np.sqrt(np.mean(differences**2))), PAIR_SD_FLOOR)
    # Neighbouring differences share a launch, so that a third of them tells nothing new.
    freedom = 2 / 3 * differences.size
    pair_sd_high = pair_sd * math.sqrt(freedom / float(stats.chi2.ppf(1 - CAUTION, freedom)))
    claims = len(weights) + 1 if len(weights) > 1 else 1
    confidence = 1 - ALPHA / claims

    def shown(pairs: int) -> float:
        return detectable_gain(pair_sd_high, pairs, confidence)

    pairs = next((n for n in range(MIN_PAIRS, MAX_PAIRS + 1) if shown(n) <= gain), None)
    return Calibration(
        tuple(_noise(level, groups, windows) for level, groups in sorted(logs.items())),
        pair_sd,
        pair_sd_high,
        gain,
        pairs,
        shown(pairs or MAX_PAIRS),
    )


def _of(windows: Sequence[Window], launch: int, level: int) -> list[Window]:
    mine = [w for w in windows if w.launch == launch and w.concurrency == level]
    return sorted(mine, key=lambda w: w.number)


def _noise(level: int, groups: Sequence[Sequence[float]], windows: Sequence[Window]) -> LevelNoise:
    own = [block_variance(w.series) for w in windows if w.concurrency == level]
    several = [np.var(group, ddof=1) for group in groups if len(group) > 1]
    between = float(np.mean(several)) if several else None
    count = float(np.mean([len(group) for group in groups]))
    means = float(np.var([np.mean(group) for group in groups], ddof=1))
    left = max(0.0, means - (between if between is not None else float(np.mean(own))) / count)
    return LevelNoise(
        level, math.sqrt(float(np.mean(own))), None if between is None else math.sqrt(between), math.sqrt(left)
    )
