"""Prompt kind, context length and temperature are axes of the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_studies import reference, toy

from tests.tuner.bench.test_bench_metrics import recording
from tuner.bench.axes import CONTEXTS, by_axis, context_words, groups
from tuner.bench.summary import summarise
from tuner.report.content import report
from tuner.report.evidence import axes
from tuner.report.html import html
from tuner.report.markdown import markdown
from tuner.report.view import study_view
from tuner.study.data import StudyData


def told() -> StudyData:
    """The toy study, as if streams of code had been twice as fast and long prompts no faster."""
    data = toy()
    blocks = {}
    for number, stored in data.blocks.items():
        fast = stored.candidate_id != data.baseline.id
        counters = {}
        for axis, name, ms in (
            ("kind", "chat", 10.0),
            ("kind", "code", 5.0 if fast else 10.0),
            ("context", "512", 12.0),
        ):
            counters |= {
                f"{axis}/{name}/requests": 30.0,
                f"{axis}/{name}/ms_per_token": ms,
                f"{axis}/{name}/tokens_per_chunk": 2.0 if fast else 1.0,
            }
        blocks[number] = replace(stored, block=replace(stored.block, counters=counters))
    return replace(data, blocks=blocks)


def test_requests_are_told_apart_by_kind_and_context() -> None:
    seen = recording(chunk=3, window=(4.0, 10.0), kinds={"p": "code"})
    block, _ = summarise(seen, "screen")
    found = {(axis, name): group for axis, name, group in groups(block.counters)}
    assert set(found) == {("kind", "code"), ("context", "0")}
    for group in found.values():
        assert group.requests == block.requests
        assert group.ms_per_token == pytest.approx(50 / 3)
        assert group.tokens_per_chunk == pytest.approx(61 / 21)
    assert by_axis([], {}) == {}
    longer = tuple(replace(one, prompt_tokens=600) for one in seen.traces)
    block, _ = summarise(replace(seen, traces=longer, kinds={}), "screen")
    assert {(axis, name) for axis, name, _ in groups(block.counters)} == {("context", "512")}
    assert [context_words(str(at)) for at in CONTEXTS][:2] == ["0 to 127 tokens", "128 to 511 tokens"]
    assert context_words(str(CONTEXTS[-1])).endswith("and more")


def test_a_study_says_what_its_gain_hangs_on() -> None:
    view = study_view(told())
    text = markdown(report(view))
    assert "## Traffic" in text
    assert "Streams gain most on code (+100.0 %" in text
    assert "least on chat (+0.0 %" in text
    assert "512 to 2047 tokens" in text
    assert f"at temperature {view.temperature:g}" in text
    assert "Does it hang on what is asked?" in html(report(view))


def test_an_older_study_has_no_such_section() -> None:
    assert axes(reference(), ("baseline",)) == ()
    assert "## Traffic" not in markdown(report(study_view(reference())))


def test_a_kind_may_be_called_anything() -> None:
    data = told()
    name = "a/b|<c>/requests"
    blocks = {
        number: replace(
            stored,
            block=replace(
                stored.block,
                counters={key.replace("/code/", f"/{name}/"): value for key, value in stored.block.counters.items()},
            ),
        )
        for number, stored in data.blocks.items()
    }
    found = replace(data, blocks=blocks)
    assert name in {each.name for each in study_view(found).axes}
    assert "<c>" not in html(report(study_view(found))).replace("&lt;c&gt;", "")
