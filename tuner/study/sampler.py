"""What to try next: an Optuna sampler on what is known so far, as a pure function of it and of the trial's number.

The proposal is made in an in-memory copy of the study and only then stored, in one transaction with all its
parameters. So there is no half-made proposal for a kill to leave behind, no other process's zombie to repel the
search, and a resumed study proposes exactly what it would have proposed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tuner.records import Candidate
from tuner.search.evidence import Evidence
from tuner.search.guide import NEARLY, Costs, Goal, Scheduled, Suggestion, pays
from tuner.space import Listed, Space
from tuner.study.model_sampler import POOL, ModelSampler, evidence_of_trials
from tuner.study.quiet_optuna import optuna

STARTUP_TRIALS = 8
GENERATION = 12
"""Candidates in a generation of NSGA-II."""

PATIENCE = 4
"""Proposals in a row that were known or ruled out, after which an untried candidate is drawn instead, if they can be
listed: a sampler that has found its peak keeps proposing it."""


@dataclass(frozen=True)
class Proposal:
    """What the sampler picked: its parameters as Optuna keeps them, and the candidate that they make."""

    candidate: Candidate
    params: Mapping[str, Any]
    distributions: Mapping[str, optuna.distributions.BaseDistribution]
    system_attrs: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler itself notes of a trial (the generation of NSGA-II)."""


