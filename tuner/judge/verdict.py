"""What the pairs of a candidate say, at one level or over all of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from tuner.judge.intervals import ALPHA, MIN_PAIRS, PAIR_SD_FLOOR, detectable_effect, p_above, pair_sd, t_interval
from tuner.records import Pair, Verdict

PRACTICAL = 0.01
"""A gain up to this is not worth a change: "better" needs the whole interval above it."""

EQUIVALENT = (0.98, 1.02)

MOST = 700.0
"""Of a log ratio: above it there is no number."""

Series = tuple[Sequence[float], Sequence[float]]
Key = TypeVar("Key", bound=Hashable)


def verdict(
    candidate_id: str,
    concurrency: int | None,
    log_ratios: Sequence[float],
    *,
    confidence: float = 1 - ALPHA,
    series: Sequence[Series] = (),
) -> Verdict:
    """The verdict of some pairs. `series` (1-s tokens of baseline and candidate) serves where one pair tells no noise.

    `detectable` is the smallest true gain that would have been called better with probability 80 %: the threshold of
    1 % and the minimum detectable effect of a paired t-test on top. Under `MIN_PAIRS` pairs, which show nothing, it is
    what `MIN_PAIRS` of them would have shown.
    """
    n = len(log_ratios)
    if not all(map(math.isfinite, log_ratios)):
        raise ValueError(f"log ratios of {candidate_id} that are no numbers")
    if n == 0:
        return Verdict(candidate_id, concurrency, 0, None, None, None, confidence, "not separated", None)
    mean = sum(log_ratios) / n
    seen = detectable_gain(pair_sd(log_ratios, series), max(n, MIN_PAIRS), confidence)
    if n < MIN_PAIRS:
        return Verdict(candidate_id, concurrency, n, _ratio(mean), None, None, confidence, "not separated", seen)
    interval = t_interval(log_ratios, confidence, least_sd=PAIR_SD_FLOOR)
    low, high = _ratio(interval.low), _ratio(interval.high)
    outcome = _outcome(low, high)
    return Verdict(candidate_id, concurrency, n, _ratio(mean), low, high, confidence, outcome, seen)


def detectable_gain(sd: float, n: int, confidence: float = 1 - ALPHA) -> float:
    """The relative gain that `n` pairs with this SD would call better with probability 80 %."""
    return _ratio(math.log1p(PRACTICAL) + detectable_effect(sd, n, alpha=1 - confidence)) - 1


def _ratio(log: float) -> float:
    """The ratio of a log ratio, as far as numbers go."""
    return math.exp(min(log, MOST))


def _outcome(low: float, high: float) -> Literal["better", "worse", "equivalent", "not separated"]:
    if low > 1 + PRACTICAL:
        return "better"
    if high < 1 / (1 + PRACTICAL):
        return "worse"
    if EQUIVALENT[0] < low and high < EQUIVALENT[1]:
        return "equivalent"
    return "not separated"


def overall_log_ratios(pairs: Iterable[Pair], weights: Mapping[int, float]) -> list[float]:
    """One composite per pair index: the weighted mean of the log ratios of its levels, in order of the index.

    Averaging inside an index first keeps what its levels have in common (one launch, one hour). An index without all
    levels of a positive weight is left out: its mean would be of something else.
    """
    levels = {level for level, weight in weights.items() if weight > 0}
    by_index: dict[int, dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        by_index[pair.index][pair.concurrency] = pair.log_ratio
    total = sum(weights[level] for level in levels)
    return [
        sum(weights[level] * ratios[level] for level in levels) / total
        for _, ratios in sorted(by_index.items())
        if levels and levels <= ratios.keys()
    ]


def holm_confidences(claims: Mapping[Key, Sequence[float]], *, alpha: float = ALPHA) -> dict[Key, float]:
    """The confidence at which each claim's interval is to be read, so that one false "better" in the whole family has
    a chance of at most `alpha`.

    Holm's step-down over "the gain exceeds 1 %": the strongest claim is read at 1 - alpha/m, the next, if that one
    held, at 1 - alpha/(m - 1), and so on; after the first that does not hold the level stays.
    """
    threshold = math.log1p(PRACTICAL)
    ordered = sorted(claims, key=lambda key: p_above(claims[key], threshold))
    confidences: dict[Key, float] = {}
    remaining = len(ordered)
    for key in ordered:
        level = alpha / remaining
        confidences[key] = 1 - level
        if p_above(claims[key], threshold) < level / 2:
            remaining = max(1, remaining - 1)
    return confidences
