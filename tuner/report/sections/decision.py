"""Is speculation worth it here, and at which load?"""

from __future__ import annotations

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line, verdict_phrase
from tuner.records import Choice
from tuner.report.document import (
    NONE,
    Block,
    Curve,
    Curves,
    Forest,
    Heading,
    Line,
    Mark,
    Paragraph,
    Point,
    Section,
    code,
    line,
    section,
    table,
)
from tuner.report.model import Expected
from tuner.report.sections.leaderboard import change_phrase
from tuner.report.view import CandidateView, StudyView
from tuner.report.words import count, labels, number

MOST_CURVES = 4

_MODEL = (
    "The model is the search's: a formula of what a step costs and what drafts yield, with a process for what it does "
    "not explain, after every valid block of the study. It fills in between the levels, and decides nothing. Its "
    "intervals take blocks to be as alike as on a quiet machine: where it is far from confirmed points, trust those."
)


def decision(view: StudyView) -> Section:
    """The answer, its figures at every level, and the change over the levels of load."""
    found = view.recommendation
    blocks: list[Block | None] = [
        Paragraph(line("Overall: ", _choice(found.overall)), "verdict"),
        Paragraph(line(f"Because {found.overall.why}.")),
    ]
    if found.overall.winner is not None:
        blocks.append(Paragraph(line("Settings: ", code(settings_line(found.overall.winner.settings)))))
    elif found.overall.verdict is not None:
        best = found.overall.verdict
        blocks.append(Paragraph(line("Best finalist: ", code(best.candidate_id), f", {verdict_phrase(best)}.")))
    blocks += [_forest(view), _levels(view)]
    if len(view.levels) > 1:
        curves = _curves(view)
        if curves is not None:
            blocks += [Heading(line("At which load?")), Paragraph(line(_where(view))), curves, _by_load(view)]
            if view.predicted:
                blocks.append(Paragraph(line(_MODEL), "note"))
    return section("Decision", "Is speculation worth it here?", blocks)


def _choice(choice: Choice) -> Line:
    if choice.winner is None or choice.verdict is None:
        return line("no winner: keep the baseline")
    return line("winner ", code(choice.winner.id), f": {verdict_phrase(choice.verdict)}")


def _levels(view: StudyView) -> Block:
    rows = [
        (
            str(choice.concurrency),
            _choice(choice),
            number(choice.baseline_tokens_per_s),
            number(choice.winner_tokens_per_s),
            code(settings_line(choice.winner.settings)) if choice.winner is not None else "baseline",
            choice.why,
        )
        for choice in view.recommendation.per_concurrency
    ]
    head = ["C", "Decision", "Baseline tok/s", "Winner tok/s", "Settings", "Because"]
    return table(head, rows, "rlrrll", "The decision at every level of concurrency.")


def _forest(view: StudyView) -> Forest | None:
    marks = []
    for choice in (view.recommendation.overall, *view.recommendation.per_concurrency):
        verdict = choice.verdict
        if verdict is None or verdict.speedup is None or (choice.concurrency is None and len(view.levels) == 1):
            continue
        where = "Overall" if choice.concurrency is None else f"{count(choice.concurrency, 'request')} at once"
        note = f"{'winner' if choice.winner else 'best finalist'}, {count(verdict.n, 'pair')}"
        marks.append(Mark(where, verdict.speedup, verdict.low, verdict.high, note))
    return Forest("Throughput of the best candidate against the baseline", tuple(marks)) if marks else None


def _where(view: StudyView) -> str:
    wins = [str(c.concurrency) for c in view.recommendation.per_concurrency if c.winner is not None]
    keeps = [str(c.concurrency) for c in view.recommendation.per_concurrency if c.winner is None]
    if not wins:
        return "At no level of concurrency has a gain been shown."
    if not keeps:
        return "A gain has been shown at every level of concurrency."
    return f"A gain has been shown at concurrency {_listed(wins)}, and none at {_listed(keeps)}."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def of_interest(view: StudyView) -> list[CandidateView]:
    """The candidates that curves are drawn for: those looked at closely, then the fastest of the search."""
    known = {candidate.id: candidate for candidate in view.candidates}
    first = [known[candidate_id] for candidate_id in view.shown if candidate_id in known]
    rest = [c for c in view.candidates if c.overall is not None and c.id not in (*view.shown, view.baseline_id)]
    return (first + rest)[:MOST_CURVES]


def _curves(view: StudyView) -> Curves | None:
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    curves: list[Curve] = []
    models: list[Curve] = []
    for i, candidate in enumerate(of_interest(view)):
        points = []
        for row in candidate.rows:
            if row.change is not None:
                low, high = (row.verdict.low, row.verdict.high) if row.verdict else (None, None)
                points.append(Point(row.concurrency, row.change, low, high))
        firm = all(row.role == "confirm" for row in candidate.rows)
        if points:
            curves.append(Curve(names[candidate.id], tuple(points), firm, series=i))
        if candidate.id in view.predicted:
            told = tuple(Point(e.concurrency, e.ratio, e.low, e.high) for e in view.predicted[candidate.id])
            models.append(Curve(f"model of {names[candidate.id]}", told, predicted=True, series=i))
    if not curves:
        return None
    return Curves("Change of throughput by concurrent requests", "concurrent requests", (*curves, *models))


def _by_load(view: StudyView) -> Block:
    """The points of the chart. Between the measured levels there is only what the model expects."""
    rows = []
    for candidate in of_interest(view):
        measured = {row.concurrency: change_phrase(candidate, row) for row in candidate.rows}
        told = {each.concurrency: each for each in view.predicted.get(candidate.id, ())}
        for i, level in enumerate(sorted({*measured, *told})):
            cells = [code(candidate.id) if i == 0 else "", str(level), measured.get(level, "not measured")]
            if view.predicted:
                cells.append(_expected(told.get(level)))
            rows.append(cells)
    head = ["Candidate", "C", "Change of throughput", *(["The model expects"] if view.predicted else [])]
    return table(head, rows, "lrll" if view.predicted else "lrl", "The points of the chart.")


def _expected(found: Expected | None) -> str:
    if found is None:
        return NONE
    return f"{percent(found.ratio)} (95 % interval {percent(found.low)} to {percent(found.high)})"
