"""`tuner plan`: what a study would come to, before anything starts."""

from __future__ import annotations

import json
import re
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import racing
from tests.tuner.study.hot_toy import HOT, SPACE, HotEngine, hot_speed
from tests.tuner.study.toy_study import ToyEngine, space
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.engines.simulated.blocks import BLOCK_S, LAUNCH_S, WARMUP_S, BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.errors import UsageError
from tuner.judge.intervals import MIN_PAIRS
from tuner.records import Candidate
from tuner.space import parse_space
from tuner.study import in_memory
from tuner.study.data import StudyData
from tuner.study.effect import Effects
from tuner.study.in_memory import simulate
from tuner.study.plan import Timing, plan
from tuner.study.policy import CLAIM_PAIRS
from tuner.study.preflight import preflight, require
from tuner.study.session import outlook, read_space
from tuner.study.summary import time_left_s

TIMING = Timing(600.0, 30.0, "assumed")

BUNDLED = """
name: small
engine: {kind: bundled, model: smollm2-135m}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram]}
  num_steps: {low: 1, high: 2, when: speculation != 'none'}
  topk: {choices: [1, 2], when: speculation != 'none'}
  acceptance: {choices: [target], when: speculation != 'none'}
rules:
  - {forbid: num_steps == 2 and topk == 1, because: for a test}
"""


def test_every_combination_is_legal_or_has_a_reason():
    found = plan(parse_space(BUNDLED), get_engine("bundled"), TIMING)
    assert found.combinations == 5
    assert [(one.source, one.combinations) for one in found.ruled_out] == [("engine", 2), ("space", 1)]
    assert "topk" in found.ruled_out[0].rule
    assert "for a test" in found.ruled_out[1].rule
    assert found.merged == 1, "without speculation it is the baseline"
    assert found.legal == 1
    assert any("only one candidate" in note for note in found.notes)
    assert found.combinations == found.legal + found.merged + sum(one.combinations for one in found.ruled_out)


def test_hot_settings_save_launches_and_where_none_is_hot_each_candidate_takes_one():
    the_space = space(SPACE, "budget.launches=40")
    hot, cold = plan(the_space, HotEngine(), TIMING), plan(the_space, ToyEngine(), TIMING)
    assert (hot.legal, hot.groups) == (cold.legal, 2) == (17, 2)
    assert cold.search == 18
    assert hot.search + hot.saved == cold.search
    assert hot.hours < 0.65 * cold.hours, "both confirm as many finalists as the budget has room for"
    assert hot.launches <= 40


@pytest.mark.parametrize(("baseline", "launches"), [("{speculation: none, threads: 1}", 1), ("{speculation: none}", 2)])
def test_a_launch_is_counted_for_what_the_baselines_server_cannot_become(baseline: str, launches: int):
    parameters = (
        "parameters={speculation: {choices: [none, ngram]}, num_steps: {low: 1, high: 3}, threads: {choices: [1]}}"
    )
    the_space = space(SPACE, f"baseline={baseline}", parameters, "budget.launches=40")
    found = plan(the_space, HotEngine(), TIMING)
    assert found.groups == 1
    assert found.search == launches
    assert found.saved == found.candidates - (launches - 1)


def test_limits_that_a_virtual_clock_cannot_be_held_against_are_named():
    simulated = "simulation={profile: pcie_blackwell_8gpu_70b, clock: virtual}"
    text = """
name: limited
engine: {kind: simulated, model: any, args: {tp: 8}}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram]}
"""
    for objective, told in (
        ("objective={guard: {ttft_p90_ms: 5}}", "objective.guard.ttft_p90_ms"),
        ("objective={maximize: goodput, slo: {tpot_ms: 50, e2e_ms: 5000}}", "objective.slo.e2e_ms"),
        ("objective={guard: {tpot_p90_ms: 5}}", ""),  # throughput tells its mean
    ):
        the_space = parse_space(text, source="limited.yaml", overrides=(simulated, objective))
        notes = [note for note in plan(the_space, get_engine("simulated"), TIMING).notes if "held against" in note]
        assert [note.partition(":")[0] for note in notes] == ([f"nothing is held against {told}"] if told else [])


