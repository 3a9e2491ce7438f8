"""The report of a study: the decision first, every candidate in it, and all of it from stored records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from toy_study import SPACE, ToyMachine, controller, space, study
from typer.testing import CliRunner

from tuner.cli.app import app
from tuner.errors import StudyStopped
from tuner.judge.quality import Quality
from tuner.records import Failure
from tuner.report.content import report
from tuner.report.markdown import markdown as rendered
from tuner.report.view import StudyView, study_view
from tuner.study.data import StudyData

CRASH = Failure(
    "startup_crash",
    "ready",
    "the server ended with status 1; RuntimeError: heads | *do* not <match>",
    evidence="Traceback (most recent call last):\n```\nRuntimeError: heads do not match",
    exit_status=1,
)


def markdown(view: StudyView) -> str:
    return rendered(report(view))


def finished(folder: Path, **machine: Any) -> StudyData:
    store = study(folder)
    with suppress(StudyStopped):
        controller(store, ToyMachine(**machine), folder=folder).run()
    return store.data()


def crashes(when: Callable[[Mapping[str, Any]], bool]) -> Callable[..., Failure | None]:
    return lambda phase, settings, _count: CRASH if phase == "ready" and when(settings) else None


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    def valid(settings: Mapping[str, Any], level: int, count: int) -> bool:
        return not (settings.get("num_steps") == 1 and level == 8 and count == 1)

    return finished(tmp_path_factory.mktemp("done"), fails=crashes(lambda s: s.get("num_steps") == 2), valid=valid)


@pytest.fixture(scope="module")
def view(done: StudyData) -> StudyView:
    return study_view(done)


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a Markdown text, as a real parser sees it."""
    found: list[list[list[str]]] = []
    in_cell = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            in_cell = True
        elif token.type == "inline" and in_cell:
            found[-1][-1].append(token.content)
            in_cell = False
    return found


def test_the_decision_comes_first_and_is_the_recommendations(view: StudyView) -> None:
    text = markdown(view)
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections[:2] == ["## Decision", "## Leaderboard"]
    winner = view.recommendation.overall.winner
    assert f"winner `{winner.id}`" in text if winner else "no winner: keep the baseline" in text


def test_the_leaderboard_has_every_candidate_at_every_level(done: StudyData, view: StudyView) -> None:
    board = next(table for table in tables(markdown(view)) if "tok/s" in table[0])
    assert board[0] == ["Candidate", "C", "tok/s", "Per request", "Average", "p50", "p99", "Ok", "Δ to baseline"]
    rows = board[1:]
    assert len(rows) == len(done.candidates) * len(done.levels)
    assert all(len(row) == 9 for row in rows)
    named = [row[0].split("`")[1] for row in rows if row[0].strip()]
    assert sorted(named) == sorted(done.candidates)
    assert named[0] == done.baseline.id
    assert [row[1] for row in rows] == [str(level) for _ in done.candidates for level in sorted(done.levels)]


def test_figures_are_those_of_the_stored_blocks(done: StudyData, view: StudyView) -> None:
    baseline = view.candidates[0]
    mine = [s.block for s in done.blocks.values() if s.candidate_id == baseline.id and s.role == "confirm"]
    row = baseline.rows[0]
    of_level = [block.tokens_per_s for block in mine if block.concurrency == row.concurrency]
    assert (row.role, row.blocks) == ("confirm", len(of_level))
    assert row.tokens_per_s == pytest.approx(sum(of_level) / len(of_level))
    assert row.change == 1.0
    assert row.latency.p99 is None, "64 requests are too few for a 99th percentile"


def test_what_failed_is_there_with_its_evidence_and_does_not_break_the_page(view: StudyView) -> None:
    text = markdown(view)
    failed = [candidate for candidate in view.candidates if candidate.standing == "failed"]
    assert failed
    assert all(candidate.rows[0].tokens_per_s is None for candidate in failed)
    assert "### `startup_crash` of" in text
    fences = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
    assert fences[0].content.rstrip("\n") == CRASH.evidence
    assert "<match>" not in MarkdownIt().render(text)


def test_blocks_that_a_gate_has_invalidated_are_listed_with_what_became_of_them(view: StudyView) -> None:
    assert view.invalid
    assert {(bad.gate, bad.concurrency, bad.repeated) for bad in view.invalid} == {("degenerate_output", 8, True)}
    assert "measured again" in markdown(view)


def test_what_the_answers_were_held_to_be_is_shown(view: StudyView) -> None:
    same = Quality("abc", 8, 8, "same", "")
    part = Quality("def", 8, 5, "equivalent", "3 differ at near ties")
    text = markdown(replace(view, answers={"abc": same, "def": part}))
    assert "abc: same (8 of 8); def: equivalent (3 differ at near ties)" in text


def test_rules_that_ruled_candidates_out_are_named(view: StudyView) -> None:
    assert "the toy forbids it" in markdown(view)


def test_a_figure_of_the_search_says_so(view: StudyView) -> None:
    screened = [candidate for candidate in view.candidates if candidate.standing == "screened"]
    assert screened
    assert all(row.verdict is None for candidate in screened for row in candidate.rows)
    assert "(search, 1 pair)" in markdown(view)


def test_a_study_in_which_everything_failed_is_reported_too(tmp_path: Path) -> None:
    view = study_view(finished(tmp_path, fails=crashes(lambda settings: True)))
    text = markdown(view)
    assert view.state == "stopped"
    assert "The study is not done" in text
    assert "no winner: keep the baseline" in text
    assert "RuntimeError: heads do not match" in text


def test_a_study_without_a_single_launch_is_reported_too(tmp_path: Path) -> None:
    text = markdown(study_view(study(tmp_path).data()))
    assert "no candidate has been measured yet" in text


def test_a_simulated_study_says_so_before_anything_else(view: StudyView) -> None:
    text = markdown(replace(view, simulated=True))
    assert text.index("SIMULATED") < text.index("## Decision")


def test_the_command_prints_markdown_and_writes_a_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished(tmp_path)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    printed = CliRunner().invoke(app, ["report", "toy", "--storage", url])
    assert printed.exit_code == 0, printed.output
    written = CliRunner().invoke(app, ["report", "toy", "--storage", url, "--output", "sub/report.md"])
    assert written.exit_code == 0
    assert (tmp_path / "sub" / "report.md").read_text().strip() == printed.output.strip()
    (tmp_path / "file").write_text("x")
    refused = CliRunner().invoke(app, ["report", "toy", "--storage", url, "--output", "file/report.md"])
    assert refused.exit_code == 2


def test_a_study_that_does_not_exist_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", "nosuch"]).exit_code == 2


def test_what_the_model_expects_is_drawn_where_a_fixed_setting_is_a_list(tmp_path: Path) -> None:
    """As the command line of `kind: command`, and `extra` of SGLang and vLLM."""
    store = study(tmp_path, space(SPACE, "engine.args={extra: [--a, b]}"))
    data = controller(store, ToyMachine(), folder=tmp_path).run()
    store.close()
    assert data.space.args["extra"] == ["--a", "b"]
    assert study_view(data).predicted
