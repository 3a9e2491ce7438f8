"""A path that may not work here is tried by itself first, and left alone where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tuner.study.toy_study import ToyMachine, controller, space, study
from tuner.errors import StudyStopped
from tuner.records import Failure
from tuner.study.canary import in_proof, next_canary, proofs, to_prove
from tuner.study.data import StoredTrial, StudyData
from tuner.study.policy import Policy

SPACE = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1], max_tokens: 64}
baseline: {speculation: none, allreduce: nccl}
parameters:
  speculation: {choices: [none, eagle3]}
  num_steps: {low: 1, high: 5, when: speculation != 'none'}
  allreduce: {choices: [nccl, custom, nvls, mscclpp]}
budget: {launches: 20, candidates: 20}
profile: short
"""


def value(settings: Any, level: int) -> float:
    return (
        80.0
        + 3 * settings.get("num_steps", 0)
        + {"nccl": 0, "custom": 4, "nvls": 9, "mscclpp": 2}[settings["allreduce"]]
    )


def searched(tmp_path: Any, broken: set[str], sampler: str = "model", kind: str = "startup_crash") -> StudyData:
    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        dead = phase == "start" and settings["allreduce"] in broken
        return Failure(kind, "start", "no such path here") if dead else None

    machine = ToyMachine(speed=value, fails=fails)
    store = study(tmp_path, space(SPACE, f"sampler={sampler}"))
    return controller(store, machine, policy=Policy(pairs=0, no_gain=99, fewest=99)).run()


def paths(data: StudyData, kind: str) -> list[Any]:
    return [data.candidates[t.candidate_id].settings["allreduce"] for t in data.trials if t.kind == kind]


@pytest.mark.parametrize("sampler", ["model", "tpe", "random", "exhaustive"])
def test_each_path_is_first_tried_with_all_else_as_in_the_baseline(tmp_path: Any, sampler: str) -> None:
    data = searched(tmp_path, set(), sampler)
    first = [data.candidates[trial.candidate_id].settings for trial in data.trials[1:4]]
    assert first == [{"speculation": "none", "allreduce": path} for path in ("custom", "nvls", "mscclpp")]
    assert len({settings["allreduce"] for settings in map(data.settings_of, data.candidates)}) == 4


@pytest.mark.parametrize("sampler", ["model", "tpe", "random", "exhaustive"])
@pytest.mark.parametrize("kind", ["startup_crash", "capped_effective"])
def test_a_path_that_failed_by_itself_is_paid_for_once(tmp_path: Any, sampler: str, kind: str) -> None:
    data = searched(tmp_path, {"nvls", "custom"}, sampler, kind)
    tried = paths(data, "measured")
    assert tried.count("nvls") == tried.count("custom") == 1
    assert tried.count("mscclpp") > 2, "the others are searched"
    refused = [trial.why for trial in data.trials if trial.kind == "known_crash"]
    assert all("was tried by itself in trial" in why and kind in why for why in refused)
    assert refused or sampler in ("model", "exhaustive")


@pytest.mark.parametrize("sampler", ["model", "random"])
def test_paths_that_all_fail_alike_stop_no_study(tmp_path: Any, sampler: str) -> None:
    """The baseline works, so the machine does; more of them than would stop a study by failing in a row."""
    data = searched(tmp_path, {"nvls", "custom", "mscclpp"}, sampler)
    tried = paths(data, "measured")
    assert [tried.count(path) for path in ("nvls", "custom", "mscclpp")] == [1, 1, 1]
    assert tried.count("nccl") > 3
    assert data.state == "done"


def test_candidates_that_fail_alike_stop_a_study_that_has_canaries_too(tmp_path: Any) -> None:
    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        dead = phase == "start" and settings["speculation"] == "eagle3"
        return Failure("startup_crash", "start", "no such head") if dead else None

    store = study(tmp_path, space(SPACE))
    policy = Policy(pairs=0, no_gain=99, fewest=99, same_failures_later=3)
    with pytest.raises(StudyStopped, match="failed alike"):
        controller(store, ToyMachine(speed=value, fails=fails), policy=policy).run()


