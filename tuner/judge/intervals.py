"""The statistics behind a verdict: intervals of log ratios, and what a number of pairs could have shown.

numpy and scipy are imported where they compute: `tuner status` asks for a constant of this module alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MIN_PAIRS = 4
"""Fewer give no interval: with three pairs the t quantile alone is 4.3."""

ALPHA = 0.05
POWER = 0.80

SERIES_SD_FLOOR = 0.01
"""Least SD of a pair's log ratio when only the blocks' own seconds are known: they cannot see what differs from launch
to launch, which is about as large."""

PAIR_SD_FLOOR = 0.003
"""Least SD when it comes from pairs: some that happen to agree make neither a quiet machine nor an interval of no
width."""

BATCH_S = 2
"""Seconds per batch: neighbouring seconds are correlated, so that each of them alone counts too much."""


@dataclass(frozen=True)
class Interval:
    """Mean of log ratios with a two-sided interval, all in log space."""

    mean: float
    low: float
    high: float


def t_interval(log_ratios: Sequence[float], confidence: float, *, least_sd: float = 0.0) -> Interval:
    """Student's interval of the mean, n - 1 degrees of freedom. Needs two values or more, all of them finite.

    The ratio of two throughputs has no natural direction and multiplies, hence logs (Kalibera and Jones 2013).
    """
    import numpy as np
    from scipy import stats

    data = np.asarray(log_ratios, dtype=float)
    if data.size < 2 or not np.isfinite(data).all():
        raise ValueError("an interval needs at least two values, and numbers only")
    mean = float(data.mean())
    sd = max(float(data.std(ddof=1)), least_sd)
    half = float(stats.t.ppf(0.5 + confidence / 2, data.size - 1)) * sd / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half)


def p_above(log_ratios: Sequence[float], threshold: float) -> float:
    """One-sided p-value of the hypothesis that the mean is at most `threshold`; 1 under `MIN_PAIRS` values.

    They are taken to spread by `PAIR_SD_FLOOR` at least.
    """
    import numpy as np
    from scipy import stats

    data = np.asarray(log_ratios, dtype=float)
    if data.size < MIN_PAIRS:
        return 1.0
    sd = max(float(data.std(ddof=1)), PAIR_SD_FLOOR)
    t = (float(data.mean()) - threshold) * math.sqrt(data.size) / sd
    return float(stats.t.sf(t, data.size - 1))


def detectable_effect(sd: float, n: int, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """The true mean that a two-sided paired t-test of `n` pairs finds with probability `power`.

    In the unit of `sd`.
    """
    if n < 2 or sd < 0:
        raise ValueError("needs at least two pairs and a standard deviation of at least 0")
    return sd * _standardised(n, alpha, power) / math.sqrt(n)


@lru_cache(maxsize=1024)
def _standardised(n: int, alpha: float, power: float) -> float:
    """The noncentrality at which the test of `n` pairs has this power."""
    from scipy import optimize, stats

    critical = float(stats.t.ppf(1 - alpha / 2, n - 1))

    def short_of(noncentrality: float) -> float:
        return float(stats.nct.sf(critical, n - 1, noncentrality)) - power

    # Its median lies near the noncentrality; the upper end is far enough out for any power in use.
    return float(optimize.brentq(short_of, 0.0, 2.0 * critical + 4.0))


def pair_sd(log_ratios: Sequence[float], series: Sequence[tuple[Sequence[float], Sequence[float]]] = ()) -> float:
    """SD of a pair's log ratio: of the pairs themselves from two on, else estimated from the blocks' own seconds.

    `series` holds, per pair, the 1-s token series of its two blocks.
    """
    if len(log_ratios) >= 2:
        import numpy as np

        return max(float(np.std(log_ratios, ddof=1)), PAIR_SD_FLOOR)
    variances = [block_variance(a) + block_variance(b) for a, b in series]
    return max(math.sqrt(sum(variances) / len(variances)) if variances else 0.0, SERIES_SD_FLOOR)


def block_variance(series: Sequence[float]) -> float:
    """Squared relative standard error of a block's mean, by batch means; 0 where the series is too short to tell."""
    import numpy as np

    data = np.asarray(series, dtype=float)
    batches = data.size // BATCH_S
    if batches < 2 or data.mean() <= 0:
        return 0.0
    means = data[-batches * BATCH_S :].reshape(batches, BATCH_S).mean(axis=1)
    return float(means.var(ddof=1) / batches / data.mean() ** 2)
