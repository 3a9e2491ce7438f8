"""Which candidates no other is better than at every level, as far as pairs tell. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.records import Verdict

Verdicts = Mapping[int, Verdict]
"""Level → the verdict on a candidate there."""


def front(candidates: Mapping[str, Verdicts]) -> tuple[str, ...]:
    """The candidates that are not dominated; the baseline (every speed-up 1) takes part as "".

    One dominates another when it is at least as fast at every level, and at one of them the intervals do not overlap:
    a difference within noise is no reason to leave anybody out. Who was not measured at a level of the other's
    dominates nobody there.
    """
    base = {
        level: Verdict("", level, 0, 1.0, 1.0, 1.0, verdict.confidence, "equivalent", None)
        for verdicts in candidates.values()
        for level, verdict in verdicts.items()
    }
    every = {"": base, **candidates}
    return tuple(
        one
        for one, verdicts in every.items()
        if not any(_dominates(other, verdicts) for name, other in every.items() if name != one)
    )


def _dominates(one: Verdicts, other: Verdicts) -> bool:
    levels = other.keys()
    if (
        not levels
        or not levels <= one.keys()
        or any((one[level].speedup or 0.0) < (other[level].speedup or 0.0) for level in levels)
    ):
        return False
    return any(_apart(one[level], other[level]) for level in levels)


def _apart(faster: Verdict, slower: Verdict) -> bool:
    return faster.low is not None and slower.high is not None and faster.low > slower.high
