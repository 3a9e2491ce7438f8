"""What to try next: the candidate that promises most for what it costs. A pure function of what was measured.

The value of a candidate is a weighted sum of its log speed-ups over the baseline. What is promised is the expected
improvement over the best so far, times the chance that the candidate works and keeps the guards, per second that trying
it takes. Improvement is expected where the model says fast, and also where it does not know: so the search learns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.special import ndtr

from tuner.records import Candidate
from tuner.search.crashes import Crashes
from tuner.search.evidence import Evidence, Measurement, complete
from tuner.search.surrogate import Catalogue, Surrogate, spread
from tuner.search.threads import one_thread

Kept = TypeVar("Kept")

LOOKED_AT = 250
"""Candidates whose uncertainty is worked out: those that are expected to be fastest, and as many drawn evenly."""

UNLIKELY = 0.1
"""A candidate with less of a chance to work is not tried for what it may teach alone."""

NEARLY = 0.003
"""An improvement that is expected to be below this is as good as none: blocks are noisier."""


@dataclass(frozen=True)
class Costs:
    """Seconds that trying a candidate takes: a launch, unless the running server can be changed to it, and its blocks.

    `hot` names the settings that can change on a running server; `running` holds the settings of the one that runs.
    With `stay` only what that server can become is suggested. `idle` names settings that do not matter where a
    candidate does not speculate. On a launch that can serve the `baseline` its blocks come first: `turn_s` seconds.
    Where launches are `scarce`, fewer than the candidates that are wanted, none is made where no gain is expected of
    it before all that works is tried that the running server can become.
    """

    launch_s: float = 300.0
    blocks_s: float = 135.0
    hot: frozenset[str] = frozenset()
    running: Mapping[str, Any] | None = None
    stay: bool = False
    idle: frozenset[str] = frozenset()
    baseline: Mapping[str, Any] | None = None
    turn_s: float = 0.0
    scarce: bool = False

    @property
    def kept(self) -> dict[str, Any]:
        """Settings that suggestions must have: with `stay`, those of the running server that cannot change."""
        running = self.running or {}
        return {name: value for name, value in running.items() if self.stay and name not in self.hot}

    def of(self, settings: Mapping[str, Any]) -> float:
        """Seconds for these settings."""
        return self.blocks_s + (0.0 if self.reaches(settings) else self.start(settings))

    def start(self, settings: Mapping[str, Any]) -> float:
        """Seconds until a launch made for these settings is ready to measure them."""
        turn = self.baseline is not None and self._changes(settings, self.baseline)
        return self.launch_s + (self.turn_s if turn else 0.0)

    def reaches(self, settings: Mapping[str, Any]) -> bool:
        """Whether the running server can be changed to these settings."""
        return self.running is not None and self._changes(self.running, settings)

    def _changes(self, launched: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        plain = settings.get("speculation") == "none"
        names = (settings.keys() | launched.keys()) - self.hot - (self.idle if plain else frozenset())
        return all(settings.get(name) == launched.get(name) for name in names)


class Limit(NamedTuple):
    """The longest that a latency (named as in `Measurement`) may be, in milliseconds, at one level; None: at all."""

    latency: str
    at_most_ms: float
    level: int | None = None

    def holds(self, level: int) -> bool:
        """Whether it holds at a level."""
        return self.level is None or self.level == level


@dataclass(frozen=True)
class Goal:
    """What is wanted. `weights` has one entry a level; `least` is the lowest log speed-up allowed at any level."""

    weights: tuple[float, ...]
    least: float | None = None
    limits: tuple[Limit, ...] = ()


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
class Scheduled:
    """What a schedule of draft depths can be made of: a `family` of candidates that differ in their depth alone, and
    `plain`, those that decode plainly and are otherwise alike."""

    family: Hashable
    plain: Hashable


@dataclass(frozen=True)
class Guide:
    """The candidates of a space, ready for suggestions. Made once; suggestions are functions of evidence alone.

    `fixed` are the settings that all share. The baseline may be among the candidates or not. `known` are others of
    which something is known: they teach, and are never suggested. `scheduled` tells of what schedule a candidate can
    be part, None where of none: so that one is tried which is best at one load, and slow at another.
    """

    candidates: tuple[Candidate, ...]
    baseline: Candidate
    levels: tuple[int, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[Candidate, ...] = ()
    scheduled: Callable[[Candidate], Scheduled | None] | None = None

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
        failed = self._places(c.id for c in evidence.failed)
        if not failed:
            return np.ones(len(self.catalogue.settings))
        worked, crashed = self._measured(evidence) - failed, self._places(c.id for c in evidence.crashed)
        return self.crashes.works(sorted(failed), sorted(worked), sorted(crashed))

    def _places(self, candidates: Iterable[str]) -> set[int]:
        """Where those of them are that the catalogue has."""
        return {self.place[candidate] for candidate in set(candidates) if candidate in self.place}

    def _measured(self, evidence: Evidence) -> set[int]:
        """Where those are that have a measurement."""
        return self._kept("measured", evidence, lambda: self._places(m.candidate.id for m in evidence.measured))

    def surrogate(self, evidence: Evidence) -> Surrogate:
        """The model after this evidence."""
        return self._fit("", evidence)

    def _fit(self, latency: str, evidence: Evidence) -> Surrogate:
        """The model of throughput, or of a latency."""

        def fitted() -> Surrogate:
            if not latency:
                return Surrogate(self.catalogue, evidence.measured, self.fixed)
            told = [(m, ms) for m in evidence.measured if (ms := getattr(m, latency))]
            as_rates = [Measurement(m.candidate, m.level, float(ms), sd=0.1) for m, ms in told]
            return Surrogate(self.catalogue, as_rates, self.fixed, physics=False)

        return self._kept(latency or "throughput", evidence, fitted)

    def _kept(self, name: str, evidence: Evidence, make: Callable[[], Kept]) -> Kept:
        """What is made of the latest evidence, once: several goals ask for the same."""
        known = self._latest.get(name)
        if known is None or known[0] is not evidence.measured:
            known = self._latest[name] = evidence.measured, make()
        found: Kept = known[1]
        return found

    @cached_property
    def _latest(self) -> dict[str, tuple[tuple[Measurement, ...], Any]]:
        return {}

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
        chance = chance * self._in_time(evidence, some, goal)
        seconds = self._seconds(some, costs, gain * chance)
        pick = int(np.argmax(gain * chance / seconds))
        promised = gain[pick] * chance[pick] / seconds[pick]
        if (part := self._part(evidence, open_, rates, works, best_value, goal, costs, promised)) is not None:
            return part
        if gain[pick] < NEARLY:
            # Not even if it works: then what does work and is known least, which is where the model may be wrong.
            learns = np.minimum(sd, 1.0) * chance * works[some] / seconds
            here = np.array([costs.reaches(self.candidates[i].settings) for i in some]) & (works[some] > UNLIKELY)
            if costs.scarce and here.any():
                # By what it might teach alone: of those here, none may have a chance to keep the guard.
                learns = np.where(here, learns + 1e-9 * sd, -1.0)
            pick = int(np.argmax(learns))
        index = some[pick]
        return Suggestion(
            self.candidates[index],
            float(gain[pick] * chance[pick]),
            float(works[index]),
            float(value[index]),
            float(sd[pick]),
        )

    def _part(
        self,
        evidence: Evidence,
        open_: np.ndarray,
        rates: np.ndarray,
        works: np.ndarray,
        best_value: float,
        goal: Goal,
        costs: Costs,
        least: float,
    ) -> Suggestion | None:
        """A candidate that promises more than `least` a second as part of a schedule: at a load it leads its family.

        A family is worth what those of its depths come to that were measured, this one, and plain decoding, each where
        it leads: by the model's means, for levels are many, and noise leads at one of them soon. The schedule takes as
        long again as the candidate.
        """
        family, plain = self._families
        some = open_[family[open_] >= 0]
        if not len(some) or len(self.levels) < 2:
            return None
        base, weights = self.place[self.baseline.id], np.array(goal.weights)
        gains = rates - rates[base]
        measured = np.array(sorted(self._measured(evidence) - self._places(c.id for c in evidence.failed)), int)
        measured = measured[family[measured] >= 0]
        known = np.full((int(family.max()) + 1, len(self.levels)), -np.inf)
        np.maximum.at(known, family[measured], np.maximum(gains[measured], gains[plain[measured]]))
        best = float((known[np.unique(family[measured])] @ weights).max(initial=best_value))
        leads = np.maximum(np.maximum(known[family[some]], gains[plain[some]]), gains[some])
        promised = leads @ weights - best
        worth = np.flatnonzero(promised * works[some] >= NEARLY)
        if not len(worth):
            return None
        some, promised = some[worth], promised[worth]
        each = promised * works[some] / (2 * np.array([costs.of(self.candidates[i].settings) for i in some]))
        pick = int(np.argmax(each))
        if each[pick] <= least:
            return None
        index = some[pick]
        sd = spread(self.surrogate(evidence).covariances(np.array([index]), base), goal.weights)
        gain, chance, expected = promised[pick], float(works[index]), float(gains[index] @ weights)
        return Suggestion(self.candidates[index], float(gain) * chance, chance, expected, float(sd[0]))

    @cached_property
    def _families(self) -> tuple[np.ndarray, np.ndarray]:
        """For each candidate the number of its family, and where plain decoding beside it is; -1 where it has none.

        Where no candidate decodes plainly beside it, what does so beside the baseline stands in.
        """
        parts = [self.scheduled(one) if self.scheduled is not None else None for one in self.everyone]
        plain = {part.plain: i for i, part in reversed([*enumerate(parts)]) if part and part.family == part.plain}
        first = parts[self.place[self.baseline.id]]
        stand_in = plain.get(first.plain, -1) if first else -1
        numbers: dict[Hashable, int] = {}
        family, beside = np.full(len(parts), -1), np.full(len(parts), -1)
        for i, part in enumerate(parts):
            if part is not None and part.family != part.plain and (place := plain.get(part.plain, stand_in)) >= 0:
                family[i], beside[i] = numbers.setdefault(part.family, len(numbers)), place
        return family, beside

    def _seconds(self, some: np.ndarray, costs: Costs, promised: np.ndarray) -> np.ndarray:
        """What trying each of them takes; `promised` is the improvement that each lets expect.

        While a server can be changed to something that promises enough, to leave it takes the way back as well.
        """
        settings = [self.candidates[i].settings for i in some]
        here = np.array([costs.reaches(one) for one in settings], bool)
        back = costs.start(costs.running or {}) if promised[here].max(initial=0.0) >= NEARLY else 0.0
        return np.array([costs.of(one) for one in settings]) + np.where(here, 0.0, back)

    def _incumbent(self, evidence: Evidence, rates: np.ndarray, value: np.ndarray, base: int, goal: Goal) -> float:
        """The best value among what was measured and keeps the guards, by the model: its noise is averaged out."""
        failed = {c.id for c in evidence.failed} | late(evidence, goal)
        places = np.array(sorted(self._measured(evidence) - self._places(failed)), int)
        if goal.least is not None:
            places = places[(rates[places] - rates[base]).min(axis=1) >= goal.least]
        return float(value[places].max(initial=0.0))

    def _looked_at(self, open_: np.ndarray, value: np.ndarray, works: np.ndarray) -> np.ndarray:
        if len(open_) <= 2 * LOOKED_AT:
            return open_
        ranked = open_[np.argsort(-(value[open_] - 3.0 * (works[open_] < 0.1)), kind="stable")]
        rest = ranked[LOOKED_AT:]
        step = len(rest) / LOOKED_AT
        return np.concatenate([ranked[:LOOKED_AT], rest[(np.arange(LOOKED_AT) * step).astype(int)]])

    def _in_time(self, evidence: Evidence, some: np.ndarray, goal: Goal) -> np.ndarray:
        """The chance to keep the limits on latencies, of which no physics is known here: that of the most doubtful."""
        chance = np.ones(len(some))
        for limit in goal.limits:
            if not any(getattr(m, limit.latency) for m in evidence.measured):
                continue
            model = self._fit(limit.latency, evidence)
            sd = np.sqrt(np.maximum(np.diagonal(model.covariances(some), axis1=1, axis2=2), 1e-8))
            keeps = ndtr((math.log(limit.at_most_ms) - model.log_rates(some)) / sd)
            where = [i for i, level in enumerate(self.levels) if limit.holds(level)]
            chance = np.minimum(chance, keeps[:, where].min(axis=1, initial=1.0))
        return chance


def late(evidence: Evidence, goal: Goal) -> frozenset[str]:
    """The candidates whose latencies were measured above a limit, in the mean of their blocks at a level."""
    if not goal.limits:
        return frozenset()
    over: dict[tuple[str, int, Limit], list[float]] = defaultdict(list)
    for m in evidence.measured:
        for limit in goal.limits:
            if limit.holds(m.level) and (ms := getattr(m, limit.latency)):
                over[m.candidate.id, m.level, limit].append(math.log(ms / limit.at_most_ms))
    return frozenset(candidate for (candidate, _, _), logs in over.items() if math.fsum(logs) > 0)


def best_measured(evidence: Evidence, baseline: Candidate, levels: Sequence[int], goal: Goal) -> list[Candidate]:
    """Who was measured at all levels, best first by the goal; behind all others those that break a guard."""
    logs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for m in evidence.measured:
        logs[m.candidate.id][m.level].append(math.log(m.tokens_per_s))
    whole = {i: [fmean(by[level]) for level in levels] for i, by in logs.items() if set(levels) <= by.keys()}
    base, slow = whole.get(baseline.id, [0.0] * len(levels)), late(evidence, goal)

    def rank(candidate: str) -> tuple[bool, float]:
        gains = [mine - theirs for mine, theirs in zip(whole[candidate], base, strict=True)]
        breaks = candidate in slow or (goal.least is not None and baseline.id in whole and min(gains) < goal.least)
        return breaks, -math.fsum(w * gain for w, gain in zip(goal.weights, gains, strict=True))

    named = {m.candidate.id: m.candidate for m in evidence.measured}
    return [named[candidate] for candidate in sorted(whole, key=rank)]


def _keeps_guard(speedups: np.ndarray, covariances: np.ndarray, goal: Goal) -> np.ndarray:
    """The chance that a candidate is slow at no level: that of its most doubtful one."""
    if goal.least is None:
        return np.ones(len(speedups))
    sd = np.sqrt(np.maximum(np.diagonal(covariances, axis1=1, axis2=2), 1e-8))
    return ndtr((speedups - goal.least) / sd).min(axis=1)


def pays(suggestion: Suggestion | None) -> bool:
    """Whether more search can pay: what is expected of the best suggestion can be told from noise."""
    return suggestion is not None and suggestion.gain >= NEARLY
