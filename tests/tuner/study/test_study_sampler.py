from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from tests.tuner.study.test_study_simulated import SPACES
from tuner.errors import UsageError
from tuner.space import parse_space
from tuner.study.model_sampler import ModelSampler
from tuner.study.planner import may_be_fruitless, search_over
from tuner.study.policy import Policy
from tuner.study.progress import Silent
from tuner.study.sampler import Proposer
from tuner.study.session import Limits, current_fingerprint, open_or_create, read_space, run_study

TEXT = """
name: sampled
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram]}
  num_steps: {low: 1, high: 8, when: speculation != 'none'}
  flag: {choices: [a, b, c]}
rules:
  - {forbid: num_steps == 8 and flag == 'c', because: it is told so}
"""


def speedup(settings):  # type: ignore[no-untyped-def]
    steps = settings.get("num_steps", 0)
    return 0.1 * steps - 0.015 * steps**2 + {"a": 0.0, "b": 0.05, "c": -0.1}[settings["flag"]]


@pytest.mark.parametrize("sampler", ["model", "tpe", "nsga2", "random", "exhaustive", "gp"])
def test_every_sampler_proposes_the_same_again_from_the_same_history(sampler: str) -> None:
    space = parse_space(TEXT, source="sampled.yaml", overrides=(f"sampler={sampler}",))
    universe = space.listed()
    proposals = []
    for _ in range(2):
        history: list[optuna.trial.FrozenTrial] = []
        study = optuna.create_study(direction="maximize")
        for _ in range(9 if sampler == "gp" else 12):
            # A proposer of its own each time: nothing that is not in the history counts.
            proposal = Proposer(space, 3, universe).propose(
                [one.user_attrs["candidate"] for one in history], history.copy
            )
            study.add_trial(
                optuna.trial.create_trial(
                    value=speedup(proposal.candidate.settings),
                    params=dict(proposal.params),
                    distributions=dict(proposal.distributions),
                    user_attrs={"candidate": proposal.candidate.id},
                    system_attrs=dict(proposal.system_attrs),
                    constraints={"launch": -1.0},
                )
            )
            history = study.get_trials(deepcopy=False)
            assert space.suggest(optuna.trial.FixedTrial(dict(proposal.params))) == proposal.candidate
        proposals.append([trial.user_attrs["candidate"] for trial in history])
    assert proposals[0] == proposals[1]
    if sampler in ("model", "exhaustive"):
        assert len(set(proposals[0])) == len(proposals[0])


def test_the_model_is_an_optuna_sampler_like_any_other() -> None:
    space = parse_space(TEXT, source="sampled.yaml")
    study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=1))
    study.optimize(lambda trial: speedup(space.suggest(trial).settings), n_trials=10)
    assert study.best_value > max(speedup(each.candidate.settings) for each in (space.listed() or {}).values()) - 0.02


def test_a_space_that_cannot_be_listed_is_drawn_from() -> None:
    text = TEXT.replace("flag: {choices: [a, b, c]}", "fraction: {low: 0.0, high: 1.0}").replace(
        "  - {forbid: num_steps == 8 and flag == 'c', because: it is told so}",
        "  - {forbid: num_steps == 8, because: so}",
    )
    space = parse_space(text, source="sampled.yaml")
    assert space.listed() is None
    study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=1))

    def objective(trial: optuna.Trial) -> float:
        settings = space.suggest(trial).settings
        assert settings.get("num_steps") != 8
        return speedup({**settings, "flag": "a"}) - (float(settings["fraction"]) - 0.7) ** 2

    study.optimize(objective, n_trials=14)
    assert study.best_value > 0.12


def test_exhaustive_needs_a_space_that_can_be_listed() -> None:
    with pytest.raises(UsageError, match="exhaustive"):
        parse_space(
            TEXT.replace("flag: {choices: [a, b, c]}", "fraction: {low: 0.0, high: 1.0}").partition("rules")[0],
            source="sampled.yaml",
            overrides=("sampler=exhaustive",),
        )


def test_an_unknown_sampler_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'tpe'"):
        parse_space(TEXT, source="sampled.yaml", overrides=("sampler=tpee",))


def test_a_study_is_not_continued_with_another_sampler(tmp_path: Path) -> None:
    def open_with(sampler: str):  # type: ignore[no-untyped-def]
        space = read_space(str(SPACES / "pcie_blackwell.yaml"), (f"sampler={sampler}",))
        return open_or_create(
            space,
            name="sampled",
            storage=f"sqlite:///{tmp_path / 'study.db'}",
            limits=Limits(launches=3),
            now=current_fingerprint(space),
        )

    store = open_with("random")
    run_study(store, observer=Silent(), folder=tmp_path)
    assert store.data().sampler["name"] == "random"
    store.close()
    with pytest.raises(UsageError, match="sampler: was"):
        open_with("model")


def test_log_speedups_of_any_size_are_taken() -> None:
    space = parse_space(TEXT, source="sampled.yaml")
    study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=1))
    values = iter((1e6, -1e6, math.log(0.5), 3.0))
    for _ in range(4):
        trial = study.ask()
        space.suggest(trial)
        study.tell(trial, next(values))
    space.suggest(study.ask())


PAYS = ("sampler=model", "budget.launches=60", "budget.candidates=60", "profile=short")


def _study(folder: Path, *overrides: str):  # type: ignore[no-untyped-def]
    space = read_space(str(SPACES / "pcie_blackwell.yaml"), (*PAYS, *overrides))
    store = open_or_create(
        space,
        name="ends",
        storage=f"sqlite:///{folder / 'study.db'}",
        limits=Limits(),
        now=current_fingerprint(space),
    )
    return store, run_study(store, observer=Silent(), folder=folder)


def test_the_search_ends_when_more_cannot_pay_and_says_so_and_the_best_is_confirmed(tmp_path: Path) -> None:
    store, data = _study(tmp_path)
    assert data.state == "done"
    assert "more search cannot pay" in data.reason
    assert len(data.launches) < 60
    assert data.confirmations
    works = [t for t in data.measured if t.constraints.get("launch", 1.0) <= 0]
    assert len(works) >= Policy().fewest
    [said] = [event for event in data.events if event.kind == "fruitless"]
    assert said.message == data.reason
    # Whoever runs it again finds it ended; whoever gives it more wants more of it.
    assert search_over(data, Policy(), exhausted=False) == data.reason
    store.set_budget(replace(data.budget, launches=90), "90 launches")
    more = store.data()
    store.close()
    assert search_over(more, Policy(), exhausted=False) is None
    assert not may_be_fruitless(replace(more, confirmations=()), Policy())


def test_without_a_model_nobody_says_that_more_search_cannot_pay(tmp_path: Path) -> None:
    store, data = _study(tmp_path, "sampler=random", "budget.launches=40")
    store.close()
    assert not any(event.kind == "fruitless" for event in data.events)
