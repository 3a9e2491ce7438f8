"""Two studies side by side: what differs in what they measured, their decisions, and what both measured alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tuner.judge.intervals import ALPHA, MIN_PAIRS
from tuner.judge.recommend import percent
from tuner.judge.text import settings_line, verdict_phrase
from tuner.records import Choice
from tuner.report.content import SIMULATED
from tuner.report.document import (
    NONE,
    Block,
    Document,
    Forest,
    Line,
    Mark,
    Paragraph,
    Section,
    Words,
    code,
    line,
    section,
    strong,
    table,
)
from tuner.report.sections.leaderboard import change_phrase
from tuner.report.view import StudyView
from tuner.report.words import count, number, value


@dataclass(frozen=True)
class Difference:
    """By how much one candidate gains more in the second study than in the first, at one level: a ratio of speed-ups.

    The interval is Welch's at 95 %, over the pairs of both, from four of each on.
    """

    candidate_id: str
    concurrency: int
    ratio: float
    low: float | None
    high: float | None
    pairs: tuple[int, int]


def comparison(first: StudyView, second: StudyView) -> Document:
    """The two studies as one document. Every figure is of one of them, but for the differences of speed-ups."""
    if first.name == second.name:
        first, second = replace(first, name=f"{first.name} (first)"), replace(second, name=f"{second.name} (second)")
    facts = tuple(f"{view.name}: {view.model}, {view.engine} {view.engine_version}" for view in (first, second))
    sections = (_decisions(first, second), _circumstances(first, second), _candidates(first, second))
    return Document(line(f"{first.name} beside {second.name}"), tuple(_warnings(first, second)), facts, sections)


def _warnings(*views: StudyView) -> Iterator[Line]:
    for view in views:
        if view.simulated:
            yield line(strong(f"{view.name}: {SIMULATED}"))
        if view.state != "done":
            yield line(strong(f"{view.name} is not done ({view.state})."), " This is what its records say so far.")


def _decisions(first: StudyView, second: StudyView) -> Section:
    rows: list[list[Words]] = []
    marks = []
    levels: list[int | None] = [None, *sorted({*first.levels, *second.levels})]
    for level in levels:
        for view in (first, second):
            choice = _choice(view, level)
            where = "overall" if level is None else str(level)
            if choice is None:
                rows.append([where, code(view.name), "not measured", NONE, NONE, NONE])
                continue
            best = choice.winner or choice.finalist
            rows.append(
                [
                    where,
                    code(view.name),
                    "winner" if choice.winner else "keep the baseline",
                    verdict_phrase(choice.verdict) if choice.verdict else NONE,
                    code(settings_line(best.settings)) if best else NONE,
                    number(choice.baseline_tokens_per_s),
                ]
            )
            if choice.verdict is not None and choice.verdict.speedup is not None:
                label = f"{'overall' if level is None else f'at {level}'}: {view.name}"
                v = choice.verdict
                kept = "winner" if choice.winner else "best finalist"
                marks.append(Mark(label, v.speedup, v.low, v.high, f"{kept}, {count(v.n, 'pair')}"))
    a, b = first.recommendation.overall.winner, second.recommendation.overall.winner
    blocks: list[Block | None] = [
        Paragraph(line(_same_decision(first, second, a.id if a else None, b.id if b else None)), "verdict"),
        Forest("The best candidate of each study against its own baseline", tuple(marks)) if marks else None,
        table(
            ["C", "Study", "Decision", "Best candidate", "Its settings", "Baseline tok/s"],
            rows,
            "rllllr",
            "Both decisions at every level.",
        ),
    ]
    return section("Decisions", "Do they decide alike?", blocks)


def _same_decision(first: StudyView, second: StudyView, a: str | None, b: str | None) -> str:
    if a == b:
        return "Both keep the baseline overall" if a is None else "Both have the same winner overall"
    if a is None or b is None:
        kept, won = (first, second) if a is None else (second, first)
        return f"{won.name} has a winner overall, {kept.name} keeps the baseline"
    return "They have different winners overall"


def _choice(view: StudyView, level: int | None) -> Choice | None:
    found = view.recommendation
    choices = (found.overall, *found.per_concurrency)
    return next((choice for choice in choices if choice.concurrency == level), None)


def _circumstances(first: StudyView, second: StudyView) -> Section:
    told = [(name, a, b) for (name, a), (_, b) in zip(_facts(first), _facts(second), strict=True) if a != b]
    if not told:
        text = "Engine, model, machine, load and method are the same, so figures may be compared as they are."
        return section("Circumstances", "What differs?", [Paragraph(line(text), "lead")])
    text = (
        "Where engine, model, machine or load differ, compare changes against each study's own baseline, and not "
        "tokens per second."
    )
    rows = [[name, a, b] for name, a, b in told]
    return section(
        "Circumstances",
        "What differs?",
        [
            Paragraph(line(text), "lead"),
            table(["", first.name, second.name], rows, "lll", "What differs between them."),
        ],
    )


def _facts(view: StudyView) -> list[tuple[str, str]]:
    machine = view.machine
    return [
        ("Engine", f"{view.engine} {view.engine_version}"),
        ("Model", view.model),
        ("Baseline", settings_line(view.candidate(view.baseline_id).settings)),
        ("Fixed arguments", " ".join(f"{name}={value(of)}" for name, of in sorted(view.fixed_args.items()))),
        ("Environment", " ".join(f"{name}={of}" for name, of in sorted(view.fixed_env.items()))),
        ("Processor", str(machine.get("cpu", "unknown"))),
        ("Usable cores", str(machine.get("cores", "unknown"))),
        ("GPUs", "; ".join(machine.get("gpus") or []) or "none"),
        ("Prompts", view.prompts),
        ("Most tokens", str(view.max_tokens)),
        ("Temperature", f"{view.temperature:g}"),
        ("Load", ", ".join(f"{level} ({100 * view.level_weights[level]:.0f} %)" for level in view.levels)),
        ("Profile", view.profile),
        ("Objective", view.objective),
        ("Simulated", "yes" if view.simulated else "no"),
    ]


def differences(first: StudyView, second: StudyView) -> tuple[Difference, ...]:
    """Of every candidate and level that both have confirmed in pairs."""
    mine = {(e.candidate_id, e.concurrency): e.ratios for e in first.evidence if e.concurrency is not None}
    other = {(e.candidate_id, e.concurrency): e.ratios for e in second.evidence if e.concurrency is not None}
    return tuple(
        _difference(candidate_id, level, mine[candidate_id, level], other[candidate_id, level])
        for candidate_id, level in mine
        if level is not None and (candidate_id, level) in other
    )


def _difference(candidate_id: str, level: int, first: Sequence[float], second: Sequence[float]) -> Difference:
    from scipy import stats

    a, b = [math.log(r) for r in first], [math.log(r) for r in second]
    ratio = math.exp(sum(b) / len(b) - sum(a) / len(a))
    low = high = None
    if min(len(a), len(b)) >= MIN_PAIRS and (len({*a}) > 1 or len({*b}) > 1):
        found = stats.ttest_ind(b, a, equal_var=False).confidence_interval(1 - ALPHA)
        low, high = math.exp(found.low), math.exp(found.high)
    return Difference(candidate_id, level, ratio, low, high, (len(a), len(b)))


def _candidates(first: StudyView, second: StudyView) -> Section:
    both = [c.id for c in first.candidates if c.id in {other.id for other in second.candidates}]
    title, question = "Candidates", "What did both measure?"
    if not both:
        text = "No candidate of the one is in the other: settings that are equal have equal ids in every study."
        return section(title, question, [Paragraph(line(text), "lead")])
    apart = {(d.candidate_id, d.concurrency): d for d in differences(first, second)}
    rows: list[list[Words]] = []
    for candidate_id in both:
        mine, other = first.candidate(candidate_id), second.candidate(candidate_id)
        for i, level in enumerate(sorted({*first.levels} & {*second.levels})):
            a = next(row for row in mine.rows if row.concurrency == level)
            b = next(row for row in other.rows if row.concurrency == level)
            name = line(code(candidate_id), " ", code(settings_line(mine.settings))) if i == 0 else ""
            rows.append(
                [
                    name,
                    str(level),
                    number(a.tokens_per_s),
                    change_phrase(mine, a),
                    number(b.tokens_per_s),
                    change_phrase(other, b),
                    _apart(apart.get((candidate_id, level))),
                ]
            )
    head = ["Candidate", "C", f"{first.name} tok/s", "Δ to its baseline", f"{second.name} tok/s", "Δ to its baseline"]
    note = (
        "Apart: how the candidate's speed-up in the second study compares with that in the first, where both have "
        "confirmed it; Welch's 95 % interval over the pairs of both."
    )
    blocks: list[Block] = [
        table([*head, "Apart"], rows, "lrrlrll", "What both measured."),
        Paragraph(line(note), "note"),
    ]
    return section(title, question, blocks)


def _apart(found: Difference | None) -> str:
    if found is None:
        return NONE
    pairs = f"{found.pairs[0]} and {found.pairs[1]} pairs"
    if found.low is None or found.high is None:
        return f"{percent(found.ratio)} ({pairs}, no interval)"
    return f"{percent(found.ratio)} (95 % interval {percent(found.low)} to {percent(found.high)}, {pairs})"