@pytest.mark.parametrize("kind", ["startup_crash", "spec_inactive"])
@pytest.mark.parametrize("broken", [{"speculation": "ngram"}, {"num_steps": 1}])
def test_what_a_drafter_fails_by_is_held_against_no_path(tmp_path: Any, kind: str, broken: dict[str, Any]) -> None:
    """No candidate is without a drafter, so that a canary has one that nobody has seen work."""

    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        dead = phase == "start" and broken.items() <= settings.items()
        return Failure(kind, "start", "of the drafter") if dead else None

    machine = ToyMachine(speed=value, fails=fails)
    store = study(tmp_path, space(SPACE, "parameters.speculation.choices=[ngram, eagle3]"))
    data = controller(store, machine, policy=Policy(pairs=0, no_gain=99, fewest=99)).run()
    assert proofs(data).refuted == {}
    worked = {data.settings_of(t.candidate_id)["allreduce"] for t in data.measured if t.feasible}
    assert {"custom", "nvls", "mscclpp"} <= worked


def test_a_failure_that_was_forgiven_refutes_no_value_and_proves_none(tmp_path: Any) -> None:
    """The study stopped by it, and the user has seen to the cause."""
    away = [True]

    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        dead = phase == "start" and settings["allreduce"] == "custom" and away[0]
        return Failure("startup_crash", "start", "not set up yet") if dead else None

    machine = ToyMachine(speed=value, fails=fails)
    store = study(tmp_path, space(SPACE, "parameters.speculation.choices=[eagle3]"))
    policy = Policy(pairs=0, no_gain=99, fewest=99, same_failures=2)
    with pytest.raises(StudyStopped, match="failed alike"):
        controller(store, machine, policy=policy).run()
    away[0] = False
    data = controller(store, machine, policy=policy).run()
    assert proofs(data).refuted == {}
    assert ("allreduce", "custom") in proofs(data).works


def test_a_fault_of_the_machine_refutes_no_path(tmp_path: Any) -> None:
    seen: list[str] = []

    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        if phase == "start" and settings["allreduce"] == "nvls" and seen.count("nvls") < 2:
            seen.append("nvls")
            return Failure("transient_env", "start", "the disk was away", blame="environment", retryable=True)
        return None

    machine = ToyMachine(speed=value, fails=fails)
    data = controller(study(tmp_path, space(SPACE)), machine, policy=Policy(pairs=0, no_gain=99, fewest=99)).run()
    assert paths(data, "measured").count("nvls") > 2


NCCL = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1], max_tokens: 64}
baseline: {speculation: none, allreduce: nccl}
parameters:
  speculation: {choices: [none, eagle3]}
  num_steps: {low: 1, high: 3, when: speculation != 'none'}
  allreduce: {choices: [nccl, custom]}
  env.NCCL_PROTO: {choices: [unset, LL, Simple], when: allreduce == 'nccl'}
  env.NCCL_MAX_CTAS: {choices: [unset, 1, 2, 4, 8, 16], when: allreduce == 'nccl'}
