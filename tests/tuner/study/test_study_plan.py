"""`tuner plan`: what a study would come to, before anything starts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.tuner.study.hot_toy import SPACE, HotEngine
from tests.tuner.study.toy_study import ToyEngine, space
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.errors import UsageError
from tuner.records import Candidate
from tuner.space import parse_space
from tuner.study.effect import Effects
from tuner.study.plan import Timing, plan
from tuner.study.preflight import require

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
    assert hot.hours < cold.hours / 2
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
