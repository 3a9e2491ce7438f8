"""The published case, on the machine that is fitted to it: a chain with overlap wins, and single streams stay plain."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from tests.tuner.study.test_study_simulated import SPACES
from tuner.engines.simulated.profiles import reference
from tuner.engines.speculation import depths
from tuner.search.crossing import crossings, ratio
from tuner.search.shape import shape_at
from tuner.space import Space
from tuner.study.data import StudyData
from tuner.study.decide import recommendation
from tuner.study.progress import Silent
from tuner.study.schedule import curves_of
from tuner.study.session import Limits, current_fingerprint, open_or_create, read_space, run_study

# Depth 3 was published, and NCCL's settings had been tried and dropped.
AS_PUBLISHED = (
    "engine.kind=simulated",
    "parameters.num_steps.low=3",
    "parameters.num_steps.high=3",
    "parameters.disable_batch_threshold.choices=[never]",
    *(f"parameters.env.{name}.choices=[unset]" for name in ("NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_MAX_CTAS")),
)


def study(folder: Path, *overrides: str) -> tuple[Space, StudyData, float]:
    began = time.process_time()
    space = read_space(str(SPACES / "pcie_blackwell_sglang.yaml"), (*AS_PUBLISHED, *overrides))
    store = open_or_create(
        space,
        name="pcie",
        storage=f"sqlite:///{folder / 'study.db'}",
        limits=Limits(launches=36),
        now=current_fingerprint(space),
    )
    try:
        return space, run_study(store, observer=Silent(), folder=folder), time.process_time() - began
    finally:
        store.close()


def test_the_published_decision_and_a_schedule_that_leaves_single_streams_to_plain_decoding(tmp_path: Path) -> None:
    _, data, took = study(tmp_path)
    assert data.simulated
    assert took < 60
    found = recommendation(data).overall
    assert found.winner is not None
    settings = found.winner.settings
    assert (settings["topk"], settings["spec_version"], settings["allreduce"]) == (1, "v2", "nccl")
    assert shape_at(settings, 1).depth == 0
    assert shape_at(settings, 30).depth == 3
    assert depths(settings) is not None
    # Where it begins lies between the levels at which plain decoding and speculation were each measured to win.
    gains = [ratio(curves.get(3, {}), curves[0]) for curves in curves_of(data).values()]
    begins = [one for gain in gains for one in crossings(gain) if one.rising]
    assert begins
    assert any(1 < one.at < 30 for one in begins)
    published = reference()["delta_to_baseline"]["topk1_spec_v2"]
    chain = next(
        c.id
        for c in data.candidates.values()
        if c.settings.get("spec_version") == "v2"
        and c.settings.get("disable_batch_threshold") == "never"
        and c.settings["allreduce"] == "nccl"
    )
    ratios = {pair.concurrency: pair.log_ratio for pair in data.pairs if pair.candidate_id == chain}
    for level in (1, 30):
        assert math.exp(ratios[level]) - 1 == pytest.approx(published[str(level)], abs=0.05)


def test_the_guard_decides_between_the_chain_and_no_winner(tmp_path: Path) -> None:
    """At one stream the chain is 6 % slower: too much for the usual guard, and not for a lower one."""
    no_schedule = "rules=[{forbid: num_steps == 3 and topk == 4, because: dropped on that machine}]"
    strict = recommendation(study(tmp_path / "strict", no_schedule, "objective.guard.min_speedup=0.97")[1])
    loose = recommendation(study(tmp_path / "loose", no_schedule, "objective.guard.min_speedup=0.5")[1])
    assert loose.overall.winner is not None
    assert loose.overall.winner.settings["spec_version"] == "v2"
    if strict.overall.winner is not None:  # the schedule keeps the guard, for it does not speculate at one stream
        assert shape_at(strict.overall.winner.settings, 1).depth == 0
