"""The model of speculation as an Optuna sampler.

    study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=1))
    trial = study.ask()
    candidate = space.suggest(trial)

In a study of the tuner it is given the study's blocks. In a plain Optuna study it goes by the trials alone: a value is
the log speed-up over the baseline, to be maximised, and a trial that failed or has a violated constraint did not work.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from tuner.records import Candidate, Setting
from tuner.search.evidence import Evidence, Measurement
from tuner.search.guide import Costs, Goal, Guide, Scheduled, Suggestion, best_measured
from tuner.space import Listed, Space
from tuner.space.space import Drawn, visible

POOL = 2_000
"""Candidates drawn for one suggestion where a space cannot be listed."""

NEIGHBOURS = 40
"""Changed copies, of each of the best measured, that the pool also holds."""

BEST = 5
"""Of the measured candidates so many have changed copies in the pool."""

VALUE_SD = 0.02
"""Of a trial's value in a plain Optuna study, where nothing is known of how it was measured."""


class ModelSampler(optuna.samplers.BaseSampler):
    """Proposes the candidate that promises most for its cost; a function of its arguments and the trials.

    Args:
        space: whose parameters are asked for, by `space.suggest(trial)`.
        seed: of what is drawn where the space cannot be listed.
        universe: the candidates that may be launched, by id; made from the space when left out.
        legal: whether a candidate may be launched; of the space's rules alone when left out.
        evidence: what is known, beside the trials; None: they are all there is.
        goal: what is wanted; of the space when left out.
        costs: what a launch costs, and which server runs.
        scheduled: of what schedule of draft depths a candidate can be part, where whoever asks tries such.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        universe: Mapping[str, Listed] | None = None,
        legal: Callable[[Candidate], bool] | None = None,
        evidence: Callable[[], Evidence] | None = None,
        goal: Callable[[], Goal] | None = None,
        costs: Callable[[], Costs] | None = None,
        scheduled: Callable[[Candidate], Scheduled | None] | None = None,
    ) -> None:
        self.space = space
        self.seed = seed
        self.legal = legal or (lambda candidate: space.forbidden(candidate) is None)
        self.evidence = evidence
        self.goal = goal or (lambda: _goal_of(space))
        self.costs = costs or Costs
        self.scheduled = scheduled
        self.last: Suggestion | None = None
        """Why the latest proposal was made; None where nothing untried was left."""
        if universe is None and (listed := space.listed()) is not None:
            universe = {i: each for i, each in listed.items() if self.legal(each.candidate)}
        self._universe = universe
        self._guide: Guide | None = None
        self._answers: dict[int, Mapping[str, Setting]] = {}

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, optuna.distributions.BaseDistribution]:
        """None: which parameters there are hangs on the values of others."""
        return {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: dict[str, optuna.distributions.BaseDistribution],
    ) -> dict[str, Any]:
        """Chooses the candidate; its values are told as they are asked for."""
        if self.evidence is None and study.directions != [optuna.study.StudyDirection.MAXIMIZE]:
            raise ValueError(
                "ModelSampler takes the one value of a trial for its log speed-up over the baseline: create the study "
                "with direction='maximize'"
            )
        before = [one for one in study.get_trials(deepcopy=False) if one.number < trial.number]
        tried = [one.user_attrs.get("candidate") or candidate_of(self.space, one).id for one in before]
        evidence = self.evidence() if self.evidence is not None else evidence_of_trials(self.space, before)
        if (chosen := self.choose(tried, evidence)) is not None:
            self._answers[trial.number] = chosen.values
        return {}

    def choose(self, before: Sequence[str], evidence: Evidence) -> Listed | None:
        """The candidate for the trial that comes after those of these ones; None where nothing untried is left."""
        tried = frozenset(before)
        costs = self.costs()
        universe = self._universe
        if universe is None:
            universe = self._drawn(evidence, self.goal(), len(before), costs.kept)
            guide = self._made(universe, _beside(universe, evidence))
        else:
            # A schedule, or plain decoding, may have been measured though the space lists no such.
            known = _beside(universe, evidence)
            if self._guide is None or {one.id for one in self._guide.known} != {one.id for one in known}:
                self._guide = self._made(universe, known)
            guide = self._guide
        self.last = guide.suggest(evidence, tried, self.goal(), costs)
        return universe[self.last.candidate.id] if self.last is not None else None

    def _made(self, universe: Mapping[str, Listed], known: tuple[Candidate, ...]) -> Guide:
        space, candidates = self.space, tuple(listed.candidate for listed in universe.values())
        return Guide(candidates, space.baseline, space.workload.concurrency, visible(space.args), known, self.scheduled)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: optuna.distributions.BaseDistribution,
    ) -> Any:
        """The value of the chosen candidate; drawn by the seed where none was left to choose, or it has no such one."""
        known = self._answers.get(trial.number, {})
        if param_name in known:
            return known[param_name]
        drawing = optuna.samplers.RandomSampler(seed=_number(self.seed, trial.number, param_name))
        return drawing.sample_independent(study, trial, param_name, param_distribution)

    def _drawn(self, evidence: Evidence, goal: Goal, number: int, kept: Mapping[str, Setting]) -> dict[str, Listed]:
        """Candidates of a space that cannot be listed: drawn anywhere, and near the best that were measured."""
        draw = random.Random(_number(self.seed, number, "pool"))
        pool: dict[str, Listed] = {}
        best = best_measured(evidence, self.space.baseline, self.space.workload.concurrency, goal)[:BEST]
        # The baseline, and schedules, may have values that the parameters do not offer: those are not copied.
        offered, kept = [self.space.offered(one.settings) for one in best], self.space.offered(kept)
        nears: Sequence[Mapping[str, Setting]] = [near for near in offered for _ in range(NEIGHBOURS)]
        for near in [*nears, *({} for _ in range(POOL))]:
            made = self.space.asked(_Drawn(draw, near, kept))
            if made.candidate.id not in pool and self.legal(made.candidate):
                pool[made.candidate.id] = made
        return pool


class _Drawn:
    """Answers a space's questions at random: with what is kept, and two times in three as settings nearby do."""

    def __init__(self, draw: random.Random, near: Mapping[str, Setting], kept: Mapping[str, Setting]) -> None:
        self.draw = draw
        self.fresh = Drawn(draw)
        self.near = near
        self.kept = kept

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._kept(name, lambda: self.fresh.suggest_categorical(name, choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> int:
        return self._kept(name, lambda: self.fresh.suggest_int(name, low, high, step=step))

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> float:
        return self._kept(name, lambda: self.fresh.suggest_float(name, low, high, step=step))

    def _kept(self, name: str, fresh: Callable[[], Any]) -> Any:
        if name in self.kept:
            return self.kept[name]
        return self.near[name] if name in self.near and self.draw.random() < 2 / 3 else fresh()


class _Given:
    """Answers a space's questions with a trial's parameters."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.values[name]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> int:
        return int(self.values[name])

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> float:
        return float(self.values[name])


def candidate_of(space: Space, trial: optuna.trial.FrozenTrial) -> Candidate:
    """The candidate that a trial's parameters make up; the baseline where it has none."""
    try:
        return space.suggest(_Given(trial.params)) if trial.params else space.baseline
    except KeyError:  # of a space that had fewer parameters
        return Candidate(dict(trial.params))


def evidence_of_trials(space: Space, trials: Sequence[optuna.trial.FrozenTrial]) -> Evidence:
    """What the values of a plain Optuna study say: the same speed-up at every level. What crashed is told as FAIL."""
    levels = space.workload.concurrency
    measured = [Measurement(space.baseline, level, float(level)) for level in levels]
    failed = []
    for trial in trials:
        crashed = trial.state == optuna.trial.TrialState.FAIL and bool(trial.params)
        if not crashed and (trial.state != optuna.trial.TrialState.COMPLETE or trial.value is None):
            continue
        candidate = candidate_of(space, trial)
        if crashed or trial.value is None or any(value > 0 for value in trial.constraints.values()):
            failed.append(candidate)
            continue
        speedup = math.exp(max(-5.0, min(5.0, trial.value)))
        measured += [Measurement(candidate, level, level * speedup, sd=VALUE_SD) for level in levels]
    return Evidence(tuple(measured), tuple(failed), tuple(failed))


def _beside(universe: Mapping[str, Listed], evidence: Evidence) -> tuple[Candidate, ...]:
    """The candidates of which something is known, and that are not among those to choose from; each once."""
    seen = (*(one.candidate for one in evidence.measured), *evidence.failed)
    return tuple({one.id: one for one in seen if one.id not in universe}.values())


def _goal_of(space: Space) -> Goal:
    return Goal(space.workload.weights)


def _number(seed: int, number: int, name: str) -> int:
    return random.Random(f"{seed}/{number}/{name}").getrandbits(32)
