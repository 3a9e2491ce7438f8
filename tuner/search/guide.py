"""What to try next: the candidate that promises most for what it costs. A pure function of what was measured.

The value of a candidate is a weighted sum of its log speed-ups over the baseline. What is promised is the expected
improvement over the best so far, times the chance that the candidate works and keeps the guards, per second that trying
it takes. Improvement is expected where the model says fast, and also where it does not know: so the search learns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr

from tuner.records import Candidate
from tuner.search.crashes import Crashes
from tuner.search.evidence import Evidence, Measurement, complete
from tuner.search.surrogate import Catalogue, Surrogate, spread
from tuner.search.threads import one_thread

LOOKED_AT = 250
"""Candidates whose uncertainty is worked out: those that are expected to be fastest, and as many drawn evenly."""

NEARLY = 0.003
"""An improvement that is expected to be below this is as good as none: blocks are noisier."""


@dataclass(frozen=True)
class Costs:
    """Seconds that trying a candidate takes: a launch, unless the running server can be changed to it, and its blocks.

    `hot` names the settings that can change on a running server; `running` holds the settings of the one that runs.
    With `stay` only what that server can become is suggested. `idle` names settings that do not matter where a
    candidate does not speculate.
    """

    launch_s: float = 300.0
    blocks_s: float = 135.0
    hot: frozenset[str] = frozenset()
    running: Mapping[str, Any] | None = None
    stay: bool = False
    idle: frozenset[str] = frozenset()

    @property
    def kept(self) -> dict[str, Any]:
        """Settings that suggestions must have: with `stay`, those of the running server that cannot change."""
        running = self.running or {}
        return {name: value for name, value in running.items() if self.stay and name not in self.hot}

    def of(self, settings: Mapping[str, Any]) -> float:
        """Seconds for these settings."""
        return self.blocks_s + (0.0 if self.reaches(settings) else self.launch_s)

    def reaches(self, settings: Mapping[str, Any]) -> bool:
        """Whether the running server can be changed to these settings."""
        if self.running is None:
            return False
        plain = settings.get("speculation") == "none"
        names = (settings.keys() | self.running.keys()) - self.hot - (self.idle if plain else frozenset())
        return all(settings.get(name) == self.running.get(name) for name in names)


@dataclass(frozen=True)
class Goal:
    """What is wanted. `weights` has one entry a level; `least` is the lowest speed-up allowed at any level, as a log.

    `ttft_p90_ms` is the longest time to the first token at any level.
    """

    weights: tuple[float, ...]
    least: float | None = None
    ttft_p90_ms: float | None = None


@dataclass(frozen=True)
class Suggestion:
    """What to try, and why: `gain` is the improvement expected of it (log), `works` the chance that it works.

    `expected` is its log speed-up over the baseline as the model sees it, give or take `sd`.
    """

    candidate: Candidate
    gain: float
    works: float
    expected: float
    sd: float


@dataclass(frozen=True)
class Guide:
    """The candidates of a space, ready for suggestions. Made once; suggestions are functions of evidence alone.

    `fixed` are the settings that all share. The baseline may be among the candidates or not. `known` are others of
    which something is known: they teach, and are never suggested.
    """

    candidates: tuple[Candidate, ...]
    baseline: Candidate
    levels: tuple[int, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[Candidate, ...] = ()

    @cached_property
    def everyone(self) -> tuple[Candidate, ...]:
        """The candidates, and behind them whoever else is known, each once."""
        return tuple({one.id: one for one in (*self.candidates, *self.known, self.baseline)}.values())

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Where each is in the catalogue."""
        return {candidate.id: i for i, candidate in enumerate(self.everyone)}

    @cached_property
    def catalogue(self) -> Catalogue:
        """All of them as numbers."""
        return Catalogue.of([complete(one.settings, self.fixed) for one in self.everyone], self.levels)

    @cached_property
    def crashes(self) -> Crashes:
        """What may crash."""
        return Crashes(self.catalogue.settings, self.levels)

    def works(self, evidence: Evidence) -> np.ndarray:
        """The chance that each candidate works."""
        failed = {self.place[c.id] for c in evidence.failed if c.id in self.place}
        if not failed:
            return np.ones(len(self.catalogue.settings))
        worked = {self.place[m.candidate.id] for m in evidence.measured if m.candidate.id in self.place} - failed
        crashed = {self.place[c.id] for c in evidence.crashed if c.id in self.place}
        return self.crashes.works(sorted(failed), sorted(worked), sorted(crashed))

    def surrogate(self, evidence: Evidence) -> Surrogate:
        """The model after this evidence."""
        return Surrogate(self.catalogue, evidence.measured, self.fixed)

    def suggest(
        self, evidence: Evidence, tried: Collection[str], goal: Goal, costs: Costs | None = None
    ) -> Suggestion | None:
        """The most promising candidate that was not tried; None when all were.

        Before anything is measured the first that may work is as good as any.
        """
        with one_thread():
            return self._suggest(evidence, tried, goal, costs or Costs())

    def _suggest(self, evidence: Evidence, tried: Collection[str], goal: Goal, costs: Costs) -> Suggestion | None:
        free = [i for i, one in enumerate(self.candidates) if one.id not in tried]
        if costs.stay:
            free = [i for i in free if costs.reaches(self.candidates[i].settings)]
        open_ = np.array(free, int)
        if not len(open_):
            return None
        works = self.works(evidence)
        if not evidence.measured:
            best = open_[int(np.argmax(works[open_]))]
            return Suggestion(self.candidates[best], math.inf, float(works[best]), 0.0, math.inf)
        model = self.surrogate(evidence)
        rates = model.log_rates()
        base = self.place[self.baseline.id]
        weights = np.array(goal.weights)
        value = (rates - rates[base]) @ weights
        best_value = self._incumbent(evidence, rates, value, base, goal)
        some = self._looked_at(open_, value, works)
        covariances = model.covariances(some, base)
        sd = spread(covariances, goal.weights)
        z = (value[some] - best_value) / sd
        gain = sd * (z * ndtr(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
        chance = works[some] * _keeps_guard(rates[some] - rates[base], covariances, goal)
        chance = chance * self._fast_first_token(evidence, some, goal)
        seconds = np.array([costs.of(self.candidates[i].settings) for i in some])
        pick = int(np.argmax(gain * chance / seconds))
        if gain[pick] < NEARLY:
            # Not even if it works: then what does work and is known least, which is where the model may be wrong.
            pick = int(np.argmax(np.minimum(sd, 1.0) * chance * works[some] / seconds))
        index = some[pick]
        return Suggestion(
            self.candidates[index],
            float(gain[pick] * chance[pick]),
            float(works[index]),
            float(value[index]),
            float(sd[pick]),
        )

    def _incumbent(self, evidence: Evidence, rates: np.ndarray, value: np.ndarray, base: int, goal: Goal) -> float:
        """The best value among what was measured and keeps the guard, by the model: its noise is averaged out."""
        failed = {c.id for c in evidence.failed}
        places = {self.place[m.candidate.id] for m in evidence.measured if m.candidate.id in self.place}
        best = 0.0
        for i in places - {self.place[c] for c in failed if c in self.place}:
            keeps = goal.least is None or (rates[i] - rates[base]).min() >= goal.least
            if keeps:
                best = max(best, float(value[i]))
        return best

    def _looked_at(self, open_: np.ndarray, value: np.ndarray, works: np.ndarray) -> np.ndarray:
        if len(open_) <= 2 * LOOKED_AT:
            return open_
        ranked = open_[np.argsort(-(value[open_] - 3.0 * (works[open_] < 0.1)), kind="stable")]
        rest = ranked[LOOKED_AT:]
        step = len(rest) / LOOKED_AT
        return np.concatenate([ranked[:LOOKED_AT], rest[(np.arange(LOOKED_AT) * step).astype(int)]])

    def _fast_first_token(self, evidence: Evidence, some: np.ndarray, goal: Goal) -> np.ndarray:
        """The chance to keep the limit on the time to the first token, of which no physics is known here."""
        limit = goal.ttft_p90_ms
        told = [m for m in evidence.measured if m.ttft_p90_ms]
        if limit is None or not told:
            return np.ones(len(some))
        as_rates = [Measurement(m.candidate, m.level, float(m.ttft_p90_ms or 0.0), sd=0.1) for m in told]
        model = Surrogate(self.catalogue, as_rates, self.fixed, physics=False)
        sd = np.sqrt(np.maximum(np.diagonal(model.covariances(some), axis1=1, axis2=2), 1e-8))
        return ndtr((math.log(limit) - model.log_rates()[some]) / sd).min(axis=1)


def _keeps_guard(speedups: np.ndarray, covariances: np.ndarray, goal: Goal) -> np.ndarray:
    """The chance that a candidate is slow at no level: that of its most doubtful one."""
    if goal.least is None:
        return np.ones(len(speedups))
    sd = np.sqrt(np.maximum(np.diagonal(covariances, axis1=1, axis2=2), 1e-8))
    return ndtr((speedups - goal.least) / sd).min(axis=1)


def pays(suggestion: Suggestion | None) -> bool:
    """Whether more search can pay: what is expected of the best suggestion can be told from noise."""
    return suggestion is not None and suggestion.gain >= NEARLY
