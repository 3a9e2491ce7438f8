"""Two studies side by side: what differs, what both decided, and how far apart the same candidates are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_studies import REFERENCE, reference, toy
from typer.testing import CliRunner

from tuner.cli.app import app
from tuner.report.compare import comparison, differences
from tuner.report.content import SIMULATED
from tuner.report.document import Table, plain
from tuner.report.markdown import markdown
from tuner.report.view import StudyView, study_view


@pytest.fixture(scope="module")
def real() -> StudyView:
    return study_view(reference())


def test_a_study_beside_itself_differs_in_nothing(real: StudyView) -> None:
    text = markdown(comparison(real, real))
    assert "quickstart (first) beside quickstart (second)" in text
    assert "Both keep the baseline overall" in text
    assert "are the same, so figures may be compared" in text
    found = differences(real, real)
    assert len(found) == 2, "one finalist at two levels"
    assert all(each.ratio == pytest.approx(1) for each in found)
    assert all(each.low is not None and each.high is not None and each.low < 1 < each.high for each in found)


def test_a_difference_is_the_ratio_of_the_speed_ups_with_welchs_interval(real: StudyView) -> None:
    evidence = tuple(replace(e, ratios=tuple(1.1 * ratio for ratio in e.ratios)) for e in real.evidence)
    found = differences(real, replace(real, evidence=evidence))
    assert all(each.ratio == pytest.approx(1.1) for each in found)
    three = tuple(replace(e, ratios=e.ratios[:3]) for e in real.evidence)
    fewer = differences(real, replace(real, evidence=three))
    assert all(each.low is None and each.high is None for each in fewer), "no interval under four pairs"
    assert fewer[0].pairs == (4, 3)


def test_what_differs_is_named_and_warned_of(real: StudyView) -> None:
    other = replace(study_view(toy()), simulated=True)
    document = comparison(real, other)
    assert SIMULATED in markdown(document)
    rows = next(b for s in document.sections if s.title == "Circumstances" for b in s.blocks if isinstance(b, Table))
    differing = {plain(row[0]): (plain(row[1]), plain(row[2])) for row in rows.rows}
    assert differing["Model"] == ("smollm2-135m", "toy")
    assert differing["Simulated"] == ("no", "yes")
    assert "Profile" not in differing


def test_levels_of_one_study_alone_are_said_to_be_so(real: StudyView) -> None:
    other = replace(
        real,
        name="other",
        levels=(1,),
        recommendation=replace(real.recommendation, per_concurrency=real.recommendation.per_concurrency[:1]),
    )
    assert "not measured" in markdown(comparison(real, other))
    assert all(math.isfinite(each.ratio) for each in differences(real, other))


def test_the_command_compares_in_markdown_and_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = ["--storage", f"sqlite:///{REFERENCE}"]
    done = CliRunner().invoke(app, ["report", "quickstart", *storage, "--compare", "quickstart", "--html", "both.html"])
    assert done.exit_code == 0, done.output
    assert "beside" in (tmp_path / "both.html").read_text()
    missing = CliRunner().invoke(app, ["report", "quickstart", *storage, "--compare", "nosuch"])
    assert missing.exit_code == 2
