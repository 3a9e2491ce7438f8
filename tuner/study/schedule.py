"""The schedule of draft depths that a study's blocks ask for, as a candidate of its own. A pure function of records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tuner.engines.base import UNSET
from tuner.engines.speculation import schedule as parse_schedule
from tuner.records import Candidate, Setting
from tuner.search.crossing import Crossing, Curve, as_threshold, best_depths, crossings, ratio, schedule
from tuner.search.evidence import BLOCK_SD
from tuner.search.shape import shape_at
from tuner.space.space import SPECULATIVE
from tuner.study.data import StudyData
from tuner.study.score import score, weights

WORTH = 0.002
"""What a schedule must promise beyond the best candidate (log), or it is not tried."""

_BY_BATCH = ("num_steps", "disable_batch_threshold", "steps_by_batch")

Family = tuple[tuple[str, Setting], ...]


def curves_of(data: StudyData) -> dict[Family, dict[int, Curve]]:
    """Family of candidates → draft depth → log rates over concurrency, as differences to the baseline.

    A family has everything in common but the depth and when it is in force; plain decoding (depth 0) is shared by all
    that agree in what has nothing to do with speculation. A candidate that is told not to speculate at a level shows
    what its family does there without.
    """
    seen: dict[Family, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    plain: dict[Family, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    found = [(pair.candidate_id, pair.concurrency, pair.log_ratio) for pair in data.pairs]
    found += [(data.baseline.id, level, 0.0) for level in data.levels]
    fixed: Mapping[str, Any] = data.space.args
    for candidate_id, level, log_ratio in found:
        settings = data.settings_of(candidate_id)
        depth = shape_at({**fixed, **settings}, level).depth
        if depth:
            seen[_family(settings)][depth, level].append(log_ratio)
        else:
            plain[_plain(settings)][level].append(log_ratio)
    curves: dict[Family, dict[int, Curve]] = {}
    for family, values in seen.items():
        by_depth: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        for (depth, level), ratios in values.items():
            by_depth[depth][level] = _mean(ratios)
        by_depth[0] = {level: _mean(ratios) for level, ratios in plain[_plain(dict(family))].items()}
        curves[family] = dict(by_depth)
    return curves


def _mean(ratios: list[float]) -> tuple[float, float]:
    return math.fsum(ratios) / len(ratios), BLOCK_SD * math.sqrt(2 / len(ratios))


def _family(settings: Mapping[str, Setting]) -> Family:
    chain = settings.get("topk", 1) == 1
    left = (*_BY_BATCH, "num_draft_tokens") if chain else _BY_BATCH
    return tuple(sorted((name, value) for name, value in settings.items() if name not in left))


def _plain(settings: Mapping[str, Setting]) -> Family:
    left = (*SPECULATIVE, "speculation")
    kept = {name: value for name, value in settings.items() if name not in left}
    # A variable that is unset is one that is not spoken of: the baseline seldom names them.
    return tuple(sorted((name, value) for name, value in kept.items() if value != UNSET))


def measured_crossings(data: StudyData) -> dict[Family, tuple[Crossing, ...]]:
    """Where speculation begins and ceases to pay, for every family, at its depth that is best over all levels."""
    found = {}
    for family, curves in curves_of(data).items():
        depths = [depth for depth in curves if depth and len(curves[depth]) == len(data.levels)]
        if not depths or len(curves[0]) < len(data.levels):
            continue
        weight = weights(data)
        best = max(depths, key=lambda depth: math.fsum(weight[at] * curves[depth][at][0] for at in data.levels))
        found[family] = crossings(ratio(curves[best], curves[0]))
    return found


def scheduled(data: StudyData, legal: Callable[[Candidate], bool]) -> Candidate | None:
    """The untried schedule that promises most beyond the best candidate so far; None where none does.

    Its blocks at the measured levels lie on both sides of each of its changes, and so do its pairs in the confirmation.
    """
    weight = weights(data)
    guard = data.space.objective.guard.min_speedup
    scores = [score(data, trial.candidate_id) for trial in data.measured if not trial.running]
    best = max((one.value for one in scores if all(v <= 0 for v in one.constraints.values())), default=0.0)
    tried: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
    for trial in data.trials:
        settings = data.settings_of(trial.candidate_id)
        tried[_family(settings)].add(tuple(shape_at({**data.space.args, **settings}, at).depth for at in data.levels))
    promised: list[tuple[float, Candidate]] = []
    for family, curves in curves_of(data).items():
        text = schedule(curves)
        chosen = best_depths(curves)
        if text is None or set(chosen) != set(data.levels):
            continue
        ratios = {level: curves[depth][level][0] for level, depth in chosen.items()}
        value = math.fsum(weight[level] * ratio for level, ratio in ratios.items())
        if value < max(best, 0.0) + WORTH or (guard is not None and min(ratios.values()) < math.log(guard)):
            continue
        if tuple(chosen[level] for level in data.levels) in tried[family]:
            continue  # what noise moves a change by between two levels is no other schedule
        promised += [(value, one) for one in _candidates(dict(family), text) if legal(one)][:1]
    return max(promised, key=lambda one: (one[0], one[1].id), default=(0.0, None))[1]


def _candidates(settings: dict[str, Setting], text: str) -> list[Candidate]:
    """The schedule as a setting of its own, and as a threshold where an engine has only that."""
    steps = max(depth for _, depth in parse_schedule(text))
    found = [Candidate(dict(sorted({**settings, "num_steps": steps, "steps_by_batch": text}.items())))]
    threshold = as_threshold(text)
    if threshold is not None:
        short = {**settings, "num_steps": steps, "disable_batch_threshold": threshold}
        found.insert(0, Candidate(dict(sorted(short.items()))))
    return found
