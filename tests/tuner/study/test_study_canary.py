"""A path that may not work here is tried by itself first, and left alone where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuner.study.toy_study import ToyMachine, controller, space, study
from tuner.records import Failure
from tuner.study.data import StudyData
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
