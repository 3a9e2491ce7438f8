from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.tuner.study.test_study_simulated import SPACES
from tests.tuner.study.toy_study import ToyMachine, controller, study
from tuner.engines.simulated.blocks import block
from tuner.errors import UsageError
from tuner.records import Candidate
from tuner.search import guide
from tuner.search.evidence import Accepted, Evidence, Measurement
from tuner.search.guide import Costs, Goal, Limit
from tuner.search.surrogate import Surrogate
from tuner.space import parse_space
from tuner.study import model_sampler
from tuner.study.evidence import Reader, accepted_of, evidence_of
from tuner.study.hot import cold_values
from tuner.study.model_sampler import ModelSampler, evidence_of_trials
from tuner.study.planner import may_be_fruitless, search_over
from tuner.study.policy import Policy
from tuner.study.progress import Silent
from tuner.study.sampler import Proposer, _alike, proposal_of
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


def test_a_plain_study_teaches_the_model_what_failed_and_is_not_minimised() -> None:
    space = parse_space(TEXT, source="sampled.yaml")
    study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=1))
    for _ in range(12):
        trial = study.ask()
        settings = space.suggest(trial).settings
        if settings["flag"] == "c":
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, speedup(settings))
    failed = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.FAIL]
    evidence = evidence_of_trials(space, study.trials)
    assert len(evidence.failed) == len(failed) <= 4
    wrong = optuna.create_study(direction="minimize", sampler=ModelSampler(space, seed=1))
    with pytest.raises(ValueError, match="direction='maximize'"):
        space.suggest(wrong.ask())


def test_a_block_that_was_read_is_read_again_only_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = study(tmp_path)
    controller(store, ToyMachine()).run()
    data, reader = store.data(), Reader()
    first = evidence_of(data, reader)
    again = evidence_of(data, reader)
    assert all(a is b for a, b in zip(first.measured, again.measured, strict=True))
    one = min(data.blocks)
    faster = replace(data.blocks[one], block=replace(data.blocks[one].block, tokens_per_s=1e6))
    changed = evidence_of(replace(data, blocks={**data.blocks, one: faster}), reader)
    assert changed == evidence_of(replace(data, blocks={**data.blocks, one: faster}))
    assert changed != first
    # A place that turns out to be fast makes what was read of it so much slower.
    monkeypatch.setattr("tuner.study.evidence.place_speeds", lambda _data: {data.launches[0].place: math.log(2)})
    slower = evidence_of(data, reader)
    assert [m.tokens_per_s for m in slower.measured] == pytest.approx([m.tokens_per_s / 2 for m in first.measured])


def test_what_a_block_tells_of_its_drafts() -> None:
    told = {
        "server_verify_steps": 200.0,
        "chunks": 400.0,
        **{f"accepted_at_depth_{d}": count for d, count in enumerate((120.0, 60.0, 0.0), 1)},
        **{f"kind/code/{name}": value for name, value in (("requests", 3.0), ("ms_per_token", 9.0))},
        **{f"kind/chat/{name}": value for name, value in (("requests", 1.0), ("ms_per_token", 9.0))},
        "kind/code/tokens_per_chunk": 2.4,
        "kind/chat/tokens_per_chunk": 1.2,
        "kind/code/tokens": 90.0,
        "kind/chat/tokens": 30.0,
    }
    one = replace(block(1, "screen", 100.0, accept_length=1.9), tokens=720.0)
    steps, reached, kinds = accepted_of(replace(one, counters=told))
    assert (steps, reached) == (200.0, (0.6, 0.3, 0.0))
    code, chat = kinds
    assert code == ("code", 3.0, 90.0, pytest.approx(2.4 * 1.9 / 1.8))
    assert chat == ("chat", 1.0, 30.0, pytest.approx(1.2 * 1.9 / 1.8))
    for token_by_token in (1900.0, 10.0):
        assert accepted_of(replace(one, counters={**told, "chunks": token_by_token})) == (200.0, reached, ())
    assert accepted_of(replace(one, counters={})) == Accepted()
    assert accepted_of(replace(one, counters=told, accept_length=None)) == Accepted()


def test_a_front_has_nothing_left_to_find_only_when_no_level_has() -> None:
    space = parse_space(TEXT, source="sampled.yaml")
    listed = {i: each.candidate for i, each in (space.listed() or {}).items()}
    draw = random.Random(1)

    def rate(settings: Mapping[str, Any], level: int) -> float:
        """More steps are worse at one stream and better at eight."""
        steps = settings.get("num_steps", 0)
        return 100.0 * level * math.exp((-0.1 if level == 1 else 0.08) * steps + draw.gauss(0, 0.002))

    tried = [i for i, one in listed.items() if one.settings.get("num_steps", 0) <= 6]
    measured = [Measurement(listed[i], level, rate(listed[i].settings, level)) for i in tried for level in (1, 8)]
    measured += [Measurement(space.baseline, level, 100.0 * level) for level in (1, 8)]
    proposer, evidence = Proposer(space, 1, space.listed()), Evidence(tuple(measured))
    alone, together = [Goal((1.0, 0.0))], [Goal((1.0, 0.0)), Goal((0.0, 1.0))]
    assert proposer.fruitless([space.baseline.id, *tried], evidence, alone)
    assert not proposer.fruitless([space.baseline.id, *tried], evidence, together)


