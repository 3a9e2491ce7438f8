"""Does it hang on what is asked?"""

from __future__ import annotations

from tuner.judge.recommend import percent
from tuner.report.document import Block, Heading, Paragraph, Section, code, line, section, table
from tuner.report.view import StudyView
from tuner.report.words import labels, number
from tuner.study.axes import AXES, AxisChange, context_words

LEAST = 20
"""Requests on each side behind a figure that the lead names."""

HEADS = {"kind": "Prompt kind", "context": "Context"}


def traffic(view: StudyView) -> Section | None:
    """Each candidate by prompt kind and by context length; None where blocks do not tell them."""
    if not view.axes:
        return None
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    blocks: list[Block | None] = [Paragraph(line(_lead(view)), "lead")]
    for candidate_id in dict.fromkeys(each.candidate_id for each in view.axes):
        blocks.append(Heading(line(code(candidate_id), " ", names[candidate_id])))
        for axis in AXES:
            mine = [each for each in view.axes if each.candidate_id == candidate_id and each.axis == axis]
            if mine:
                head = ["C", HEADS[axis], "Baseline ms", "Candidate ms", "Change", "Tokens a chunk", "Requests"]
                caption = "Milliseconds per output token of a stream; change: of its speed."
                blocks.append(table(head, [_row(each) for each in mine], "rlrrrrr", caption))
    note = (
        f"All of it at temperature {view.temperature:g}, and context as the server counts a prompt's tokens. Another "
        "temperature is a study of its own; hold two against each other with --compare. No intervals: requests of one "
        "launch are too alike to say how far two lie apart."
    )
    return section("Traffic", "Does it hang on what is asked?", [*blocks, Paragraph(line(note), "note")])


def _lead(view: StudyView) -> str:
    first = view.axes[0].candidate_id
    kinds = [
        each
        for each in view.axes
        if (each.candidate_id, each.axis) == (first, "kind") and min(each.requests, each.baseline_requests) >= LEAST
    ]
    if len({each.name for each in kinds}) < 2:
        return "Each class of requests beside the baseline's in the same pairs."
    worst, *_, best = sorted(kinds, key=lambda each: each.speedup)
    return (
        f"Streams gain most on {best.name} ({percent(best.speedup)} at {best.concurrency}) and least on {worst.name} "
        f"({percent(worst.speedup)} at {worst.concurrency})."
    )


def _row(each: AxisChange) -> list[str]:
    return [
        str(each.concurrency),
        each.name if each.axis == "kind" else context_words(each.name),
        number(each.baseline_ms),
        number(each.candidate_ms),
        percent(each.speedup),
        f"{each.baseline_tokens_per_chunk:.2f} → {each.tokens_per_chunk:.2f}",
        f"{each.baseline_requests} and {each.requests}",
    ]
