"""The schedule of draft depths that a study's blocks ask for, as a candidate of its own. A pure function of records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tuner.engines.base import UNSET
from tuner.engines.speculation import schedule as parse_schedule
from tuner.judge.racing import SURE
from tuner.records import Candidate, Setting, StoredBlock
from tuner.search.crossing import (
    Change,
    Curve,
    as_threshold,
    best_depths,
    changes,
    schedule,
)
from tuner.search.evidence import BLOCK_SD
from tuner.search.guide import Scheduled
from tuner.search.shape import shape_at
from tuner.space import Space
from tuner.space.space import SPECULATIVE
from tuner.study.data import StudyData
from tuner.study.planner import due_again
from tuner.study.score import score, weights
from tuner.study.wear import worn

WORTH = 0.002
"""What a schedule must promise beyond the best candidate (log), or it is not tried."""

GUESS_SD = 0.03
"""Of plain decoding where only the baseline's is known (log): settings that have nothing to do with speculation may
matter to it."""

_BY_BATCH = ("num_steps", "disable_batch_threshold", "steps_by_batch")

Family = tuple[tuple[str, Setting], ...]

_Log = tuple[float, float]
"""A log, and its standard deviation."""

_KNOWN = 4
"""As so many differences counts what is known of a block's noise beforehand, beside those that a study has seen."""


@dataclass(frozen=True)
class Planned:
    """A schedule that promises most: as a candidate, with its family, and where it changes the depth and why there."""

    candidate: Candidate
    family: Family
    changes: tuple[Change, ...]
    curves: Mapping[int, Curve]


def curves_of(data: StudyData) -> dict[Family, dict[int, Curve]]:
    """Family of candidates → draft depth → log rates over concurrency, as differences to the baseline.

    A family has everything in common but the depth and when it is in force; plain decoding (depth 0) is shared by all
    that agree in what has nothing to do with speculation. A candidate that is told not to speculate at a level shows
    what its family does there without.
    """
    seen, plain = _measured(data)
    return {family: {**by_depth, 0: plain.get(plain_family(dict(family)), {})} for family, by_depth in seen.items()}


def _measured(data: StudyData) -> tuple[dict[Family, dict[int, Curve]], dict[Family, Curve]]:
    """The curves of those that speculate, by family and depth, and of plain decoding, by what is alike beside it."""
    seen: dict[Family, dict[int, dict[int, list[_Log]]]] = {}
    plain: dict[Family, dict[int, list[_Log]]] = {}
    sd = block_sd(data)
    found = [(pair.candidate_id, pair.concurrency, (pair.log_ratio, math.sqrt(2) * sd)) for pair in data.pairs]
    found += [(data.baseline.id, level, (0.0, 0.0)) for level in data.levels]
    found += [(candidate, load, (rate, sd)) for candidate, load, rate in _beside_changes(data)]
    for candidate_id, level, log in found:
        settings = data.settings_of(candidate_id)
        depth = shape_at({**data.space.args, **settings}, level).depth
        if depth:
            curve = seen.setdefault(family_of(settings), {}).setdefault(depth, {})
        else:
            curve = plain.setdefault(plain_family(settings), {})
        curve.setdefault(level, []).append(log)
    return (
        {family: {depth: _means(curve) for depth, curve in curves.items()} for family, curves in seen.items()},
        {family: _means(curve) for family, curve in plain.items()},
    )


def _means(curve: Mapping[int, list[_Log]]) -> Curve:
    return {level: _mean(logs) for level, logs in curve.items()}


