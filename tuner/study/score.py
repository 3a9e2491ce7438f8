"""From blocks to pairs and to what Optuna is told. Pure functions of the study's records."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.records import Block, Pair, StoredBlock
from tuner.study.data import Slot, StudyData
from tuner.study.goodput import best_level, log_gain, tpot_p90

PESSIMISTIC = math.log(0.5)
"""What a candidate without a score is told to have: half the baseline's throughput, finite so that models stay sane."""


@dataclass(frozen=True)
class Score:
    """What a trial is told: `value`, the weighted mean of the log speed-ups in `ratios` (level → log ratio).

    `constraints` are met at 0 and below; `launch` is always among them.
    """

    value: float
    constraints: Mapping[str, float]
    ratios: Mapping[int, float]


FAILED = Score(PESSIMISTIC, {"launch": 1.0}, {})
"""Of a candidate that could not be measured."""

ILLEGAL = Score(PESSIMISTIC, {"legal": 1.0, "launch": 1.0}, {})
"""Of a candidate that a rule or the engine rules out."""


def pairs_of(data: StudyData) -> tuple[Pair, ...]:
    """Every pair of valid blocks, screening first, then by candidate, level and index.

    In the search a block is paired with the baseline's on the same launch, the last one before it or else the first one
    behind it; where there is none, with the last one before it on any launch of the same place.
    """
    pairs: list[Pair] = []
    screened = _Screened(data)
    for trial in data.scored:
        for slot in (trial.slot.look, trial.slot):
            blocks = [block for level in data.levels if (block := data.block(slot, level)) is not None]
            pairs += _pairs(slot, [(screened.baseline(block), block) for block in blocks])
    for confirmation in data.confirmations:
        for finalist in confirmation.finalists:
            for repetition in confirmation.repetitions:
                baseline = Slot(data.baseline.id, "confirm", repetition)
                slot = Slot(finalist, "confirm", repetition)
                pairs += _pairs(slot, [(data.block(baseline, level), data.block(slot, level)) for level in data.levels])
    return tuple(
        sorted(pairs, key=lambda p: (p.role == "confirm", p.candidate_id, p.role != "look", p.concurrency, p.index))
    )


class _Screened:
    """The valid blocks of the baseline in the search, in order of time: by level, and by launch and level."""

    def __init__(self, data: StudyData) -> None:
        self.places = {launch.id: launch.place for launch in data.launches}
        self._all: dict[tuple[str | None, int], list[StoredBlock]] = {}
        self._on: dict[tuple[int, int], list[StoredBlock]] = {}
        for stored in sorted(data.blocks.values(), key=lambda stored: stored.order):
            if stored.candidate_id == data.baseline.id and stored.role == "screen" and stored.block.valid:
                self._all.setdefault((self.places.get(stored.launch_id), stored.concurrency), []).append(stored)
                self._on.setdefault((stored.launch_id, stored.concurrency), []).append(stored)

    def baseline(self, block: StoredBlock) -> StoredBlock | None:
        """What a block of the search is compared with."""
        mine = self._on.get((block.launch_id, block.concurrency), [])
        if mine:
            return mine[max(0, bisect_left(mine, block.order, key=_order) - 1)]
        known = self._all.get((self.places.get(block.launch_id), block.concurrency), [])
        place = bisect_left(known, block.order, key=_order)
        return known[place - 1] if place else None


def _order(stored: StoredBlock) -> int:
    return stored.order


def _pairs(slot: Slot, blocks: Iterable[tuple[StoredBlock | None, StoredBlock | None]]) -> list[Pair]:
    pairs = []
    for before, after in blocks:
        if before is None or after is None or (ratio := log_ratio(before.block, after.block)) is None:
            continue
        level = after.concurrency
        pairs.append(Pair(slot.candidate_id, level, slot.role, slot.repetition, before.id, after.id, ratio))
    return pairs


def log_ratio(baseline: Block, candidate: Block) -> float | None:
    """ln(candidate / baseline) of tokens per second; None when either has none, which no gate lets through."""
    if not (0 < baseline.tokens_per_s < math.inf and 0 < candidate.tokens_per_s < math.inf):
        return None
    return math.log(candidate.tokens_per_s / baseline.tokens_per_s)


