"""The page: the same figures as the Markdown, nothing from a network, and no text that becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_studies import reference, toy
from toy_study import study
from typer.testing import CliRunner

from tuner.cli.app import app
from tuner.judge.recommend import percent
from tuner.records import Failure
from tuner.report.content import SIMULATED, report
from tuner.report.document import (
    Bar,
    Bars,
    Bullets,
    Curve,
    Curves,
    Document,
    Excerpt,
    Forest,
    Heading,
    Mark,
    Paragraph,
    Point,
    Scatter,
    code,
    line,
    plain,
    printable,
    section,
    strong,
    table,
)
from tuner.report.html import html
from tuner.report.markdown import markdown
from tuner.report.svg import WIDE, draw
from tuner.report.view import FailureView, StudyView, study_view

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """What a parser finds: tags, attributes, texts of table cells; it insists that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is given twice"
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data

    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}


def cells_of_markdown(text: str) -> list[str]:
    found, inside = [], False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inside = token.type in ("td_open", "th_open") or (inside and token.type == "inline")
        if inside and token.type == "inline":
            found.append("".join(child.content for child in token.children or []))
    return found


def squeezed(texts: list[str]) -> list[str]:
    return [" ".join(text.split()) for text in texts if text.strip()]


@pytest.fixture(scope="module")
def view() -> StudyView:
    return study_view(reference())


@pytest.mark.parametrize("of", [reference, toy])
def test_page_and_markdown_say_the_same_figures(of: Any) -> None:
    document = report(study_view(of()))
    assert squeezed(Page(html(document)).cells) == squeezed(cells_of_markdown(markdown(document)))


def test_the_questions_come_in_a_persons_order(view: StudyView) -> None:
    questions = [section.question for section in report(view).sections]
    order = [
        "Is speculation worth it here?",
        "Which settings?",
        "How sure is that?",
        "What does it cost in latency?",
        "Why?",
        "What mattered most?",
        "What was tried and failed?",
        "What to try next?",
    ]
    assert [q for q in questions if q in order] == order
    assert html(report(view)).index("At which load?") < html(report(view)).index("Which settings?")


def test_the_page_needs_nothing_but_itself(view: StudyView) -> None:
    page = Page(html(report(view)))
    assert not page.names() & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        refers = [of for name, of in attributes.items() if name in ("src", "href", "action", "data", "srcset")]
        assert all(of and of.startswith("#") for of in refers), (tag, attributes)
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in html(report(view))
    assert "@import" not in html(report(view))


def test_every_chart_has_words_for_who_cannot_see_it_and_a_table_behind_it(view: StudyView) -> None:
    for each in report(view).sections:
        kinds = [type(block).__name__ for block in each.blocks]
        for i, kind in enumerate(kinds):
            if kind in ("Forest", "Curves", "Bars"):
                assert kinds[i + 1] == "Table", f"{each.title}: no table after {each.blocks[i]}"
    pictures = [attributes for tag, attributes in Page(html(report(view))).tags if tag == "svg"]
    assert pictures
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 20 for a in pictures)


def test_every_figure_has_its_sample_size(view: StudyView) -> None:
    charts = [block for each in report(view).sections for block in each.blocks if isinstance(block, Forest)]
    assert len(charts) >= 4
    assert all(any(word in mark.note for word in ("pair", "candidate")) for chart in charts for mark in chart.marks)


def test_a_simulated_study_says_so_before_anything_else(view: StudyView) -> None:
    text = html(report(replace(view, simulated=True)))
    assert text.index(SIMULATED) < text.index("Is speculation worth it here?")
    assert SIMULATED not in html(report(view))


def test_a_models_curve_stands_beside_the_measured_points() -> None:
    view = study_view(reference())
    assert set(view.predicted) == set(view.shown)
    (expected,) = view.predicted.values()
    assert [each.concurrency for each in expected] == [1, 3, 8], "the levels, and one between"
    assert all(each.low < each.ratio < each.high for each in expected)
    wide = [each.high / each.low for each in expected]
    assert wide[1] > max(wide[0], wide[2]), "it is least sure where nothing was measured"
    text = markdown(report(view))
    assert f"{percent(expected[0].ratio)} (95 % interval {percent(expected[0].low)}" in text
    assert "model of" in html(report(view))


def test_without_enough_measured_there_is_no_model(tmp_path: Path) -> None:
    view = study_view(study(tmp_path).data())
    assert view.predicted == {}
    assert "The model expects" not in markdown(report(view))


def beyond(chart: Forest | Curves | Scatter) -> list[str]:
    """The hints of the marks that say that something is cut."""
    return re.findall(r'<polygon [^>]*class="beyond [^"]*"[^>]*><title>([^<]*)</title>', draw(chart))


