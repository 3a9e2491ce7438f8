"""Which settings mattered: of each value the mean of what was seen with it, and Optuna's PED-ANOVA over the trials."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import optuna

from tuner.records import Setting
from tuner.report.evidence import Estimate, estimate
from tuner.study.data import StoredTrial, StudyData

LEAST_TRIALS = 10
"""PED-ANOVA looks at the best tenth or so; below this that is one trial, and says nothing."""

BEST_SHARE = 0.3
"""The share of trials that count as good: a study has some dozens, and five good ones are the least that is advised."""


@dataclass(frozen=True)
class Importance:
    """How much of what sets good candidates apart lies in one setting; the shares of all settings sum to 1."""

    name: str
    share: float


@dataclass(frozen=True)
class Effect:
    """What candidates with this value of a setting came to, as a ratio to the baseline: geometric mean over them."""

    name: str
    value: Setting
    change: Estimate


def importances(data: StudyData) -> tuple[Importance, ...]:
    """PED-ANOVA over the measured candidates, most important first; empty under `LEAST_TRIALS` of them.

    A setting that is only active beside others is weighed where it is active. Watanabe et al., PED-ANOVA (IJCAI 2023).
    """
    told = _told(data)
    if len(told) < LEAST_TRIALS:
        return ()
    study = optuna.create_study(direction="maximize")
    study.add_trials([_frozen(data, trial) for trial in told])
    names = [p.name for p in data.space.parameters if len({repr(t.params.get(p.name)) for t in told}) > 1]
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator, params=names)
    except (ValueError, RuntimeError):  # too few with and without a conditional setting for it to be weighed
        return ()
    found = [Importance(name, share) for name, share in shares.items() if math.isfinite(share)]
    return tuple(sorted(found, key=lambda each: (-each.share, each.name)))


def effects(data: StudyData) -> tuple[Effect, ...]:
    """Every value of every setting that was measured with more than one, in the order of the space."""
    by_value: dict[tuple[str, Setting], list[float]] = defaultdict(list)
    for trial in _told(data):
        for name, value in data.settings_of(trial.candidate_id).items():
            by_value[name, value].append(trial.value or 0.0)
    names = [parameter.name for parameter in data.space.parameters]
    found = []
    for name in names:
        values = [value for known, value in by_value if known == name]
        if len(values) > 1:
            for value in sorted(values, key=lambda v: (isinstance(v, str), v if not isinstance(v, str) else 0, str(v))):
                log = estimate(by_value[name, value])
                found.append(Effect(name, value, _exp(log)))
    return tuple(found)


def _exp(log: Estimate) -> Estimate:
    low, high = (math.exp(end) if end is not None else None for end in (log.low, log.high))
    return Estimate(math.exp(log.value), low, high, log.n)


def _told(data: StudyData) -> list[StoredTrial]:
    """Trials whose candidate was measured at every level, once per candidate."""
    known = {pair.candidate_id for pair in data.pairs if pair.role != "confirm"}
    found: dict[str, StoredTrial] = {}
    for trial in data.measured:
        launched = trial.constraints.get("launch", 1.0) <= 0
        if not trial.running and trial.value is not None and launched and trial.candidate_id in known:
            found.setdefault(trial.candidate_id, trial)
    return list(found.values())


def _frozen(data: StudyData, trial: StoredTrial) -> optuna.trial.FrozenTrial:
    distributions = _distributions(data)
    params = {name: value for name, value in trial.params.items() if name in distributions}
    return optuna.trial.create_trial(
        value=trial.value, params=params, distributions={name: distributions[name] for name in params}
    )


def _distributions(data: StudyData) -> Mapping[str, optuna.distributions.BaseDistribution]:
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for parameter in data.space.parameters:
        if parameter.choices is not None:
            found[parameter.name] = optuna.distributions.CategoricalDistribution(parameter.choices)
            continue
        low, high = parameter.ends
        if parameter.whole and isinstance(parameter.step, int):
            found[parameter.name] = optuna.distributions.IntDistribution(int(low), int(high), step=parameter.step)
        else:
            found[parameter.name] = optuna.distributions.FloatDistribution(low, high, step=parameter.step)
    return found
