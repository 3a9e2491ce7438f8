"""Where a schedule changes its depth is measured before it is tried, between the levels of the workload."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.hot_toy import HotEngine, HotMachine
from tests.tuner.study.toy_study import controller, space, study
from tuner.records import Failure
from tuner.report.view import study_view
from tuner.search.crossing import Crossing, crossings, ratio
from tuner.search.evidence import BLOCK_SD
from tuner.search.shape import shape_at
from tuner.study.data import Slot, StudyData
from tuner.study.decide import recommendation
from tuner.study.edges import ROUNDS, _said
from tuner.study.planner import launches_used
from tuner.study.policy import Policy
from tuner.study.schedule import block_sd, curves_of, planned

SPACE = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1, 32], max_tokens: 64}
baseline: {speculation: none, threads: 1}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {low: 1, high: 3}
  threads: {choices: [1]}
budget: {launches: 16, candidates: 12}
objective: {maximize: speedup, guard: {min_speedup: 0.5}}
profile: short
"""
POLICY = Policy(pairs=4, fewest=99)


def speed_of(crossing: float, bend: float = 1.0) -> Any:
    """Three steps gain most at one request, and nothing at `crossing`; `bend` is the exponent by which that comes."""

    def speed(settings: Mapping[str, Any], level: int) -> float:
        plain = 100.0 * level**0.7
        depth = shape_at(settings, level).depth
        if not depth:
            return plain
        gain = {1: 0.15, 2: 0.25, 3: 0.35}[depth]
        return plain * (1 + gain * max(-1.0, 1 - (math.log(level) / math.log(crossing)) ** bend))

    return speed


def run(folder: Path, crossing: float, bend: float = 1.0, *overrides: str, **machine: Any) -> tuple[StudyData, Any]:
    folder.mkdir(exist_ok=True)
    made = HotMachine(speed=speed_of(crossing, bend), **machine)
    return controller(study(folder, space(SPACE, *overrides)), made, HotEngine(), policy=POLICY).run(), made


def threshold(data: StudyData) -> int:
    winner = recommendation(data).overall.winner
    assert winner is not None
    found = winner.settings["disable_batch_threshold"]
    assert isinstance(found, int)
    return found


def edges(data: StudyData) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for stored in data.blocks.values():
        if stored.role == "edge" and stored.block.valid:
            found.setdefault(stored.concurrency, set()).add(stored.candidate_id)
    return found


