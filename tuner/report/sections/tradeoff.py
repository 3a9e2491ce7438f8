"""Which candidates are worth choosing between, where a study was asked for them (`objective: pareto`)."""

from __future__ import annotations

from tuner.judge.recommend import percent
from tuner.report.document import (
    NONE,
    Block,
    Curve,
    Paragraph,
    Point,
    Scatter,
    Section,
    Words,
    code,
    line,
    section,
    strong,
    table,
)
from tuner.report.view import CandidateView, LevelRow, StudyView
from tuner.report.words import count, labels, number


def tradeoff(view: StudyView) -> Section | None:
    """The Pareto set over the levels, drawn as throughput against latency; None where the objective is another one."""
    if view.pareto is None:
        return None
    title, question = "Pareto set", "Which are worth choosing between?"
    known = [c for c in view.candidates if c.id == view.baseline_id or c.id in view.confirmed]
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    inside = [c for c in known if c.id in view.pareto]
    words: list[Words] = [count(len(inside), "candidate"), " that no other is better than at every level: "]
    for i, candidate in enumerate(inside):
        words += [", " if i else "", code(candidate.id), " (the baseline)" * (candidate.id == view.baseline_id)]
    blocks: list[Block | None] = [Paragraph(line(*words, "."), "lead")]
    ordered = [*inside, *(c for c in known if c not in inside)]
    requests = all(row.latency.mean is not None for c in known for row in c.rows if row.tokens_per_s)
    curves = [
        Curve(names[c.id], tuple(_point(view, c, row, requests) for row in c.rows if row.tokens_per_s), c in inside)
        for c in ordered
    ]
    x_name = "mean time of a whole request, ms" if requests else "time per output token of one stream, ms"
    if any(curve.points for curve in curves):
        blocks.append(Scatter("Throughput against latency", x_name, "tokens per second", tuple(curves)))
    rows: list[list[Words]] = []
    for candidate in ordered:
        for i, row in enumerate(row for row in candidate.rows if row.tokens_per_s):
            standing = strong("in the set") if candidate in inside else "not in it"
            first: list[Words] = [code(candidate.id), standing] if i == 0 else ["", ""]
            rows.append([*first, *_row(view, candidate, row, requests)])
    head = ["Candidate", "Standing", "C", "tok/s", "Interval", "ms", "Change", "Pairs"]
    blocks.append(table(head, rows, "llrrlrlr", f"The points of the chart; ms: {x_name.removesuffix(', ms')}."))
    note = (
        "One is left out of the set only where another is at least as fast at every level, and at one of them the "
        "intervals do not meet: what lies within noise leaves nobody out. Every point is a level of concurrency; its "
        "interval is that of the change over confirmation pairs, on the baseline's mean. Export one with "
    )
    return section(
        title,
        question,
        [*blocks, Paragraph(line(note, code(f"tuner export {view.name} --candidate ID"), "."), "note")],
    )


def _interval(view: StudyView, candidate: CandidateView, row: LevelRow) -> tuple[float, float] | None:
    """Of tokens per second."""
    found = view.confirmed.get(candidate.id, {}).get(row.concurrency)
    base = next((r.tokens_per_s for r in view.candidate(view.baseline_id).rows if r.concurrency == row.concurrency), 0)
    if found is None or found.low is None or found.high is None or not base:
        return None
    return base * found.low, base * found.high


def _x(row: LevelRow, requests: bool) -> float:
    if requests and row.latency.mean is not None:
        return row.latency.mean
    return 1000 * row.concurrency / (row.tokens_per_s or 1.0)


def _point(view: StudyView, candidate: CandidateView, row: LevelRow, requests: bool) -> Point:
    low, high = _interval(view, candidate, row) or (None, None)
    return Point(_x(row, requests), row.tokens_per_s or 0.0, low, high)


def _row(view: StudyView, candidate: CandidateView, row: LevelRow, requests: bool) -> list[Words]:
    interval = _interval(view, candidate, row)
    found = view.confirmed.get(candidate.id, {}).get(row.concurrency)
    change = percent(found.speedup) if found else NONE
    if found is not None and found.low is not None and found.high is not None:
        change += f" ({percent(found.low)} to {percent(found.high)})"
    return [
        str(row.concurrency),
        number(row.tokens_per_s),
        f"{number(interval[0])} to {number(interval[1])}" if interval else NONE,
        number(_x(row, requests)),
        change,
        str(found.n) if found else NONE,
    ]
