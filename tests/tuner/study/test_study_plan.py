"""`tuner plan`: what a study would come to, before anything starts."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from typer.testing import CliRunner

from benchmarks import racing
from tests.tuner.study.hot_toy import SPACE, HotEngine
from tests.tuner.study.toy_study import ToyEngine, space
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.engines.simulated.blocks import BLOCK_S, LAUNCH_S, WARMUP_S, BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.errors import UsageError
from tuner.records import Candidate
from tuner.space import parse_space
from tuner.study.effect import Effects
from tuner.study.in_memory import simulate
from tuner.study.plan import Timing, plan
from tuner.study.preflight import require
from tuner.study.session import outlook, read_space

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


def test_the_budget_of_hours_bounds_what_is_expected():
    found = plan(space(SPACE, "budget.hours=0.5"), ToyEngine(), TIMING)
    assert found.hours == 0.5
    assert any("hours" in note for note in found.notes)


def test_an_engine_that_takes_no_candidate_is_said_and_refused_before_anything_starts():
    the_space = parse_space(BUNDLED.replace("topk: {choices: [1, 2]", "topk: {choices: [2]"))
    found = plan(the_space, get_engine("bundled"), TIMING)
    assert found.legal == 0
    assert any("nothing is left" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"no candidate can be tried(.|\n)*topk"):
        require(the_space)


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


@pytest.mark.parametrize("overrides", [(), ("profile=short",), ("budget.launches=30",)])
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
