"""Why? What speculation yields per step, and where the time of a step goes."""

from __future__ import annotations

from tuner.report.document import (
    NONE,
    Bar,
    Bars,
    Block,
    Curve,
    Curves,
    Heading,
    Paragraph,
    Point,
    Section,
    Words,
    code,
    line,
    section,
    table,
)
from tuner.report.evidence import Acceptance, RoundTime
from tuner.report.view import StudyView
from tuner.report.words import count, estimate, labels, number, share

PARTS = ("draft", "verify", "draft cache", "other")
"""A round's parts as a reader calls them, in the order of `evidence.PARTS`."""


def why(view: StudyView) -> Section:
    """Acceptance by depth, and a round's time by what it is spent on, where the engine's counters tell."""
    return section("Causes", "Why?", [Paragraph(line(_lead(view)), "lead"), *_acceptance(view), *_time(view)])


def _lead(view: StudyView) -> str:
    told = [each for each in view.acceptance if each.accept_length is not None]
    if not told:
        return "The server's counters tell nothing about speculation, or there was none."
    words = [
        f"{each.accept_length.value:.2f} tokens at concurrency {each.concurrency}"
        for each in told[:4]
        if each.accept_length
    ]
    return (
        f"A step that verifies drafts yields {', '.join(words[:4])}, where a plain step yields 1. "
        "Speculation pays where a step costs less than that in time."
    )


def _acceptance(view: StudyView) -> list[Block | None]:
    if not view.acceptance:
        return []
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    curves = tuple(
        Curve(
            f"at {each.concurrency}: {names[each.candidate_id]}",
            tuple(Point(depth, s.value, s.low, s.high) for depth, s in enumerate(each.at_depth, start=1)),
        )
        for each in view.acceptance
        if each.at_depth
    )
    rows = [_accepted(each) for each in view.acceptance]
    return [
        Heading(line("Acceptance by depth")),
        Curves("Share of verify steps that keep at least so many drafts", "drafts", curves, "share")
        if curves
        else None,
        table(
            ["Candidate", "C", "Tokens per step", "Kept at least d drafts", "Steps"],
            rows,
            "lrllr",
            "Acceptance. Tokens per step: drafts kept, and one, per request and verify step.",
        ),
    ]


def _accepted(each: Acceptance) -> list[Words]:
    if not each.steps:
        return [code(each.candidate_id), str(each.concurrency), "no speculation at this level", NONE, "0"]
    depths = "; ".join(f"{depth}: {share(found)}" for depth, found in enumerate(each.at_depth, start=1))
    length = estimate(each.accept_length) if each.accept_length else NONE
    return [code(each.candidate_id), str(each.concurrency), length, depths or "not told", str(each.steps)]


def _time(view: StudyView) -> list[Block | None]:
    if not view.round_times:
        text = (
            "Where the time of a step goes is not known: this engine, or this study's version of it, does not count it."
        )
        return [Heading(line("Time of a step")), Paragraph(line(text))] if view.acceptance else []
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    bars = tuple(
        Bar(
            f"at {each.concurrency}: {names[each.candidate_id]}",
            tuple(part.value for part in each.parts_ms),
            f"{each.tokens.value:.2f} tokens",
        )
        for each in view.round_times
    )
    return [
        Heading(line("Time of a step")),
        Bars("Milliseconds of one step of all requests, and the tokens that it yields", PARTS, bars, "ms"),
        table(
            ["Candidate", "C", "Draft ms", "Verify ms", "Draft cache ms", "Other ms", "Tokens", "Seen over"],
            [_spent(each, view.baseline_id) for each in view.round_times],
            "lrrrrrrr",
            "Means over launches. Draft cache: keeping the drafter's own in step. Tokens: of all requests in one step.",
        ),
    ]


def _spent(each: RoundTime, baseline: str) -> list[Words]:
    name: Words = "baseline" if each.candidate_id == baseline else code(each.candidate_id)
    parts = [_milliseconds(part.value, part.low, part.high) for part in each.parts_ms]
    return [name, str(each.concurrency), *parts, number(each.tokens.value, 2), count(each.tokens.n, "block")]


def _milliseconds(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"