budget: {launches: 30, candidates: 30}
profile: short
"""


def nccl_study(tmp_path: Any, broken: dict[str, Any], text: str = NCCL, sampler: str = "model") -> StudyData:
    """A study on a machine where a server with one of the broken values does not start."""

    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        dead = phase == "start" and any(settings.get(name) in values for name, values in broken.items())
        return Failure("nccl_error", "start", "unhandled system error") if dead else None

    machine = ToyMachine(speed=lambda settings, _level: 80.0 + 3 * settings.get("num_steps", 0), fails=fails)
    store = study(tmp_path, space(text, f"sampler={sampler}"))
    return controller(store, machine, policy=Policy(pairs=0, no_gain=99, fewest=99)).run()


def tried(data: StudyData) -> list[dict[str, Any]]:
    return [dict(data.candidates[t.candidate_id].settings) for t in data.trials[1:] if t.kind == "measured"]


def test_the_words_and_the_ends_of_the_numbers_of_a_setting_of_nccl_are_proven_after_the_paths(tmp_path: Any) -> None:
    first = tried(nccl_study(tmp_path, {}))[:5]
    apart = [{n: v for n, v in one.items() if v not in ("unset", "nccl", "none")} for one in first]
    assert apart == [
        {"allreduce": "custom"},
        {"env.NCCL_PROTO": "LL"},
        {"env.NCCL_PROTO": "Simple"},
        {"env.NCCL_MAX_CTAS": 1},
        {"env.NCCL_MAX_CTAS": 16},
    ], "one at a time, all else as in the baseline, the middle of a range not at all"


@pytest.mark.parametrize("sampler", ["model", "random"])
def test_a_setting_of_nccl_that_failed_by_itself_is_paid_for_once(tmp_path: Any, sampler: str) -> None:
    broken = {"env.NCCL_PROTO": ["Simple"], "env.NCCL_MAX_CTAS": [16]}
    data = nccl_study(tmp_path, broken, sampler=sampler)
    settings = tried(data)
    assert [one.get("env.NCCL_PROTO") for one in settings].count("Simple") == 1
    assert [one.get("env.NCCL_MAX_CTAS") for one in settings].count(16) == 1
    assert {one.get("env.NCCL_PROTO") for one in settings[5:]} <= {None, "unset", "LL"}
    assert len(settings) > 15, "all else is searched"


def test_what_is_unset_in_the_baseline_needs_no_proof_and_what_is_set_there_does_not_either() -> None:
    with_it = NCCL.replace("allreduce: nccl}", "allreduce: nccl, env.NCCL_PROTO: LL}")
    assert ("env.NCCL_PROTO", "unset") not in to_prove(space(NCCL))
    assert [v for n, v in to_prove(space(with_it)) if n == "env.NCCL_PROTO"] == ["unset", "Simple"]
    assert [v for n, v in to_prove(space(NCCL, "parameters.env.NCCL_MAX_CTAS.choices=[unset, 1, 2, 4]"))][-3:] == [
        1, 2, 4,
    ]  # fmt: skip


def test_of_two_unproven_values_that_failed_together_each_gets_another_canary(tmp_path: Any) -> None:
    """No candidate has nccl without a protocol, so that the first failure says nothing of either."""
    text = NCCL.replace("allreduce: nccl}", "allreduce: custom}").replace("[unset, LL, Simple]", "[LL, Simple]")
    data = nccl_study(tmp_path / "one", {"env.NCCL_PROTO": ["LL"]}, text)
    protocols = [one.get("env.NCCL_PROTO") for one in tried(data)]
    assert protocols[:2] == ["LL", "Simple"]
    assert protocols.count("LL") == 1
    assert protocols.count("Simple") > 3
    data = nccl_study(tmp_path / "all", {"allreduce": ["nccl"]}, text)
    assert [one["allreduce"] for one in tried(data)].count("nccl") == 2, "a path that fails twice is left alone"


def stored(number: int, candidate: Any, kind: Any, launch: float = 1.0, *, running: bool = False) -> StoredTrial:
    return StoredTrial(number, candidate.id, kind, running, {}, None, {"launch": launch})


def test_a_canary_that_never_was_launched_makes_room_for_the_next_nearest(tmp_path: Any) -> None:
    data = study(tmp_path, space(SPACE)).data()
    universe = data.space.listed() or {}
    first = next_canary(data, universe, proofs(data))
    assert first is not None
    assert first.candidate.settings == {"allreduce": "custom", "speculation": "none"}
    known = {**data.candidates, first.candidate.id: first.candidate}
    for kind in ("illegal", "out_of_launches"):
        after = replace(data, candidates=known, trials=[stored(0, first.candidate, kind)])
        second = next_canary(after, universe, proofs(after))
        assert second is not None
        assert second.candidate.settings["allreduce"] == "custom"
        assert second.candidate.id != first.candidate.id
    elsewhere = replace(data, candidates=known, trials=[stored(0, first.candidate, "measured", running=True)])
    other = next_canary(elsewhere, universe, proofs(elsewhere))
    assert other is not None
    assert other.candidate.settings["allreduce"] == "nvls", "one worker proves one path, and the next another"
    assert in_proof(data.space, first.candidate, proofs(elsewhere).running)


@pytest.mark.parametrize("sampler", ["model", "tpe"])
def test_a_space_that_cannot_be_listed_has_canaries_near_the_baseline(tmp_path: Any, sampler: str) -> None:
    text = NCCL.replace("budget:", "  memory_fraction: {low: 0.7, high: 0.9}\nbudget:")
    text = text.replace("allreduce: nccl}", "allreduce: nccl, memory_fraction: 0.8}")
    assert space(text).listed() is None
    data = nccl_study(tmp_path, {"env.NCCL_PROTO": ["Simple"], "allreduce": ["custom"]}, text, sampler)
    settings = tried(data)
    apart = [{n: v for n, v in one.items() if v not in ("unset", "nccl", "none")} for one in settings[:5]]
    assert apart == [
        {"allreduce": "custom", "memory_fraction": 0.8},
        {"env.NCCL_PROTO": "LL", "memory_fraction": 0.8},
        {"env.NCCL_PROTO": "Simple", "memory_fraction": 0.8},
        {"env.NCCL_MAX_CTAS": 1, "memory_fraction": 0.8},
        {"env.NCCL_MAX_CTAS": 16, "memory_fraction": 0.8},
    ]
    assert all(one["allreduce"] == "nccl" and one["env.NCCL_PROTO"] != "Simple" for one in settings[5:])
    assert len(settings) > 8