def test_what_no_list_has_is_to_be_beaten_as_well() -> None:
    """A schedule, or plain decoding, may be the best so far: then what beats the others alone is no gain."""
    space = parse_space(TEXT, source="sampled.yaml")
    listed = {i: each.candidate for i, each in (space.listed() or {}).items()}
    tried = [i for i, one in listed.items() if one.settings.get("num_steps", 0) <= 3]

    def told(candidate: Candidate, gain: float) -> list[Measurement]:
        return [Measurement(candidate, level, 100.0 * level * math.exp(gain)) for level in (1, 8)]

    measured = [m for i in tried for m in told(listed[i], 0.06 * listed[i].settings.get("num_steps", 0))]  # type: ignore[operator]
    unlisted = Candidate({"speculation": "ngram", "num_steps": 3, "flag": "of no list"})
    proposer, goals = Proposer(space, 1, space.listed()), [Goal((0.5, 0.5))]
    before = [space.baseline.id, *tried]
    assert not proposer.fruitless(before, Evidence(tuple(measured)), goals)
    # The latest candidate is left out once more when the model is asked: it may not be this one.
    more = (*told(unlisted, 0.9), *measured)
    assert proposer.fruitless([*before, unlisted.id], Evidence(more), goals)


def test_several_goals_cost_no_more_models_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    space = parse_space(TEXT, source="sampled.yaml")
    listed = [each.candidate for each in (space.listed() or {}).values()]
    made = []

    class Counted(Surrogate):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(guide, "Surrogate", Counted)
    draw = random.Random(1)
    measured = [
        Measurement(one, level, 100.0 * level * math.exp(draw.gauss(0, 0.002)), tpot_p90_ms=20.0)
        for one in (space.baseline, *listed)
        for level in (1, 8)
    ]
    limits = (Limit("tpot_p90_ms", 50.0, 1), Limit("tpot_p90_ms", 40.0, 8))
    goals = [Goal(weights, limits=limits) for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))]
    tried = [one.id for one in listed[:-2]]
    assert Proposer(space, 1, space.listed()).fruitless(tried, Evidence(tuple(measured)), goals)
    assert len(made) == 4  # of throughput and of the latency, with the latest candidate and without


def test_a_space_that_cannot_be_listed_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT.replace("flag: {choices: [a, b, c]}", "fraction: {low: 0.0, high: 1.0}").replace(
        "  - {forbid: num_steps == 8 and flag == 'c', because: it is told so}",
        "  - {forbid: num_steps == 8, because: so}",
    )
    space = parse_space(text, source="sampled.yaml")
    assert space.listed() is None

    def objective(trial: optuna.Trial) -> float:
        settings = space.suggest(trial).settings
        assert settings.get("num_steps") != 8
        return speedup({**settings, "flag": "a"}) - (float(settings["fraction"]) - 0.7) ** 2

    found = []
    monkeypatch.setattr(model_sampler, "POOL", 500)
    for seed in range(5):
        study = optuna.create_study(direction="maximize", sampler=ModelSampler(space, seed=seed))
        study.optimize(objective, n_trials=14)
        found.append(study.best_value)
    assert sorted(found)[2] > 0.16  # most come to the best, which is 0.165


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


NARROW = """
name: narrow
engine: {kind: simulated, model: any}
workload: {concurrency: [1]}
baseline: {speculation: none, backend: triton, fraction: 0.95}
parameters:
  speculation: {choices: [none, ngram]}
  backend: {choices: [flashinfer, fa3]}
  disable_batch_threshold: {choices: [never, 8], when: speculation != 'none'}
  fraction: {low: 0.7, high: 0.9}
"""
"""The baseline has values that the parameters do not offer, and so may a schedule."""