def _beside_changes(data: StudyData) -> list[tuple[str, int, float]]:
    """Candidate, load and log rate of what was measured beside changes, at loads that are no level of the workload.

    The baseline need not have been measured there: what counts is how far candidates are apart at one load and place.
    """
    groups: dict[tuple[str, int], list[StoredBlock]] = defaultdict(list)
    for stored in data.blocks.values():
        if stored.role == "edge" and stored.block.valid and stored.block.tokens_per_s > 0:
            groups[data.launch[stored.launch_id].place, stored.concurrency].append(stored)
    found = []
    for (_, load), blocks in groups.items():
        if len({stored.candidate_id for stored in blocks}) > 1:
            first = blocks[0].block.tokens_per_s
            found += [(b.candidate_id, load, math.log(b.block.tokens_per_s / first)) for b in blocks]
    return found


def block_sd(data: StudyData) -> float:
    """The standard deviation of a block's log rate: what is known beforehand, and how the baseline's turns differ.

    Turns on one server where there are such, for what servers differ by cancels there; those of worn ones do not count.
    """
    launches = {stored.launch_id for turns in data.baseline_turns.values() for stored in turns}
    out = {launch for launch in launches if worn(data, launch)}
    apart: list[float] = []
    for turns in data.baseline_turns.values():
        after_one_another = list(pairwise(stored for stored in turns if stored.launch_id not in out))
        same = [(a, b) for a, b in after_one_another if a.launch_id == b.launch_id]
        apart += [math.log(b.block.tokens_per_s / a.block.tokens_per_s) for a, b in same or after_one_another]
    return math.sqrt((_KNOWN * BLOCK_SD**2 + math.fsum(x * x for x in apart) / 2) / (_KNOWN + len(apart)))


def _mean(logs: list[_Log]) -> _Log:
    return math.fsum(log for log, _ in logs) / len(logs), math.sqrt(math.fsum(sd * sd for _, sd in logs)) / len(logs)


def family_of(settings: Mapping[str, Setting]) -> Family:
    """What a candidate has in common with those of other depths, or that speculate at other loads."""
    chain = settings.get("topk", 1) == 1
    left = (*_BY_BATCH, "num_draft_tokens") if chain else _BY_BATCH
    return tuple(sorted((name, value) for name, value in settings.items() if name not in left))


def plain_family(settings: Mapping[str, Setting]) -> Family:
    """What it has in common with all that decode plainly."""
    left = (*SPECULATIVE, "speculation")
    kept = {name: value for name, value in settings.items() if name not in left}
    # A variable that is unset is one that is not spoken of: the baseline seldom names them.
    return tuple(sorted((name, value) for name, value in kept.items() if value != UNSET))


def planned(data: StudyData, legal: Callable[[Candidate], bool]) -> Planned | None:
    """The untried schedule that promises most beyond the best candidate so far; None where none does.

    Its blocks at the measured levels lie on both sides of each of its changes, and so do its pairs in the confirmation.
    Where nothing like a family was measured without speculation, plain decoding as the baseline has it stands in: the
    schedule's own blocks then tell how good a guess that was.
    """
    weight = weights(data)
    guard = data.space.objective.guard.min_speedup
    scores = [score(data, trial.candidate_id) for trial in data.scored if not trial.running]
    best = max((one.value for one in scores if all(v <= 0 for v in one.constraints.values())), default=0.0)
    tried: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
    again = due_again(data)
    known = {trial.candidate_id for trial in data.trials} - again
    for trial in data.trials:
        if trial.candidate_id in again:
            continue
        settings = data.settings_of(trial.candidate_id)
        tried[family_of(settings)].add(tuple(shape_at({**data.space.args, **settings}, at).depth for at in data.levels))
    promised: list[tuple[float, Planned]] = []
    seen, plain = _measured(data)
    stand_in = {at: (mean, GUESS_SD) for at, (mean, _) in plain.get(plain_family(data.baseline.settings), {}).items()}
    for family, by_depth in seen.items():
        curves = {**by_depth, 0: {**stand_in, **plain.get(plain_family(dict(family)), {})}}
        text = schedule(curves, data.levels)
        chosen = best_depths(curves, data.levels)
        if text is None or set(chosen) != set(data.levels):
            continue
        ratios = {level: curves[depth][level][0] for level, depth in chosen.items()}
        value = math.fsum(weight[level] * ratio for level, ratio in ratios.items())
        slow = guard is not None and any(
            ratio + SURE * curves[chosen[level]][level][1] < math.log(guard) for level, ratio in ratios.items()
        )
        if value < max(best, 0.0) + WORTH or slow:
            continue
        if tuple(chosen[level] for level in data.levels) in tried[family]:
            continue  # what noise moves a change by between two levels is no other schedule
        made = [one for one in _candidates(dict(family), text, data.space.args) if legal(one) and one.id not in known][
            :1
        ]
        promised += [(value, Planned(one, family, changes(curves, data.levels), curves)) for one in made]
    return max(promised, key=lambda one: (one[0], one[1].candidate.id), default=(0.0, None))[1]