def test_an_interval_that_runs_off_the_axis_is_cut_with_a_mark_and_its_figures_stay() -> None:
    within = Mark("a", 1.1, 0.9, 1.3)
    both = Mark("b", 1.2, 0.01, 90.0)
    assert beyond(Forest("t", (within,))) == []
    hints = beyond(Forest("t", (within, both)))
    assert len(hints) == 2
    assert all("to +8900.0 %" in hint and "beyond the axis" in hint for hint in hints)
    points = (Point(1, 1.1, 0.9, 1.3), Point(8, 1.2, 0.9, 90.0))
    assert len(beyond(Curves("t", "x", (Curve("c", points),)))) == 1
    rates = (Point(10, 100.0, 90.0, 110.0), Point(20, 120.0, 0.1, 130.0))
    assert len(beyond(Scatter("t", "ms", "tokens", (Curve("c", rates),)))) == 1
    for chart in (Forest("t", (within, both)), Curves("t", "x", (Curve("c", points),))):
        numbers = [float(x) for x in re.findall(r' (?:x1|x2|cx)="([-\d.]+)"', draw(chart))]
        assert all(0 <= x <= WIDE for x in numbers)


TEXT = st.text(
    st.one_of(st.sampled_from("<>&\"'`|*_[]()#-+=.\\~!:{}% \n\t1aé😀\u202e\x00"), st.characters()), max_size=30
)


def everything(text: str) -> Document:
    """A document with this text in every place that can hold one."""
    mark = Mark(text, 1.1, 1.0, 1.2, text, dots=(1.0, 1.2))
    blocks = [
        Paragraph(line(text)),
        Paragraph(line(strong(text), " ", code(text)), "verdict"),
        Heading(line(text)),
        Bullets((line(text), line(code(text)))),
        Forest(text, (mark,)),
        Curves(text, text, (Curve(text, (Point(1, 1.1, 1.0, 1.2), Point(8, 0.9))),)),
        Bars(text, (text, "b"), (Bar(text, (1.0, 2.0), text),), text),
        table([text, "b"], [[text, code(text)], ["", strong(text)]], "lr", text),
        Excerpt(text),
    ]
    return Document(line(text), (line(text),), (text,), (section(text, text, blocks), section("b", "c", [])))


@given(TEXT)
def test_no_text_becomes_markup_in_the_page(text: str) -> None:
    harmless, page = Page(html(everything("text"))), Page(html(everything(text)))
    assert page.names() <= harmless.names() | {"title"}
    drawn = {"svg", "line", "circle", "polyline", "polygon", "rect", "text", "title", "span"}
    outside = [[tag for tag, _ in one.tags if tag not in drawn] for one in (page, harmless)]
    assert not plain(line(text)) or outside[0] == outside[1], "only the charts' own lines depend on how long a text is"
    known = {tag: {name for t, told in harmless.tags if t == tag for name in told} for tag in harmless.names()}
    for tag, attributes in page.tags:
        assert set(attributes) <= known.get(tag, set()), (tag, attributes)
    shown = " ".join("".join(page.text).split())
    assert " ".join(printable(text).split()) in shown


@given(TEXT)
def test_no_text_becomes_markup_in_the_markdown(text: str) -> None:
    parser = MarkdownIt("commonmark").enable("table")

    def shape(document: Document) -> list[str]:
        inline = ("code_inline", "strong_open", "strong_close", "text", "softbreak", "text_special")
        found = []
        for token in parser.parse(markdown(document)):
            found.append(token.type)
            for child in token.children or []:
                assert child.type in inline, (child.type, child.content)
        return found

    if plain(line(text)) and printable(text) == text:
        assert shape(everything(text)) == shape(everything("text"))


def test_a_failures_message_is_text_however_it_looks(view: StudyView) -> None:
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    failure = Failure("startup_crash", "ready", hostile, evidence=hostile * 3)
    text = html(report(replace(view, failures=(FailureView("abc", failure, (1,), hostile),), model=hostile)))
    assert not Page(text).names() & {"script", "img"}


def test_the_command_writes_both_twins_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = ["--storage", f"sqlite:///{Path(__file__).parents[3] / 'studies/reference/quickstart/study.db'}"]
    done = CliRunner().invoke(app, ["report", "quickstart", *storage, "--html", "a/r.html", "--output", "a/r.md"])
    assert done.exit_code == 0, done.output
    assert done.output.split() == ["a/r.md", "a/r.html"]
    assert (tmp_path / "a/r.html").read_text().startswith("<!doctype html>")
    (tmp_path / "file").write_text("x")
    refused = CliRunner().invoke(app, ["report", "quickstart", *storage, "--html", "file/r.html", "--output", "b/r.md"])
    assert refused.exit_code == 2
    assert "Nothing was written" in refused.output
    assert not (tmp_path / "b/r.md").exists()
    same = CliRunner().invoke(app, ["report", "quickstart", *storage, "--html", "r", "--output", "r"])
    assert same.exit_code == 2
    assert not (tmp_path / "r").exists()
