"""What the search's model (docs/search.md) expects of the candidates looked at, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tuner.judge.intervals import ALPHA
from tuner.search.evidence import complete
from tuner.search.surrogate import Catalogue, Surrogate
from tuner.study.data import StudyData
from tuner.study.evidence import evidence_of, fixed_of

LEAST_CANDIDATES = 3
"""Measured ones, the baseline among them; fewer teach the model nothing that is not its prior."""


@dataclass(frozen=True)
class Expected:
    """The change of throughput that the model expects at a level: a ratio to the baseline, with a 95 % interval."""

    concurrency: int
    ratio: float
    low: float
    high: float


def expected(data: StudyData, candidates: Sequence[str]) -> Mapping[str, tuple[Expected, ...]]:
    """Candidate → what is expected at every level and between them; empty where too little was measured.

    The model has seen every valid block of the study, those of the candidate too: where it lies off the points, they
    are not as speculation usually behaves.
    """
    from scipy import stats

    known = evidence_of(data).measured
    measured = {one.candidate.id: one.candidate for one in known}
    if len(measured) < LEAST_CANDIDATES or data.baseline.id not in measured:
        return {}
    everyone = list({**measured, **{c: data.candidates[c] for c in candidates}}.values())
    place = {candidate.id: i for i, candidate in enumerate(everyone)}
    levels = _levels(data.levels)
    fixed = fixed_of(data)
    catalogue = Catalogue.of([complete(one.settings, fixed) for one in everyone], levels)
    model = Surrogate(catalogue, known, fixed)
    base, chosen = place[data.baseline.id], np.array([place[candidate] for candidate in candidates], int)
    rates = model.log_rates()
    means = rates[chosen] - rates[base]
    sds = np.sqrt(np.maximum(0.0, np.diagonal(model.covariances(chosen, base), axis1=1, axis2=2)))
    wide = float(stats.norm.ppf(1 - ALPHA / 2))
    return {
        candidate: tuple(
            Expected(level, math.exp(mean), math.exp(mean - wide * sd), math.exp(mean + wide * sd))
            for level, mean, sd in zip(levels, means[i], sds[i], strict=True)
        )
        for i, candidate in enumerate(candidates)
    }


def _levels(measured: Sequence[int]) -> tuple[int, ...]:
    """The levels, and one between each two."""
    ordered = sorted(measured)
    between = {round(math.sqrt(a * b)) for a, b in pairwise(ordered)}
    return tuple(sorted({*ordered, *between}))