def plain_beside(data: StudyData, legal: Callable[[Candidate], bool]) -> Candidate | None:
    """Plain decoding beside the best candidate, or the best at a level, where nothing tells how that is.

    A schedule of its family may ask for it, and what the two have in common may make it faster than the baseline. None
    where all is known, or no schedule may be launched.
    """
    works = {t.candidate_id: score(data, t.candidate_id) for t in data.scored if not t.running}
    works = {one: found for one, found in works.items() if found.ratios}
    if not works or len(data.levels) < 2:
        return None
    best = [max(works, key=lambda one: works[one].value)]
    best += [max(works, key=lambda one: works[one].ratios[level]) for level in data.levels]
    _, plain = _measured(data)
    tried, part = {trial.candidate_id for trial in data.trials}, part_of(data.space, legal)
    for one in dict.fromkeys(best):
        candidate = data.candidates[one]
        mine = part(candidate)
        if mine is None or mine.family == mine.plain or mine.plain in plain:
            continue
        settings = {name: value for name, value in candidate.settings.items() if name not in SPECULATIVE}
        made = Candidate(dict(sorted({**settings, "speculation": "none"}.items())))
        if made.id not in tried and legal(made):
            return made
    return None


def part_of(space: Space, legal: Callable[[Candidate], bool]) -> Callable[[Candidate], Scheduled | None]:
    """Of which schedule a candidate can be part, for the search (see `planned`); None where none of it is legal."""
    legal_of: dict[Family, bool] = {}
    known: dict[str, Scheduled | None] = {}
    turn = sorted(space.workload.concurrency)[1:2]

    def found(one: Candidate) -> Scheduled | None:
        family, plain = family_of(one.settings), plain_family(one.settings)
        settings = {**space.args, **one.settings}
        depth = max(shape_at(settings, level).depth for level in space.workload.concurrency)
        if not depth:
            return Scheduled(plain, plain)
        if family not in legal_of:
            made = [each for load in turn for each in _candidates(dict(family), f"1:{depth},{load}:0", space.args)]
            legal_of[family] = any(legal(each) for each in made)
        return Scheduled(family, plain) if legal_of[family] else None

    def part(one: Candidate) -> Scheduled | None:
        if one.id not in known:
            known[one.id] = found(one)
        return known[one.id]

    return part


def _candidates(settings: dict[str, Setting], text: str, fixed: Mapping[str, Any]) -> list[Candidate]:
    """The schedule as a threshold where it is no more, and as a setting of its own; without what is `fixed` for all."""
    if "steps_by_batch" in fixed:
        return []  # it has the say, whatever else is set
    steps = max(depth for _, depth in parse_schedule(text))
    forms: list[dict[str, Setting]] = [{"steps_by_batch": text}]
    if (threshold := as_threshold(text)) is not None and fixed.get("num_steps", steps) == steps:
        forms.insert(0, {"disable_batch_threshold": threshold})
    deep: dict[str, Setting] = {} if "num_steps" in fixed else {"num_steps": steps}
    return [
        Candidate(dict(sorted({**settings, **deep, **form}.items())))
        for form in forms
        if not form.keys() & fixed.keys()
    ]