def weights(data: StudyData) -> dict[int, float]:
    """Level → weight in the objective; they sum to 1.

    Where the objective is about one level (`throughput` or `latency` there, `goodput` at the highest load that anything
    measured bears), it has all. For `speedup` and `pareto` these are the shares of traffic. For `throughput` over all a
    level also weighs by the tokens it carries: its share times the baseline's tokens per second there, which is the
    derivative of the weighted sum of throughputs.
    """
    shares = data.space.workload.weight_of
    only = data.space.objective_level
    slo = data.space.objective.slo
    if slo is not None:
        valid = [b.block for b in data.blocks.values() if b.block.valid and b.concurrency in shares]
        only = best_level(valid, slo) or min(shares)
    if only is not None:
        return {level: float(level == only) for level in shares}
    if data.space.objective.maximize != "throughput":
        return shares
    slot = Slot(data.baseline.id, "screen", 0)
    blocks = {level: data.block(slot, level) for level in shares}
    carried = {level: shares[level] * b.block.tokens_per_s for level, b in blocks.items() if b is not None}
    total = math.fsum(carried.values())
    if len(carried) < len(shares) or total <= 0:
        return shares
    return {level: value / total for level, value in carried.items()}


def score(data: StudyData, candidate_id: str) -> Score:
    """What the screening of a candidate came to; `FAILED` when a level is missing, or it failed after a first look.

    The value is the weighted mean of ln(tokens per second / the baseline's). A broken guard is a violated constraint;
    the value stays what was measured.
    """
    known: dict[str, Score] = data.scores
    if candidate_id not in known:
        known[candidate_id] = _score(data, candidate_id)
    return known[candidate_id]


def _score(data: StudyData, candidate_id: str) -> Score:
    if candidate_id == data.baseline.id:
        return Score(0.0, {"launch": -1.0}, dict.fromkeys(data.levels, 0.0))
    if candidate_id in data.failed:
        return FAILED
    pairs = data.screened.get(candidate_id, ())
    ratios = level_ratios(data, candidate_id)
    if set(ratios) != set(data.levels):
        return FAILED
    weight = weights(data)
    value = math.fsum(weight[level] * ratio for level, ratio in ratios.items())
    if data.space.objective.slo is not None:
        value = log_gain(pairs, data.blocks, data.space.objective.slo)
    constraints = {"launch": -1.0}
    guard = data.space.objective.guard
    if guard.min_speedup is not None:
        constraints["min_speedup"] = guard.min_speedup - math.exp(min(ratios.values()))
    constraints |= {name: max(levels.values()) for name, levels in _excesses(data, pairs).items()}
    return Score(value, constraints, ratios)


def has_goodput(data: StudyData, candidate_id: str) -> bool:
    """Whether a candidate kept the limits of `goodput` at any level in the search; true where nothing is limited so."""
    slo = data.space.objective.slo
    blocks = (data.blocks[pair.candidate_block].block for pair in data.screened.get(candidate_id, ()))
    return slo is None or best_level(blocks, slo) is not None


def late_at(data: StudyData, candidate_id: str) -> frozenset[int]:
    """The levels at which a candidate broke a guard on latencies in the search."""
    found = _excesses(data, data.screened.get(candidate_id, ()))
    return frozenset(level for levels in found.values() for level, excess in levels.items() if excess > 0)


def _excesses(data: StudyData, pairs: Iterable[Pair]) -> dict[str, dict[int, float]]:
    """Guard on a latency → level → how far one candidate is over it."""
    guard = data.space.objective.guard
    # Of a level's blocks the one of the longest window: a short look sees too few first tokens.
    last = {pair.concurrency: data.blocks[pair.candidate_block].block for pair in pairs}
    found: dict[str, dict[int, float]] = {}
    if guard.ttft_p90_ms is not None:
        limit = guard.ttft_p90_ms
        found["ttft_p90"] = {level: _excess(block.ttft_ms.p90, limit) for level, block in last.items()}
    if guard.tpot_p90_ms is not None:
        limit = guard.tpot_p90_ms
        found["tpot_p90"] = {level: _excess(tpot_p90(block), limit) for level, block in last.items()}
    return found


def level_ratios(data: StudyData, candidate_id: str) -> dict[int, float]:
    """Level → the log ratio of a candidate in the search: the mean of its pairs, by the length of their windows."""
    seconds: dict[int, float] = {}
    sums: dict[int, float] = {}
    for pair in data.screened.get(candidate_id, ()):
        window_s = max(data.blocks[pair.candidate_block].block.window_s, 1e-9)
        seconds[pair.concurrency] = seconds.get(pair.concurrency, 0.0) + window_s
        sums[pair.concurrency] = sums.get(pair.concurrency, 0.0) + window_s * pair.log_ratio
    return {level: sums[level] / seconds[level] for level in sums}


def _excess(p90: float | None, limit_ms: float) -> float:
    """How far the 90th percentile of a latency is over the limit, relative; unknown counts as at the limit."""
    return p90 / limit_ms - 1 if p90 is not None else 0.0