@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_only_values_that_the_parameters_offer_are_taken_from_what_was_measured(
    seed: int, stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.study.model_sampler.POOL", 20)
    space = parse_space(NARROW, source="narrow.yaml")
    schedule = Candidate({"backend": "fa3", "disable_batch_threshold": 11, "fraction": 0.8, "speculation": "ngram"})
    evidence = Evidence((Measurement(space.baseline, 1, 1.0), Measurement(schedule, 1, 2.0)))
    costs = Costs(hot=frozenset({"speculation"}), running=space.baseline.settings, stay=stay)
    proposal = Proposer(space, seed, None).propose([space.baseline.id, schedule.id], list, evidence, costs=costs)
    optuna.trial.create_trial(value=0.0, params=dict(proposal.params), distributions=dict(proposal.distributions))
    assert space.offered(proposal.params) == proposal.params


def test_no_proposal_is_held_to_a_launch_whose_values_the_space_does_not_offer() -> None:
    space = parse_space(NARROW, source="narrow.yaml", overrides=("baseline.backend=fa3",))
    assert cold_values(space, {"speculation"}, space.baseline) is None
    within = Candidate({**space.baseline.settings, "fraction": 0.75})
    assert cold_values(space, {"speculation"}, within) == {"backend": "fa3", "fraction": 0.75}


@pytest.mark.parametrize("sampler", ["model", "tpe", "nsga2", "random", "exhaustive"])
def test_every_sampler_proposes_the_decimals_of_a_range_also_behind_a_trial_of_an_earlier_version(sampler: str) -> None:
    text = TEXT.replace("flag: {choices: [a, b, c]}", "mem: {low: 0.55, high: 0.85, step: 0.1}").partition("rules")[0]
    space = parse_space(text, source="sampled.yaml", overrides=(f"sampler={sampler}", "parameters.num_steps.high=2"))
    study = optuna.create_study(direction="maximize")
    drifted = Candidate({"mem": 0.6500000000000001, "speculation": "none"})
    study.add_trial(
        optuna.trial.create_trial(
            value=0.1,
            params=dict(drifted.settings),
            distributions={
                "mem": optuna.distributions.FloatDistribution(0.55, 0.85, step=0.1),
                "speculation": optuna.distributions.CategoricalDistribution(["none", "ngram"]),
            },
            user_attrs={"candidate": drifted.id},
            constraints={"launch": -1.0},
        )
    )
    tried = [drifted.id]
    for _ in range(11):
        proposal = Proposer(space, 3, space.listed()).propose(tried, lambda: study.get_trials(deepcopy=False))
        assert proposal.candidate.settings["mem"] == proposal.params["mem"]
        assert proposal.params["mem"] in (0.55, 0.65, 0.75, 0.85)
        study.add_trial(
            optuna.trial.create_trial(
                value=float(proposal.params["mem"]),
                params=dict(proposal.params),
                distributions=dict(proposal.distributions),
                user_attrs={"candidate": proposal.candidate.id},
                system_attrs=dict(proposal.system_attrs),
                constraints={"launch": -1.0},
            )
        )
        tried.append(proposal.candidate.id)


def proposed(sampler: str, count: int) -> list[dict[str, object]]:
    """What a sampler proposes after a baseline, which has no parameters."""
    space = parse_space(f"sampler: {sampler}\n{TEXT}", source="sampled.yaml")
    done = [optuna.trial.create_trial(value=0.0)]
    for number in range(1, count):
        made = Proposer(space, 3, None).propose([f"c{i}" for i in range(number)], done.copy)
        told = {"params": dict(made.params), "distributions": dict(made.distributions)}
        attrs = dict(made.system_attrs)
        done.append(optuna.trial.create_trial(value=speedup(made.candidate.settings), system_attrs=attrs, **told))
    return [trial.params for trial in done]


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2"])
def test_samplers_of_optuna_learn_although_the_baseline_has_no_parameters(sampler: str) -> None:
    """It is in every study's history, and samplers that go by what all trials have in common would draw at random."""
    assert proposed(sampler, 26) != proposed("random", 26)


def test_gp_goes_on_behind_trials_that_have_other_constraints() -> None:
    """A crash has no speed-up at any level, a copy of the baseline no guard, and what a rule forbids neither."""
    space = parse_space(f"sampler: gp\n{TEXT}", source="sampled.yaml")
    listed = list((space.listed() or {}).values())
    told = [
        {"launch": -1.0},
        {"launch": -1.0, "min_speedup": -0.1},
        {"launch": 1.0},
        {"legal": 1.0, "launch": 1.0},
        {"min_speedup": 0.02, "launch": -1.0},
    ]
    done = [optuna.trial.create_trial(value=0.0)]
    for number in range(1, 13):
        one = listed[number % len(listed)]
        made = proposal_of(space, one)
        done.append(
            optuna.trial.create_trial(
                value=speedup(one.candidate.settings),
                params=dict(made.params),
                distributions=dict(made.distributions),
                constraints=told[number % len(told)],
            )
        )
    proposal = Proposer(space, 3, None).propose([f"c{i}" for i in range(len(done))], done.copy)
    assert proposal.candidate.settings
    alike = _alike([one for one in done if one.params])
    assert {tuple(one.constraints) for one in alike} == {("launch", "legal", "min_speedup")}
    for before, after in zip(done[1:], alike, strict=True):
        assert before.constraints.items() <= after.constraints.items()
        feasible = all(value <= 0 for value in before.constraints.values())
        assert feasible == all(value <= 0 for value in after.constraints.values())
