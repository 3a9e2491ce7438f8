"""How sure is that?"""

from __future__ import annotations

from tuner.judge.intervals import MIN_PAIRS
from tuner.judge.recommend import percent
from tuner.report.document import NONE, Block, Forest, Mark, Paragraph, Section, Words, code, line, section, table
from tuner.report.evidence import Evidence
from tuner.report.view import StudyView
from tuner.report.words import count, labels


def certainty(view: StudyView) -> Section:
    """Every pair of the confirmation, its interval, and the gain that so many pairs could have shown."""
    if not view.evidence:
        text = (
            "Nothing has been confirmed: the search measures each candidate once, and picks the lucky. "
            f"A decision needs {MIN_PAIRS} pairs over fresh launches at least."
        )
        return section("Certainty", "How sure is that?", [Paragraph(line(text), "lead")])
    names = labels({c.id: c.settings for c in view.candidates}, view.baseline_id)
    marks = tuple(_mark(each, names[each.candidate_id]) for each in view.evidence)
    blocks: list[Block | None] = [
        Paragraph(line(_lead(view)), "lead"),
        Forest("Every pair, its mean and its interval", marks),
        table(
            ["Candidate", "C", "Pairs", "Change", "Interval", "At", "Could have shown", "Outcome"],
            [_row(each) for each in view.evidence],
            "lrlrlrrl",
            "Every finalist's pairs. Change: of throughput, mean over pairs. At: the confidence of the interval.",
        ),
        Paragraph(line(_answers(view)), "note") if view.answers else None,
        Paragraph(
            line(
                "A pair is a launch of the baseline and one of the candidate, neighbours in time, in mirrored order, "
                "on prompts that the search never saw. The launch is what is repeated: its seconds are too alike. "
                "Could have shown: the smallest true gain that so many pairs, as noisy as these, would find four times "
                "in five. Confidences are above 95 % where several claims are made at once."
            ),
            "note",
        ),
    ]
    return section("Certainty", "How sure is that?", blocks)


def _lead(view: StudyView) -> str:
    best = view.recommendation.overall.verdict
    if best is None or best.detectable is None:
        return "Of each finalist, every pair of launches with the baseline:"
    need = f"; {count(best.n, 'pair')}, too few for an interval" if best.low is None else ""
    return (
        f"{count(best.n, 'pair')} of launches with the baseline: a gain of {percent(1 + best.detectable)} overall "
        f"would have been shown four times in five, a smaller one less often{need}."
    )


def _answers(view: StudyView) -> str:
    """What the output-quality gate found, a clause a candidate."""
    found = "; ".join(
        f"{each.candidate_id}: {each.outcome} ({each.why or f'{each.exact} of {each.prompts}'})"
        for each in view.answers.values()
    )
    return f"Answers to the same held-out prompts, held against the baseline's: {found}."


def _mark(each: Evidence, name: str) -> Mark:
    where = "overall" if each.concurrency is None else f"at {each.concurrency}"
    verdict = each.verdict
    value, low, high = (verdict.speedup, verdict.low, verdict.high) if verdict else (None, None, None)
    note = f"{count(len(each.ratios), 'pair')}" + (f", {verdict.outcome}" if verdict else ", left out")
    return Mark(f"{where}: {name}", value, low, high, note, dots=each.ratios)


def _row(each: Evidence) -> list[Words]:
    verdict = each.verdict
    pairs = ", ".join(percent(ratio) for ratio in each.ratios)
    where = "overall" if each.concurrency is None else str(each.concurrency)
    if verdict is None or not verdict.n:
        return [code(each.candidate_id), where, pairs, NONE, NONE, NONE, NONE, "left out of the decision"]
    interval = NONE
    if verdict.low is not None and verdict.high is not None:
        interval = f"{percent(verdict.low)} to {percent(verdict.high)}"
    shown = percent(1 + verdict.detectable) if verdict.detectable is not None else NONE
    level = f"{100 * verdict.confidence:.4g} %" if verdict.low is not None else NONE
    return [code(each.candidate_id), where, pairs, percent(verdict.speedup), interval, level, shown, verdict.outcome]
