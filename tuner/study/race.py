"""The race of the search: a short look at every candidate, and more only of those that can still win. Pure functions.

A candidate is in the race for what a study answers: the best overall, and the best at each level, since the winner per
level and the schedule of draft depths are made of those. After a look at every level it is measured further only at
the levels where a claim of its own is still open; with none open it ends early, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tuner.judge.racing import Figure, breaks, cannot_beat, level_figure, overall_figure
from tuner.records import Pair, StoredBlock
from tuner.study.data import Slot, StoredTrial, StudyData
from tuner.study.looks import ENOUGH, OUT, looks_saved
from tuner.study.score import late_at, score, weights


@dataclass(frozen=True)
class Race:
    """Levels at which a candidate can still win; `why` says, where there are none, what it is out of."""

    levels: tuple[int, ...]
    why: str = ""


NO_RACE = ("pareto", "goodput")
"""Objectives without a race."""


def has_race(data: StudyData) -> bool:
    """Whether what a study looks for can be given up early: not where every balance of levels counts (`pareto`), nor
    where tails of latency decide (`goodput`), of which a short look sees too few."""
    return data.space.objective.maximize not in NO_RACE


def looks_due(data: StudyData, slot: Slot) -> tuple[int, ...]:
    """The levels at which a candidate has not been looked at; one look each, whether it passed its gates or not."""
    if not has_race(data) or not looks_pay(data):
        return ()
    seen = {b.concurrency for each in (slot.look, slot) for b in data.by_slot.get(each, ())}
    return tuple(level for level in data.levels if level not in seen)


def looks_pay(data: StudyData) -> bool:
    """Whether looks have saved more than they took, as far as this study can tell yet."""
    found = looks_saved(data)
    return found.looked_at < ENOUGH or found.saved_s > 0


def race(data: StudyData, slot: Slot, dropped: Collection[str] = ()) -> Race:
    """Where a candidate can still win; `dropped` are candidates that cannot win themselves, and so beat nobody."""
    pairs = data.screened.get(slot.candidate_id, ())
    mine = figures(data, pairs)
    if mine.keys() != set(data.levels):
        return Race(data.levels)
    others = [t for t in data.scored if not t.running and t.candidate_id not in dropped]
    standing = _Standing(data, others)
    least = data.space.objective.guard.min_speedup
    share = weights(data)
    overall = overall_figure([(share[level], mine[level]) for level in data.levels])
    slow = too_slow(data, slot.candidate_id)
    if not slow and not cannot_beat(overall, standing.overall(share)):
        return Race(data.levels)
    open_at = tuple(level for level in data.levels if not cannot_beat(mine[level], standing.at(level)))
    return Race(open_at) if open_at else Race((), _why(overall, standing.overall(share), slow, least))


def too_slow(data: StudyData, candidate_id: str) -> list[int]:
    """The levels at which a candidate is below what the guard on speed-ups asks for, beyond the noise of its pairs."""
    least = data.space.objective.guard.min_speedup
    if least is None:
        return []
    mine = figures(data, data.screened.get(candidate_id, ()))
    return [level for level in data.levels if level in mine and breaks(mine[level], math.log(least))]


def _why(overall: Figure, best: Figure | None, slow: list[int], least: float | None) -> str:
    said = f"{OUT}: at best {_change(overall.optimistic)} overall"
    if best is not None and best.mean > 0:
        said += f", where the best has {_change(best.mean)}"
    if slow and least is not None:
        said += f"; below the limit of {_change(math.log(least))} at concurrency {', '.join(map(str, slow))}"
    return f"{said}, and the best at no level"


def _change(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.1f} %".replace("-", "−")


class _Standing:
    """The best so far, overall and at each level."""

    def __init__(self, data: StudyData, others: list[StoredTrial]) -> None:
        self.data = data
        self._scores = {trial.candidate_id: score(data, trial.candidate_id) for trial in others}
        self._scores = {one: s for one, s in self._scores.items() if s.constraints["launch"] <= 0}
        self._late = {one: late_at(data, one) for one in self._scores}

    def overall(self, share: Mapping[int, float]) -> Figure | None:
        """Of those that keep the guards."""
        able = {one: s.value for one, s in self._scores.items() if all(v <= 0 for v in s.constraints.values())}
        if not able:
            return None
        found = figures(self.data, self.data.screened[max(able, key=lambda one: able[one])])
        return overall_figure([(share[level], found[level]) for level in self.data.levels])

    def at(self, level: int) -> Figure | None:
        """Of all that work and keep the guards on latencies there."""
        able = [one for one in self._scores if level not in self._late[one]]
        if not able:
            return None
        best = max(able, key=lambda one: self._scores[one].ratios[level])
        return figures(self.data, self.data.screened[best]).get(level)


def figures(data: StudyData, pairs: Collection[Pair]) -> dict[int, Figure]:
    """What the pairs of one candidate in the search say, by level."""
    found = {}
    for level in {pair.concurrency for pair in pairs}:
        here = [pair for pair in pairs if pair.concurrency == level]
        windows = [_window(data.blocks[pair.candidate_block]) for pair in here]
        baseline = _window(data.blocks[here[-1].baseline_block])
        found[level] = level_figure([pair.log_ratio for pair in here], windows, baseline)
    return found


def _window(stored: StoredBlock) -> tuple[float, tuple[float, ...]]:
    return max(stored.block.window_s, 1e-9), stored.block.series
