"""What a candidate's figure owes to when it was measured: what changes of its settings cost a running server, and what
drifted between launches, as the baseline's turns show. Pure functions of records."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.records import StoredBlock
from tuner.study.data import StudyData
from tuner.study.score import Score, weights

WORN = 0.1
"""Share of the baseline's first throughput on a running server that its later turns there may lack."""


@dataclass(frozen=True)
class _Turns:
    """Whose turn it was on a launch when a block was measured (0, 1, …), and the baseline's rates by level and turn."""

    of_block: Mapping[int, int]
    rates: Mapping[int, Mapping[int, float]]

    def slope(self, level: int) -> float:
        """What a change costs at a level, as a log ratio: from the baseline's first turn to its last; 0 before two."""
        rates = self.rates.get(level, {})
        if len(rates) < 2:
            return 0.0
        first, last = min(rates), max(rates)
        return math.log(rates[last] / rates[first]) / (last - first)


def worn(data: StudyData, launch: int) -> bool:
    """Whether the baseline came to be slower on a running server: every change, or the time, costs it something."""
    rates = (list(each.values()) for each in _turns(data, launch).rates.values())
    return any(each[-1] < (1 - WORN) * each[0] for each in rates)


def unworn(data: StudyData, candidate_id: str, found: Score) -> Score:
    """A candidate's score without what wear and drift have added to it or taken from it; the same where neither shows.

    It says who is worth confirming. What is told and published stays what was measured.
    """
    by_level: dict[int, list[float]] = {}
    for pair in data.screened.get(candidate_id, ()):
        mine, other = data.blocks[pair.candidate_block], data.blocks[pair.baseline_block]
        by_level.setdefault(pair.concurrency, []).append(_between(data, other, mine))
    added = {level: math.fsum(each) / len(each) for level, each in by_level.items()}
    if not any(added.values()) or set(added) != set(found.ratios):
        return found
    ratios = {level: ratio - added[level] for level, ratio in found.ratios.items()}
    constraints, guard = dict(found.constraints), data.space.objective.guard.min_speedup
    if guard is not None:
        constraints["min_speedup"] = guard - math.exp(min(ratios.values()))
    if data.space.objective.slo is not None:  # the value is no mean of the ratios then
        return replace(found, ratios=ratios, constraints=constraints)
    share = weights(data)
    return Score(found.value - math.fsum(share[level] * added[level] for level in added), constraints, ratios)


def _between(data: StudyData, baseline: StoredBlock, block: StoredBlock) -> float:
    """What wear or drift has added to a block's log ratio to the baseline's; 0 where nothing shows any.

    A server on which the baseline had one turn alone wears as others of the study did.
    """
    if baseline.launch_id != block.launch_id:
        return _drift(data, baseline, block)
    turns, level = _turns(data, block.launch_id), block.concurrency
    slope = turns.slope(level)
    if not worn(data, block.launch_id):
        launches = dict.fromkeys(each.launch_id for each in data.reconfigurations)
        others = [_turns(data, one).slope(level) for one in launches if worn(data, one)]
        known = len(turns.rates.get(level, {})) > 1 or not others
        slope = 0.0 if known else math.fsum(others) / len(others)
    return slope * (turns.of_block[block.id] - turns.of_block[baseline.id])


def _drift(data: StudyData, baseline: StoredBlock, block: StoredBlock) -> float:
    """By how much the baseline, on other launches, came to be faster from its block that counts to this one's time.

    In a straight line between its last block before and its first one behind, of the same place; 0 without both.
    """
    turns = data.baseline_turns.get((data.launch[block.launch_id].place, block.concurrency), ())
    place = bisect_right(turns, block.block.started_at, key=lambda stored: stored.block.started_at)
    if not 0 < place < len(turns):
        return 0.0
    before, behind = turns[place - 1], turns[place]
    share = (_middle(block) - _middle(before)) / (_middle(behind) - _middle(before))
    expected = (1 - share) * math.log(before.block.tokens_per_s) + share * math.log(behind.block.tokens_per_s)
    return expected - math.log(baseline.block.tokens_per_s)


def _middle(stored: StoredBlock) -> float:
    return stored.block.started_at + stored.block.window_s / 2


def _turns(data: StudyData, launch: int) -> _Turns:
    of_block: dict[int, int] = {}
    rates: dict[int, dict[int, float]] = {}
    turn, last = -1, ""
    for stored in data.on_launch.get(launch, ()):
        if stored.candidate_id != last:
            turn, last = turn + 1, stored.candidate_id
        of_block[stored.id] = turn
        if stored.candidate_id == data.baseline.id and stored.block.valid and stored.block.tokens_per_s > 0:
            rates.setdefault(stored.concurrency, {})[turn] = stored.block.tokens_per_s
    return _Turns(of_block, rates)
