"""Spaces, budgets and imports that cannot give what is asked: each is said clearly, and nothing is half-written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tuner.cli.app import app

SPACE = """
name: NAME
engine: {kind: simulated, model: any, args: {tp: 8}}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {low: 1, high: HIGH, when: speculation != 'none'}
budget: {launches: 12}
profile: short
simulation: {clock: virtual}
"""

Run = Callable[..., Result]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(name: str, *options: str, high: int = 2, more: str = "", swap: tuple[str, str] = ("", "")) -> Result:
        text = SPACE.replace("NAME", name).replace("HIGH", str(high)).replace(*swap) + more
        Path(f"{name}.yaml").write_text(text)
        return CliRunner().invoke(app, ["run", f"{name}.yaml", "--quiet", *options])

    return run


def whole(name: str) -> None:
    """The study is done, and its database is sound."""
    with sqlite3.connect(f"studies/{name}/study.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("select state from tuner_studies").fetchone() == ("done",)
        assert not database.execute("select id from tuner_launches where ended_at is null").fetchall()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("rules: [{forbid: num_steps >= 1, because: none may}]\n", "by: none may (rule: num_steps >= 1)"),
        (
            "objective: {maximize: goodput, slo: {ttft_ms: 100}, guard: {ttft_p90_ms: 50}}\n",
            "contradicts slo.ttft_ms 100",
        ),
    ],
)
def test_rules_that_leave_nothing_and_parts_that_contradict_one_another_are_wrong_usage(
    tune: Run, more: str, says: str
) -> None:
    done = tune("nothing", more=more)
    assert done.exit_code == 2
    assert says in done.output
    assert "nothing was started" in done.output
    assert not Path("studies").exists()


def test_one_single_candidate_is_compared_with_the_baseline(tune: Run) -> None:
    done = tune("single", high=1)
    assert done.exit_code == 0
    assert "num_steps=1 speculation=ngram" in done.output
    whole("single")


def test_a_guard_that_nothing_can_keep_leaves_the_baseline(tune: Run) -> None:
    done = tune("guarded", more="objective: {maximize: speedup, guard: {min_speedup: 3.0}}\n")
    assert done.exit_code == 0
    assert "overall:         no winner: keep the baseline" in done.output
    whole("guarded")


def test_a_budget_of_launches_that_is_the_baseline_alone_is_wrong_usage_and_one_more_gives_an_answer(tune: Run) -> None:
    assert tune("small", "--launches", "1").exit_code == 2
    assert not Path("studies").exists()
    done = tune("small", "--launches", "2")
    assert done.exit_code == 0
    assert "no candidate was confirmed" in done.output
    whole("small")


def test_a_budget_of_hours_below_the_baselines_says_so_and_fails(tune: Run) -> None:
    done = tune("hours", swap=("{launches: 12}", "{launches: 12, hours: 0.0001}"))
    assert done.exit_code == 1
    assert "No candidate was measured: the baseline alone took" in done.output
    whole("hours")


def test_a_study_of_another_space_gives_nothing_and_says_why(tune: Run) -> None:
    assert tune("first", high=1).exit_code == 0
    done = tune("second", "--import", "first", swap=("num_steps: {low: 1, high: 2", "topk: {choices: [1, 2]"))
    assert done.exit_code == 0
    assert "study 'first': 0 candidates taken" in done.output
    assert "topk, which was not tried there" in done.output
    whole("second")
