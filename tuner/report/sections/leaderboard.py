"""Which settings? Every candidate at every level."""

from __future__ import annotations

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line, verdict_phrase
from tuner.report.document import (
    NONE,
    Block,
    Bullets,
    Forest,
    Heading,
    Line,
    Mark,
    Paragraph,
    Section,
    code,
    line,
    section,
    strong,
    table,
)
from tuner.report.view import CandidateView, LevelRow, StudyView
from tuner.report.words import count, labels, number, seconds, short

CELL = 140
"""Characters of a failure's message in a table; the whole of it stands in its own section."""

MOST_MARKS = 20

HEAD = ["Candidate", "C", "tok/s", "Per request", "Average", "p50", "p99", "Ok", "Δ to baseline"]


def leaderboard(view: StudyView) -> Section:
    """Every candidate, the baseline and the winner first, then by speed."""
    unlike = ""
    if len(view.places) > 1:
        unlike = (
            " Several places have measured: their tokens per second and latencies cannot be held against one another, "
            "the changes can, for each is against the baseline of its own place."
        )
    explained = Paragraph(
        line(
            "C: requests under way at once. Per request: tokens per second of one stream. Latency: of whole requests, "
            "in seconds. Ok: requests that ended well. Δ: change of throughput against the baseline in paired blocks; "
            "an interval is given only where the decision rests on one, and figures of the search are chosen for their "
            f"luck.{unlike}"
        ),
        "note",
    )
    rows = []
    for candidate in view.candidates:
        for i, row in enumerate(candidate.rows):
            name = line(code(candidate.id), " ", standing(candidate)) if i == 0 else ""
            rows.append([name, str(row.concurrency), *_measured(row), change_phrase(candidate, row)])
    blocks: list[Block | None] = [explained, _forest(view), table(HEAD, rows, "lrrrrrrrl", "Every candidate.")]
    left = [candidate for candidate in view.candidates if candidate.standing == "out of the race"]
    if left:
        items = tuple(line(code(c.id), " ", code(settings_line(c.settings)), f": {c.why}") for c in left)
        blocks += [Heading(line("Measured in short, for they could not win")), Bullets(items)]
    return section("Leaderboard", "Which settings?", blocks)


def standing(candidate: CandidateView) -> Line:
    """What became of a candidate, and where it wins."""
    wins = f", wins at C {', '.join(map(str, candidate.wins_at))}" if candidate.wins_at else ""
    name = strong(candidate.standing) if candidate.standing in ("baseline", "winner") else candidate.standing
    return line(name, wins)


def change_phrase(candidate: CandidateView, row: LevelRow) -> str:
    """The change of throughput with all that can be said of it, or why there is none."""
    if row.tokens_per_s is None:
        return short(candidate.why, CELL) or ("no valid block" if row.attempts else "not measured")
    if candidate.standing == "baseline":
        return count(row.blocks, "block")
    if row.verdict is not None:
        return f"{verdict_phrase(row.verdict)}: {row.verdict.outcome}"
    if row.change is None:
        return "no valid block of the baseline beside it"
    where = {"look": "short look", "screen": "search"}.get(row.role or "", "confirmation")
    return f"{percent(row.change)} ({where}, {count(row.pairs, 'pair')})"


def _measured(row: LevelRow) -> list[str]:
    total = row.requests + row.failed_requests
    return [
        number(row.tokens_per_s),
        number(row.per_request_tokens_per_s),
        seconds(row.latency.mean),
        seconds(row.latency.p50),
        seconds(row.latency.p99),
        f"{row.requests}/{total}" if total else NONE,
    ]


def _forest(view: StudyView) -> Forest | None:
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    overall = {e.candidate_id: e.verdict for e in view.evidence if e.concurrency is None or len(view.levels) == 1}
    marks = []
    for candidate in view.candidates:
        if candidate.overall is None or candidate.id == view.baseline_id:
            continue
        verdict = overall.get(candidate.id)
        low, high = (verdict.low, verdict.high) if verdict else (None, None)
        firm = all(row.role == "confirm" for row in candidate.rows)
        pairs = min(row.pairs for row in candidate.rows)
        note = f"{candidate.standing}, {count(pairs, 'pair')}"
        marks.append(Mark(names[candidate.id], candidate.overall, low, high, note, firm))
    if not marks:
        return None
    left = f"; the {MOST_MARKS} first of {len(marks)}" if len(marks) > MOST_MARKS else ""
    return Forest(f"All candidates, all levels as the objective weighs them{left}", tuple(marks[:MOST_MARKS]))