@pytest.mark.parametrize("bend", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("crossing", [3.5, 7.4, 15.5, 24.5])
def test_the_threshold_lies_where_the_curves_cross_and_not_where_a_straight_line_would(tmp_path, crossing, bend):
    data, _ = run(tmp_path, crossing, bend)
    assert threshold(data) == pytest.approx(math.floor(crossing), abs=max(1, 0.25 * crossing))
    found = edges(data)
    assert found, "nothing was measured between the levels"
    assert all(len(whose) == 2 for whose in found.values()), "both depths are measured at each load"
    changes = threshold(data) + 0.5
    assert any(1 / 1.3 <= load / changes <= 1 for load in found)
    assert any(1 <= load / changes <= 1.3 for load in found)
    assert len(found) <= 2 * ROUNDS


def test_it_takes_no_launch_more_and_no_trial_and_no_confirmation_knows_of_it(tmp_path):
    data, machine = run(tmp_path, 7.4)
    assert launches_used(data) == len(machine.starts)
    assert not [launch for launch in data.launches if launch.slot.role == "edge"], "the server that is up serves"
    assert len(data.measured) == 4, "three depths, and the schedule"
    assert {pair.concurrency for pair in data.pairs} == {1, 32}
    trials = {trial.candidate_id for trial in data.trials}
    shown = study_view(data).candidates
    assert {one.id for one in shown} <= trials
    for one in shown:
        assert {row.concurrency for row in one.rows} == {1, 32}


def test_the_report_says_where_speculation_pays_and_between_which_loads_that_is_sure(tmp_path):
    data, _ = run(tmp_path, 7.4)
    (note,) = [one for one in recommendation(data).advice if one.startswith("Where it pays")]
    assert "up to about 7 at once (95 %: " in note
    assert ", 32 requests" in note
    (curves,) = curves_of(data).values()
    (found,) = crossings(ratio(curves[3], curves[0]))
    assert found.low <= 7.4 <= found.high
    assert not found.rising


@pytest.mark.parametrize(("lead", "looked_for"), [(0.10, True), (0.02, False)])
def test_a_change_between_two_depths_is_looked_for_only_where_noise_has_not_made_it(tmp_path, lead, looked_for):
    """At one request the third step gains `lead`, at 32 it loses as much; plain decoding never wins."""

    def speed(settings: Mapping[str, Any], level: int) -> float:
        depth = shape_at(settings, level).depth
        steep = lead * (1 - 2 * math.log(level) / math.log(32))
        return 100.0 * level**0.7 * {0: 1.0, 1: 1.1, 2: 1.3, 3: 1.3 * (1 + steep)}[depth]

    engine = HotEngine()
    engine.hot = engine.hot | {"steps_by_batch"}
    data = controller(study(tmp_path, space(SPACE)), HotMachine(speed=speed), engine, policy=POLICY).run()
    assert [trial for trial in data.trials if "steps_by_batch" in data.settings_of(trial.candidate_id)]
    assert bool(edges(data)) == looked_for


def test_a_threshold_of_the_space_far_from_the_crossing_is_told(tmp_path):
    listed = "parameters.disable_batch_threshold={choices: [never, 2]}"
    data, _ = run(tmp_path, 20.0, 1.0, listed)
    winner = recommendation(data).overall.winner
    assert winner is not None
    (note,) = [one for one in recommendation(data).advice if one.startswith("Where it pays")]
    assert ("switches at 3" in note) == (winner.settings["disable_batch_threshold"] == 2)


def test_a_limit_at_an_end_of_what_was_measured_is_that_level():
    one = Crossing(93.0, math.exp(math.log(78)), math.exp(math.log(100) + 1e-12), False)
    assert _said(one, 1, 100) == "up to about 93 at once (95 %: 78 to 100 or more)"


DIES = Failure("died_mid_bench", "bench", "it died")


@pytest.mark.parametrize(
    "faults",
    [
        {"fails": lambda phase, _settings, _n: DIES if phase in ("bench7", "bench8", "bench12") else None},
        {"valid": lambda _settings, level, _n: level in (1, 32)},
    ],
    ids=["dies there", "never valid there"],
)
def test_what_cannot_be_measured_there_leaves_the_schedule_to_the_curves(tmp_path, faults):
    data, machine = run(tmp_path, 7.4, 1.0, **faults)
    assert data.state == "done"
    assert shape_at(recommendation(data).overall.winner.settings, 1).depth == 3
    assert shape_at(recommendation(data).overall.winner.settings, 32).depth == 0
    assert len(machine.starts) <= data.budget.launches
    tries = [stored for stored in data.blocks.values() if stored.role == "edge"]
    assert len(tries) <= 2 * POLICY.block_attempts


def test_with_no_launch_and_no_server_left_the_schedule_is_tried_as_the_curves_are(tmp_path):
    data, _ = run(tmp_path, 7.4, 1.0, "budget.launches=5")
    assert data.state == "done"
    assert launches_used(data) <= 5


def test_where_nothing_is_hot_no_launch_is_spent_on_it(tmp_path):
    from tests.tuner.study.toy_study import ToyEngine, ToyMachine

    store = study(tmp_path, space(SPACE))
    data = controller(store, ToyMachine(speed=speed_of(7.4)), ToyEngine(), policy=POLICY).run()
    assert not edges(data)
    assert 1 <= threshold(data) < 32


def test_a_kill_between_any_two_writes_ends_in_the_same_schedule(tmp_path):
    from tests.tuner.study.test_study_resume import Moments, Watched

    moments = Moments(tmp_path)

    machine = HotMachine(speed=speed_of(7.4))
    whole = controller(
        Watched(study(tmp_path, space(SPACE)), moments), Watched(machine, moments), HotEngine(), policy=POLICY
    ).run()
    first = next(i for i, (_, at) in enumerate(moments) if edges(study(at, space(SPACE)).data()))
    for i, (name, moment) in list(enumerate(moments))[max(0, first - 6) : first + 24 : 2]:
        shutil.copytree(moment, tmp_path / f"again-{i}")
        store = study(tmp_path / f"again-{i}", space(SPACE))
        before = store.data()
        data = controller(store, HotMachine(speed=speed_of(7.4)), HotEngine(), policy=POLICY).run()
        assert [t.candidate_id for t in data.trials] == [t.candidate_id for t in whole.trials], name
        assert before.blocks.items() <= data.blocks.items()
        assert edges(data) == edges(whole)
        assert launches_used(data) <= data.budget.launches
        for load, whose in edges(data).items():
            assert all(data.block(Slot(one, "edge", load), load) is not None for one in whose)


def test_the_noise_of_crossings_is_what_the_baseline_shows(tmp_path):
    twice, draw = "parameters.threads.choices=[1, 2]", random.Random(3)
    quiet, _ = run(tmp_path / "quiet", 7.4, 1.0, twice)
    noisy = HotMachine(speed=lambda settings, level: speed_of(7.4)(settings, level) * math.exp(draw.gauss(0, 0.1)))
    (tmp_path / "noisy").mkdir()
    data = controller(study(tmp_path / "noisy", space(SPACE, twice)), noisy, HotEngine(), policy=POLICY).run()
    assert block_sd(quiet) < BLOCK_SD < 0.03 < block_sd(data)


def test_a_depth_that_is_fixed_for_all_is_in_no_schedule(tmp_path):
    """It would be said twice, and an engine refuses that."""
    parameters = "parameters={speculation: {choices: [ngram]}, threads: {choices: [1]}}"
    data, _ = run(tmp_path, 7.4, 1.0, "engine.args={num_steps: 3}", parameters)
    assert threshold(data) in (6, 7, 8)
    assert not any("num_steps" in candidate.settings for candidate in data.candidates.values())


def test_a_schedule_has_to_promise_more_than_the_best_that_was_imported(tmp_path):
    def speed(settings: Mapping[str, Any], level: int) -> float:
        return speed_of(7.4)(settings, level) * float(settings["threads"])

    store = study(tmp_path, space(SPACE, "parameters.threads.choices=[1, 2]"))
    data = controller(store, HotMachine(speed=speed), HotEngine(), policy=POLICY).run()

    told = [(trial, data.settings_of(trial.candidate_id)) for trial in data.measured]
    constant = [(trial, s["threads"], s.get("num_steps")) for trial, s in told if not by_batch(s)]
    known = [data.trials[0], *(trial for trial, threads, _ in constant if threads == 1)]
    fast = [replace(t, kind="imported") for t, threads, steps in constant if (threads, steps) == (2, 3)]
    assert len(known) == 4
    assert len(fast) == 1
    slow = planned(replace(data, trials=tuple(known)), lambda one: one.settings["threads"] == 1)
    assert slow is not None
    assert planned(replace(data, trials=(*known, *fast)), lambda one: one.settings["threads"] == 1) is None


def test_a_schedule_is_found_where_no_candidate_decodes_plainly_beside_its_family(tmp_path):
    """All candidates speculate with a setting that the baseline has not: how they decode plainly nobody knows yet."""

    def speed(settings: Mapping[str, Any], level: int) -> float:
        return speed_of(7.4)(settings, level) * (1.0 if settings.get("allreduce", "ring") == "ring" else 0.9)

    parameters = (
        "parameters={speculation: {choices: [ngram]}, num_steps: {low: 1, high: 3}, allreduce: {choices: [ring, tree]}}"
    )
    the_space = space(SPACE, "baseline={speculation: none}", parameters)
    store = study(tmp_path, the_space)
    data = controller(store, HotMachine(speed=speed), HotEngine(), policy=POLICY).run()
    told = [data.settings_of(trial.candidate_id) for trial in data.measured]
    best = recommendation(data).overall
    assert any(s.get("allreduce") == "ring" and "disable_batch_threshold" in s for s in told)
    assert best.winner is not None
    assert best.winner.settings["disable_batch_threshold"] in (6, 7, 8)
    # Not again and again for the slow one: what its blocks say of plain decoding takes the place of the guess.
    assert len([s for s in told if by_batch(s)]) <= 3


@pytest.mark.parametrize("launches", [10, 11, 12])
def test_with_few_launches_the_schedule_is_tried_before_the_last_server_is_left(tmp_path, launches):
    """Its baseline's turn would take a launch that is not there; the server that is up can become the schedule."""

    def speed(settings: Mapping[str, Any], level: int) -> float:
        return speed_of(7.4)(settings, level) * (1.3 if settings.get("threads") == 2 else 1.0)

    the_space = space(SPACE, "parameters.threads.choices=[2, 3]", f"budget.launches={launches}")
    policy = Policy(pairs=4, fewest=8)
    data = controller(study(tmp_path, the_space), HotMachine(speed=speed), HotEngine(), policy=policy).run()
    assert launches_used(data) <= launches
    best = recommendation(data).overall.winner
    assert best is not None
    assert (shape_at(best.settings, 1).depth, shape_at(best.settings, 32).depth) == (3, 0)
    if launches == 12:  # with fewer one of the two servers is never launched
        assert best.settings["threads"] == 2
        plain = [data.settings_of(trial.candidate_id) for trial in data.measured if trial.kind == "measured"]
        assert any(s["speculation"] == "none" and s["threads"] == 2 for s in plain), "faster than the baseline"


def test_beside_a_table_that_is_fixed_no_schedule_is_made_up(tmp_path):
    parameters = "parameters={speculation: {choices: [ngram]}, num_steps: {low: 1, high: 3}, threads: {choices: [1]}}"
    data, _ = run(tmp_path, 7.4, 1.0, "engine.args={steps_by_batch: '1:3,16:0'}", parameters)
    assert not any(by_batch(candidate.settings) for candidate in data.candidates.values())
    assert not [trial for trial in data.trials if trial.kind == "duplicate"]
    assert not edges(data)


def by_batch(settings: Mapping[str, Any]) -> bool:
    """Whether it has another depth at another load."""
    return bool({"disable_batch_threshold", "steps_by_batch"} & settings.keys())
