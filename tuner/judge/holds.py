"""Whether a server still does what was measured: a function of two sets of blocks and the noise between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.judge.intervals import ALPHA, SERIES_SD_FLOOR
from tuner.judge.verdict import PRACTICAL

WITHIN = "within: the loss that noise explains in 19 of 20 cases, and 1 % more"
"""What a tolerance is, for a person."""

MIN_FREEDOM = 3
"""Degrees of freedom of a spread that is known from few blocks, or only from their own seconds."""


@dataclass(frozen=True)
class LevelHolds:
    """One level. `ratio` is measured over recorded tokens per second, `tolerance` the largest loss that noise explains.

    `slower`: less than the record by more than that. `faster` is no fault, but not what was measured either.
    """

    concurrency: int
    recorded: float
    measured: float
    blocks: tuple[int, int]
    ratio: float
    tolerance: float
    outcome: Literal["holds", "slower", "faster"]


def level_holds(
    concurrency: int,
    recorded: Sequence[float],
    measured: Sequence[float],
    *,
    within: Sequence[float] = (),
    pair_sd: float | None = None,
    claims: int = 1,
) -> LevelHolds:
    """The verdict on one level.

    Args:
        recorded, measured: tokens per second of blocks, one a launch, at least one each.
        within: relative SDs of the recorded blocks by their own seconds; they count where one block tells no spread.
        pair_sd: of a pair's log ratio by a calibration; a block's is 1/√2 of it.
        claims: levels that are judged together, so that all of them hold by chance with 95 %.

    A prediction interval for the mean of the new blocks (Student's t), with 1 % on top: less is worth no step.

    Raises:
        ValueError: a rate that is none.
    """
    from scipy import stats

    if not recorded or not measured or not all(0 < rate < math.inf for rate in (*recorded, *measured)):
        raise ValueError(f"concurrency {concurrency}: rates that are none")

    logs = [math.log(rate) for rate in recorded]
    mean = math.fsum(logs) / len(logs)
    new = math.fsum(math.log(rate) for rate in measured) / len(measured)
    known = [SERIES_SD_FLOOR]
    if len(logs) > 1:
        known.append(math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1)))
    elif within:
        known.append(max(within))
    if pair_sd is not None:
        known.append(pair_sd / math.sqrt(2))
    freedom = max(len(logs) - 1, MIN_FREEDOM)
    quantile = float(stats.t.ppf(1 - ALPHA / claims / 2, freedom))
    half = quantile * max(known) * math.sqrt(1 / len(logs) + 1 / len(measured)) + math.log1p(PRACTICAL)
    change = new - mean
    outcome: Literal["holds", "slower", "faster"] = "holds"
    if abs(change) > half:
        outcome = "slower" if change < 0 else "faster"
    return LevelHolds(
        concurrency,
        math.exp(mean),
        math.exp(new),
        (len(recorded), len(measured)),
        math.exp(change),
        1 - math.exp(-half),
        outcome,
    )
