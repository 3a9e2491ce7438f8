"""Is speculation worth it here, and at which load?"""

from __future__ import annotations

from tuner.judge.text import settings_line, verdict_phrase
from tuner.records import Choice
from tuner.report.document import (
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
from tuner.report.view import CandidateView, StudyView
from tuner.report.words import count, labels, number

MOST_CURVES = 4


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
    curves = []
    for candidate in of_interest(view):
        points = []
        for row in candidate.rows:
            if row.change is not None:
                low, high = (row.verdict.low, row.verdict.high) if row.verdict else (None, None)
                points.append(Point(row.concurrency, row.change, low, high))
        firm = all(row.role == "confirm" for row in candidate.rows)
        if points:
            curves.append(Curve(names[candidate.id], tuple(points), firm))
        if candidate.id in view.predicted:
            told = tuple(Point(level, ratio) for level, ratio in view.predicted[candidate.id].items())
            curves.append(Curve(f"model of {names[candidate.id]}", told, predicted=True))
    return (
        Curves("Change of throughput by concurrent requests", "concurrent requests", tuple(curves)) if curves else None
    )


def _by_load(view: StudyView) -> Block:
    from tuner.report.sections.leaderboard import change_phrase

    rows = []
    for candidate in of_interest(view):
        for i, row in enumerate(candidate.rows):
            cells = [code(candidate.id) if i == 0 else "", str(row.concurrency), change_phrase(candidate, row)]
            if view.predicted:
                ratio = view.predicted.get(candidate.id, {}).get(row.concurrency)
                cells.append(number(100 * (ratio - 1)) + " %" if ratio is not None else "–")
            rows.append(cells)
    head = ["Candidate", "C", "Change of throughput", *(["The model expects"] if view.predicted else [])]
    return table(head, rows, "lrlr" if view.predicted else "lrl", "The points of the chart.")
