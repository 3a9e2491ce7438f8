"""What does it cost in latency?"""

from __future__ import annotations

from tuner.judge.recommend import percent
from tuner.report.document import Block, Forest, Heading, Mark, Paragraph, Section, code, line, section, table
from tuner.report.evidence import LatencyChange
from tuner.report.view import StudyView
from tuner.report.words import change, count, labels, number


def latency(view: StudyView) -> Section:
    """Every latency of the candidates looked at, beside the baseline's in the same pairs."""
    title, question = "Latency", "What does it cost in latency?"
    if not view.latencies:
        why = "A simulated block has no latencies." if view.simulated else "No pair of blocks tells a latency."
        return section(title, question, [Paragraph(line(why), "lead")])
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    blocks: list[Block | None] = [Paragraph(line(_lead(view)), "lead")]
    for candidate_id in dict.fromkeys(each.candidate_id for each in view.latencies):
        mine = [each for each in view.latencies if each.candidate_id == candidate_id]
        blocks += [
            Heading(line(code(candidate_id), " ", names[candidate_id])),
            Forest("Latency against the baseline; to the left is faster", tuple(map(_mark, mine)), "less"),
            table(
                ["C", "Latency", "Baseline ms", "Candidate ms", "Change", "Requests"],
                [_row(each) for each in mine],
                "rlrrlr",
                "Means over the blocks of the pairs. Requests: those behind the figure, baseline and candidate.",
            ),
        ]
    note = (
        "Intervals are over pairs of launches, at 95 %, and not corrected for how many there are. A p99 needs 100 "
        "requests in every block. Latencies are those of a closed loop: a server that stalls is asked less."
    )
    return section(title, question, [*blocks, Paragraph(line(note), "note")])


def _lead(view: StudyView) -> str:
    first = view.latencies[0].candidate_id
    whole = [e for e in view.latencies if e.candidate_id == first and e.name == "whole request, average"]
    if not whole:
        return "Each latency beside the baseline's in the same pairs."
    told = "; ".join(f"at {each.concurrency}, {change(each.change)}" for each in whole)
    return f"The average time of a whole request changes as follows: {told}."


def _mark(each: LatencyChange) -> Mark:
    found = each.change
    note = f"{number(each.baseline_ms)} → {number(each.candidate_ms)} ms, {count(found.n, 'pair')}"
    return Mark(f"{each.name}, at {each.concurrency}", found.value, found.low, found.high, note)


def _row(each: LatencyChange) -> list[str]:
    return [
        str(each.concurrency),
        each.name,
        number(each.baseline_ms),
        number(each.candidate_ms),
        change(each.change) if each.change.n else percent(each.change.value),
        f"{each.baseline_requests} and {each.requests}",
    ]