class _Answers:
    """Answers a space's questions with given values, and notes the distributions."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.distributions: dict[str, optuna.distributions.BaseDistribution] = {}

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._note(name, optuna.distributions.CategoricalDistribution(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> int:
        return self._note(name, optuna.distributions.IntDistribution(low, high, step=step))

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> float:
        return self._note(name, optuna.distributions.FloatDistribution(low, high, step=step))

    def _note(self, name: str, distribution: optuna.distributions.BaseDistribution) -> Any:
        self.distributions[name] = distribution
        return self.values[name]


def seed_of(study_seed: int, number: int) -> int:
    """The sampler's seed for trial `number`."""
    digest = hashlib.sha256(f"{study_seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


class Proposer:
    """Makes the proposals of a study. It keeps only what follows from the space; all else is an argument.

    Args:
        space: the study's.
        seed: the study's.
        universe: the candidates that may be launched, by id; None where they cannot be listed.
        legal: whether a candidate may be launched.
        scheduled: of what schedule a candidate can be part, where the study tries such.
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        universe: Mapping[str, Listed] | None,
        legal: Callable[[Candidate], bool] | None = None,
        scheduled: Callable[[Candidate], Scheduled | None] | None = None,
    ) -> None:
        self.space = space
        self.seed = seed
        self.universe = universe
        self._model: ModelSampler | None = None
        if space.sampler == "model":
            self._model = ModelSampler(space, seed=seed, universe=universe, legal=legal, scheduled=scheduled)

    @property
    def why(self) -> Suggestion | None:
        """What the model expects of the latest proposal; None with any other sampler."""
        return self._model.last if self._model is not None else None

    def propose(
        self,
        tried: Sequence[str],
        history: Callable[[], Sequence[optuna.trial.FrozenTrial]],
        evidence: Evidence | None = None,
        goal: Goal | None = None,
        costs: Costs | None = None,
        fixed: Mapping[str, Any] | None = None,
        hopeless: Collection[str] = (),
    ) -> Proposal:
        """The proposal for trial `len(tried)`, given all trials before it.

        Args:
            tried: the candidates of the trials, by number.
            history: the trials as Optuna has them, for its own samplers: reading them takes time.
            evidence: the blocks behind them; None: only their values are known.
            goal: what is wanted; None: what the space says of its levels.
            costs: what trying a candidate costs now, and which server runs: how the model weighs a launch.
            fixed: parameters that have this value wherever they are active, so that the search stays with a launch that
                is up; for the samplers that know of no costs.
            hopeless: candidates that are known not to work; Optuna's own samplers do not hear of them.
        """
        left: Listed | None = None
        if self._model is not None:
            self._tell_model(self._model, goal, costs)
            known = evidence if evidence is not None else evidence_of_trials(self.space, history())
            left = self._model.choose((*tried, *hopeless), known)
        elif self.space.sampler == "exhaustive" and self.universe is not None:
            seen = frozenset((*tried, *hopeless))
            left = next((listed for i, listed in self.universe.items() if i not in seen), None)
        if left is not None:
            return proposal_of(self.space, left)
        sampler = self._sampler(len(tried))
        if fixed:
            sampler = optuna.samplers.PartialFixedSampler(dict(fixed), sampler)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        # The baseline, schedules and plain decoding have no parameters: with one of those among them, samplers that go
        # by what all trials have in common would draw at random.
        before = [one for one in history() if one.params]
        study.add_trials(_alike(before) if self.space.sampler == "gp" else before)
        trial = study.ask()
        made = self.space.asked(trial)
        attrs = study.get_trials(deepcopy=False)[-1].system_attrs
        return Proposal(made.candidate, made.values, trial.distributions, dict(attrs))

    def fruitless(
        self, tried: Sequence[str], evidence: Evidence, goals: Sequence[Goal], hopeless: Collection[str] = ()
    ) -> str:
        """Why more search cannot pay, in a sentence; "" while it can, or where the sampler does not know.

        The model has to say so of every goal, and twice: now, and without the candidate that was measured last.
        """
        if self._model is None or not evidence.measured:
            return ""
        last = evidence.measured[-1].candidate.id
        measured = tuple(m for m in evidence.measured if m.candidate.id != last)
        before = replace(evidence, measured=measured)
        for known, goal in product((evidence, before), goals):
            if not known.measured:
                return ""
            # At equal cost for all: what it would be worth, not what it is worth by the minute.
            self._tell_model(self._model, goal, Costs(launch_s=0.0))
            if self._model.choose((*tried, *hopeless), known) is None or pays(self._model.last):
                return ""
        none = "no untried candidate" if self.universe is not None else f"none of {POOL} untried candidates drawn"
        return (
            f"more search cannot pay: of {none} does the model expect a gain of {100 * NEARLY:.1f} % or "
            "more over the best so far, and without the latest candidate it said the same"
        )

    def _tell_model(self, model: ModelSampler, goal: Goal | None, costs: Costs | None) -> None:
        if goal is not None:
            model.goal = lambda: goal
        model.costs = (lambda: costs) if costs is not None else Costs

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        seed = seed_of(self.seed, number)
        match self.space.sampler:
            case "gp":
                return optuna.samplers.GPSampler(
                    n_startup_trials=STARTUP_TRIALS, seed=seed, warn_independent_sampling=False
                )
            case "nsga2":
                return optuna.samplers.NSGAIISampler(population_size=GENERATION, seed=seed)
            case "random" | "exhaustive" | "model":
                return optuna.samplers.RandomSampler(seed=seed)
            case _:
                return optuna.samplers.TPESampler(
                    n_startup_trials=STARTUP_TRIALS, multivariate=True, group=True, seed=seed
                )


def _alike(trials: Sequence[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    """The same trials, each with all constraints that any of them has, in one order: Optuna's GP takes no others.

    What a trial says nothing of it meets where it meets all that it has, and breaks where it breaks any.
    """
    names = sorted({name for one in trials for name in one.constraints})
    found = []
    for one in trials:
        if not one.state.is_finished():
            found.append(one)
            continue
        otherwise = 1.0 if any(value > 0 for value in one.constraints.values()) else -1.0
        made = optuna.trial.create_trial(
            state=one.state,
            values=one.values,
            params=one.params,
            distributions=one.distributions,
            user_attrs=one.user_attrs,
            system_attrs={key: value for key, value in one.system_attrs.items() if not key.startswith("constraints")},
            constraints={name: one.constraints.get(name, otherwise) for name in names},
        )
        made.number = one.number
        found.append(made)
    return found


def draw_untried(
    space: Space, universe: Mapping[str, Listed], tried: Collection[str], seed: int, number: int
) -> Proposal | None:
    """An untried candidate of a listed space, drawn by the seed; None when all have been tried."""
    left = [listed for candidate_id, listed in universe.items() if candidate_id not in tried]
    return proposal_of(space, random.Random(seed_of(seed, number)).choice(left)) if left else None


def proposal_of(space: Space, listed: Listed) -> Proposal:
    """A listed candidate as a proposal."""
    answers = _Answers(listed.values)
    space.suggest(answers)
    return Proposal(listed.candidate, listed.values, answers.distributions)
