"""Where curves over concurrency cross, and the schedule of draft depths that follows from it.

Between two measured levels the log of a ratio is taken to be a straight line over the log of concurrency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from tuner.engines.speculation import schedule as parse_schedule

Curve = Mapping[int, tuple[float, float]]
"""Level of concurrency → a log, and its standard deviation."""

Z = 1.96
CLEAR = 0.5
"""Standard deviations by which a depth has to lead, or the shallower of two is taken."""

POINTS = 400


@dataclass(frozen=True)
class Crossing:
    """Where speculation begins (`rising`) or ceases to pay: at `at` requests, with 95 % between `low` and `high`.

    An end of the interval at the lowest or highest measured level means: there or beyond.
    """

    at: float
    low: float
    high: float
    rising: bool


def crossings(gain: Curve) -> tuple[Crossing, ...]:
    """Where a log ratio changes its sign, from the lowest level up."""
    levels = sorted(gain)
    if len(levels) < 2:
        return ()
    x = np.log(levels)
    means, sds = np.array([gain[level] for level in levels]).T
    fine = np.linspace(x[0], x[-1], POINTS)
    mean, sd = np.interp(fine, x, means), np.interp(fine, x, sds)
    found = []
    for (a, before), (b, after) in itertools.pairwise(zip(x, means, strict=True)):
        if before == 0 or (before > 0) == (after > 0):
            continue
        at = a + (b - a) * before / (before - after)
        unsure = np.abs(mean) <= Z * sd
        low = high = at
        for place in fine[fine < at][::-1]:
            if not unsure[np.searchsorted(fine, place)]:
                break
            low = place
        for place in fine[fine > at]:
            if not unsure[np.searchsorted(fine, place)]:
                break
            high = place
        found.append(Crossing(math.exp(at), math.exp(low), math.exp(high), bool(after > before)))
    return tuple(found)


def sides(at: float) -> tuple[int, int]:
    """The numbers of running requests next to a crossing, below and above it: where it can be measured again."""
    below = max(1, math.ceil(at) - 1)
    return below, below + 1


def ratio(above: Curve, below: Curve) -> Curve:
    """The log ratio of two curves of logs, at the levels that both have."""
    return {
        level: (above[level][0] - below[level][0], math.hypot(above[level][1], below[level][1]))
        for level in above.keys() & below.keys()
    }


@dataclass(frozen=True)
class Change:
    """Where a schedule goes from one depth to another: between the measured levels `low` and `high`.

    At the load `place` the two are taken to be equally fast, and `first` is the first with the depth `after`.
    """

    low: int
    high: int
    before: int
    after: int
    place: float

    @property
    def first(self) -> int:
        """The lowest number of running requests with the depth after the change."""
        return min(self.high, max(self.low + 1, math.ceil(self.place)))


def best_depths(curves: Mapping[int, Curve], levels: Collection[int] | None = None) -> dict[int, int]:
    """Level → the fastest depth there, 0 being plain decoding; the shallower of what noise does not tell apart.

    `curves`: draft depth → its log rates. Of these `levels` only, and of those where plain decoding was measured.
    """
    chosen: dict[int, int] = {}
    for level in sorted({level for curve in curves.values() for level in curve}):
        here = {depth: curve[level] for depth, curve in curves.items() if level in curve}
        if 0 not in here or (levels is not None and level not in levels):
            continue
        top = max(here, key=lambda depth: here[depth][0])
        close = [d for d, (mean, sd) in here.items() if mean >= here[top][0] - CLEAR * math.hypot(sd, here[top][1])]
        chosen[level] = min(close)
    return chosen


def changes(curves: Mapping[int, Curve], levels: Collection[int] | None = None) -> tuple[Change, ...]:
    """Where the fastest depth changes, from the lowest of `levels` (all, when None) up.

    Each lies where the curves of the two depths cross between two neighbouring levels; what was measured in between
    counts too. Where noise makes them cross several times, it is the crossing in the middle. Where it makes them cross
    not at all, for the two cannot be told apart at one end, it lies behind the last load at which the first one leads.
    """
    chosen = best_depths(curves, levels)
    found = []
    for low, high in itertools.pairwise(sorted(chosen)):
        before, after = chosen[low], chosen[high]
        if before == after:
            continue
        gain = ratio(curves[after], curves[before])
        between = {load: each for load, each in gain.items() if low <= load <= high}
        found.append(Change(low, high, before, after, _place(between, low, high)))
    return tuple(found)


def _place(gain: Curve, low: int, high: int) -> float:
    rising = [one for one in crossings(gain) if one.rising]
    if rising:
        return rising[len(rising) // 2].at
    behind = [load for load, (mean, sd) in gain.items() if mean < -CLEAR * sd and load < high]
    last = max(behind, default=low)
    return math.sqrt(last * min((load for load in gain if load > last), default=high))


def schedule(curves: Mapping[int, Curve], levels: Collection[int] | None = None) -> str | None:
    """The text of `steps_by_batch` with the fastest depth everywhere; None where one depth is, or too little known."""
    found = changes(curves, levels)
    if not found:
        return None
    table = [(1, found[0].before), *((change.first, change.after) for change in found)]
    return ",".join(f"{size}:{depth}" for size, depth in table)


def as_threshold(text: str) -> int | None:
    """The `disable_batch_threshold` that says the same as a schedule; None where none does."""
    table = parse_schedule(text)
    if len(table) == 2 and table[0][1] > 0 and table[1][1] == 0:
        return table[1][0] - 1
    return None