def test_blocks_beside_a_change_of_depth_are_told_where_there_may_be_any():
    for levels, engine, told in (
        ("[1, 8]", HotEngine(), True),
        ("[1, 2]", HotEngine(), False),
        ("[1, 8]", ToyEngine(), False),
    ):
        found = plan(space(SPACE, f"workload.concurrency={levels}"), engine, TIMING)
        assert any(note.startswith("not counted: up to 12 blocks (6 min)") for note in found.notes) == told


def test_the_budget_of_hours_bounds_what_is_expected_and_what_it_does_not_hold_is_said():
    short = plan(space(SPACE, "budget.hours=0.5"), ToyEngine(), TIMING)
    assert short.hours <= 0.5
    assert (short.candidates, short.confirmation) == (1, 0)
    (said,) = [note for note in short.notes if "holds no confirmation" in note]
    enough = float(re.findall(r"([\d.]+) hours hold the", said)[0])
    held = plan(space(SPACE, f"budget.hours={enough}"), ToyEngine(), TIMING)
    assert (held.candidates, held.confirmation) == (1, 8)
    assert held.hours <= enough
    assert [note for note in held.notes if "hours" in note] == [
        f"the budget of {enough:g} hours ends the search before all candidates are tried"
    ]
    fewer = plan(space(SPACE, "profile=full", "budget.launches=40", "budget.hours=2.5"), ToyEngine(), TIMING)
    assert (fewer.candidates, fewer.confirmation) == (1, 12)
    assert "the budget of 2.5 hours holds 6 of 8 pairs of confirmation" in fewer.notes


def test_as_many_pairs_are_kept_for_as_a_verdict_takes():
    assert CLAIM_PAIRS == MIN_PAIRS


def test_an_engine_that_takes_no_candidate_is_said_and_refused_before_anything_starts():
    the_space = parse_space(BUNDLED.replace("topk: {choices: [1, 2]", "topk: {choices: [2]"))
    found = plan(the_space, get_engine("bundled"), TIMING)
    assert found.legal == 0
    assert any("nothing is left" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"no candidate can be tried(.|\n)*topk"):
        require(the_space)


@pytest.mark.parametrize(("forbid", "told"), [("mem > 0", True), ("mem > 0.5", False)])
def test_a_space_that_cannot_be_listed_is_drawn_from_to_see_whether_anything_may_be_tried(forbid, told):
    mem = f"  mem: {{low: 0.1, high: 0.9}}\nrules:\n  - {{forbid: {forbid}, because: nothing fits}}\n"
    the_space = parse_space(BUNDLED.partition("rules")[0] + mem)
    said = f"of 200 candidates drawn at random none may be tried (200 of them: nothing fits (rule: {forbid}))"
    assert (said in plan(the_space, get_engine("bundled"), TIMING).notes) == told
    assert (said in preflight(the_space).notes) == told


def test_spelling_defaults_out_changes_no_effect_and_unset_is_not_zero():
    effects = Effects(parse_space(BUNDLED), get_engine("bundled"))
    short = Candidate({"speculation": "ngram", "num_steps": 3})
    long = Candidate({"speculation": "ngram", "num_steps": 3, "topk": 1, "spec_version": "v1"})
    assert effects.of(short) == effects.of(long)
    several = [Candidate({"speculation": "none", **more}) for more in ({}, {"env.X": "unset"}, {"env.X": "0"})]
    assert len({effects.of(each) for each in several}) == 3


@pytest.mark.parametrize("profile", ["short", "full"])
def test_the_command_starts_nothing_and_speaks_json(tmp_path, monkeypatch, profile):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "pcie_blackwell.yaml", "--profile", profile, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["legal"] == 138
    assert found["ruled_out"][0]["combinations"] == 45
    assert found["launches"] <= 60
    assert not list(tmp_path.iterdir())
    text = CliRunner().invoke(app, ["plan", "pcie_blackwell.yaml", "--profile", profile])
    assert "ruled out (space): overlapped drafting only chains" in text.output


