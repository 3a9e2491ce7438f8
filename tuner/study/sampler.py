"""What to try next: Optuna's TPE on the trials told so far, as a pure function of them and of the trial's number.

The proposal is made in an in-memory copy of the study and only then stored, in one transaction with all its
parameters. So there is no half-made proposal for a kill to leave behind, no other process's zombie to repel the
search, and a resumed study proposes exactly what it would have proposed.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from tuner.records import Candidate
from tuner.space import Listed, Space

# Grouped TPE and constraints are what the search is built on; that Optuna still calls them experimental is known.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.WARNING)

STARTUP_TRIALS = 8
PATIENCE = 4
"""Proposals in a row that were known or ruled out, after which an untried candidate is drawn instead, if they can be
listed: a sampler that has found its peak keeps proposing it."""


@dataclass(frozen=True)
class Proposal:
    """What the sampler picked: its parameters as Optuna keeps them, and the candidate that they make."""

    candidate: Candidate
    params: Mapping[str, Any]
    distributions: Mapping[str, optuna.distributions.BaseDistribution]


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


def propose(
    space: Space,
    history: Sequence[optuna.trial.FrozenTrial],
    seed: int,
    fixed: Mapping[str, Any] | None = None,
) -> Proposal:
    """The proposal for trial `len(history)`, given all trials before it.

    Parameters in `fixed` have that value wherever they are active: the search stays with a launch that is up.
    """
    number = len(history)
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP_TRIALS, multivariate=True, group=True, seed=seed_of(seed, number)
    )
    if fixed:
        sampler = optuna.samplers.PartialFixedSampler(dict(fixed), sampler)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(history)
    trial = study.ask()
    candidate = space.suggest(trial)
    return Proposal(candidate, trial.params, trial.distributions)


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
