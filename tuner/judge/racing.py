"""Whether a candidate of the search can still win, after each of its pairs. Pure functions of figures.

Giving up early makes no false winner: what wins is confirmed on fresh launches, in a number of pairs fixed before.
It may lose a winner, so the optimistic end has to lie below what it would have to beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.judge.intervals import block_variance
from tuner.judge.verdict import PRACTICAL

SURE = 2.0
"""Standard deviations up to the optimistic end: a candidate that is as fast as the best is given up once in 44."""

WINDOW_SD = 0.012
USUAL_WINDOW_S = 30.0
"""Least standard deviation of ln(tokens per second) of a window of this length; a window's own seconds can say more."""


@dataclass(frozen=True)
class Figure:
    """What is known of a log ratio: its mean, and the standard deviation of that mean."""

    mean: float
    sd: float

    @property
    def optimistic(self) -> float:
        """As fast as it may well be."""
        return self.mean + SURE * self.sd


def cannot_beat(mine: Figure, best: Figure | None) -> bool:
    """Whether a candidate is out of sight of the best one, or of a gain over the baseline that is worth having.

    Two candidates are compared by their difference; the noise of the best one counts too, for it was lucky.
    """
    if mine.optimistic < math.log1p(PRACTICAL):
        return True
    return best is not None and mine.mean + SURE * math.hypot(mine.sd, best.sd) < best.mean


def breaks(mine: Figure, least: float) -> bool:
    """Whether a log ratio lies below what is allowed, even at its optimistic end."""
    return mine.optimistic < least


def window_variance(window_s: float, series: Sequence[float]) -> float:
    """Of ln(tokens per second) of one window; `series` are its tokens second by second, empty where not known."""
    usual = WINDOW_SD**2 * max(1.0, USUAL_WINDOW_S / max(window_s, 1.0))
    return max(usual, block_variance(series))


def level_figure(
    log_ratios: Sequence[float],
    windows: Sequence[tuple[float, Sequence[float]]],
    baseline: tuple[float, Sequence[float]],
) -> Figure:
    """A candidate at one level: its pairs, weighted by the seconds of its windows.

    `windows` and `baseline` are (length in seconds, tokens second by second). All pairs share one block of the
    baseline, whose noise therefore does not become less with more of them.
    """
    total = math.fsum(seconds for seconds, _ in windows)
    shares = [seconds / total for seconds, _ in windows]
    mean = math.fsum(share * ratio for share, ratio in zip(shares, log_ratios, strict=True))
    variances = [share**2 * window_variance(*window) for share, window in zip(shares, windows, strict=True)]
    return Figure(mean, math.sqrt(math.fsum(variances) + window_variance(*baseline)))


def overall_figure(levels: Sequence[tuple[float, Figure]]) -> Figure:
    """The weighted mean over levels, (weight, figure) each. They share a launch, so their noise is taken to be one."""
    return Figure(
        math.fsum(weight * figure.mean for weight, figure in levels),
        math.fsum(weight * figure.sd for weight, figure in levels),
    )
