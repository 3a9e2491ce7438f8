"""The study that ships is opened by every version, so that reports and analyses can be tried without running one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tuner.report.view import study_view
from tuner.study.store import open_study

REFERENCE = Path(__file__).parents[3] / "studies" / "reference" / "quickstart" / "study.db"


def test_the_reference_study_opens_and_has_its_figures() -> None:
    before = REFERENCE.read_bytes()
    with closing(open_study("quickstart", f"sqlite:///{REFERENCE}")) as store:
        view = study_view(store.data())
    assert view.state == "done"
    assert not view.simulated
    assert view.candidates[0].rows[0].blocks == 4
    assert REFERENCE.read_bytes() == before, "reading a study leaves it as it was"