@pytest.mark.parametrize("overrides", [(), ("profile=short",), ("budget.launches=30",), ("budget.hours=1.5",)])
@pytest.mark.parametrize("hot", [frozenset[str](), racing.HOT])
def test_the_estimate_is_within_a_fifth_of_what_simulated_studies_take(
    overrides: tuple[str, ...], hot: frozenset[str]
) -> None:
    """Under the default policy: racing, servers that are kept, the baseline's turns, confirmation of all finalists."""
    the_space = parse_space(racing.SPACE, source="racing.yaml", overrides=overrides)
    engine = HotEngine() if hot else ToyEngine()
    engine.hot = hot  # type: ignore[union-attr]
    found = plan(the_space, engine, Timing(LAUNCH_S, BLOCK_S, "", WARMUP_S))
    studies = [simulate(the_space, BlockSource(racing.spread, Noise(), seed), seed, hot=hot) for seed in range(4)]
    taken = fmean(data.elapsed_s for data in studies) / 3600
    assert found.hours == pytest.approx(taken, rel=0.2)
    assert found.launches <= the_space.budget.launches
    if the_space.budget.hours is not None:
        whole_launch_s = LAUNCH_S + len(the_space.workload.concurrency) * BLOCK_S
        assert max(data.elapsed_s for data in studies) <= 3600 * the_space.budget.hours + whole_launch_s


TWO_GROUPS = (SPACE, hot_speed, HOT, ("budget.launches=14",))


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize(
    ("text", "speed", "hot", "overrides"),
    [
        (racing.SPACE, racing.spread, frozenset[str](), ()),
        (racing.SPACE, racing.spread, frozenset[str](), ("profile=short",)),
        (racing.SPACE, racing.spread, racing.HOT, ()),
        (racing.SPACE, racing.spread, racing.HOT, ("budget.hours=1.5",)),
        TWO_GROUPS,
    ],
)
def test_what_is_left_is_told_within_a_third_in_the_middle_of_simulated_studies(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    speed: Any,
    hot: frozenset[str],
    overrides: tuple[str, ...],
    share: float,
) -> None:
    the_space = parse_space(text, source="left.yaml", overrides=overrides)
    real = in_memory._Study.data
    told, taken = [], []
    for seed in range(4):
        moments: list[StudyData] = []

        def kept(study: in_memory._Study, moments: list[StudyData] = moments) -> StudyData:
            moments.append(real(study))
            return moments[-1]

        monkeypatch.setattr(in_memory._Study, "data", kept)
        whole_s = simulate(the_space, BlockSource(speed, Noise(), seed), seed, hot=hot).elapsed_s
        now = next(data for data in moments if data.elapsed_s >= share * whole_s)
        told.append(time_left_s(now) or 0.0)
        taken.append(whole_s - now.elapsed_s)
    assert fmean(told) == pytest.approx(fmean(taken), rel=1 / 3)


def test_a_race_is_estimated_to_take_less_than_whole_blocks_where_there_is_one() -> None:
    timing = Timing(60.0, 45.0, "", 10.0)
    raced = plan(parse_space(racing.SPACE, source="racing.yaml"), ToyEngine(), timing)
    none = plan(
        parse_space(racing.SPACE, source="racing.yaml", overrides=("objective.maximize=pareto",)), ToyEngine(), timing
    )
    assert 0.02 < 1 - raced.hours / none.hours < 0.1


def test_canaries_are_counted() -> None:
    notes = outlook(read_space("pcie_blackwell_sglang.yaml", ("engine.kind=simulated",))).notes
    said = "values of allreduce, env.NCCL_PROTO, env.NCCL_P2P_LEVEL, env.NCCL_MAX_CTAS, each tried alone"
    assert any(
        note.startswith("7 launches are canaries: ") and note.endswith(f"{said} before it is searched")
        for note in notes
    )
    small = outlook(read_space("pcie_blackwell_sglang.yaml", ("engine.kind=simulated", "budget.launches=20"))).notes
    assert any("most of the search's" in note and "give more, or fewer values" in note for note in small)
