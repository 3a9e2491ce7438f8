"""What was tried and failed?"""

from __future__ import annotations

from collections import Counter

from tuner.judge.text import settings_line
from tuner.report.document import (
    Bar,
    Bars,
    Block,
    Bullets,
    Excerpt,
    Heading,
    Paragraph,
    Section,
    code,
    line,
    section,
    table,
)
from tuner.report.view import FailureView, StudyView
from tuner.report.words import count


def failed(view: StudyView) -> Section:
    """Failed launches by class, each with its evidence, and what was ruled out without a launch."""
    title, question = "What failed", "What was tried and failed?"
    ruled_out = [candidate for candidate in view.candidates if candidate.standing == "ruled out"]
    if not view.failures and not ruled_out:
        return section(title, question, [Paragraph(line("Nothing."), "lead")])
    blocks: list[Block | None] = [Paragraph(line(_lead(view, len(ruled_out))), "lead"), *_by_class(view)]
    for found in view.failures:
        blocks += _failure(found)
    if ruled_out:
        items = tuple(line(code(c.id), " ", code(settings_line(c.settings)), f": {c.why}") for c in ruled_out)
        blocks += [Heading(line("Ruled out without a launch")), Bullets(items)]
    return section(title, question, blocks)


def _lead(view: StudyView, ruled_out: int) -> str:
    launches = sum(len(found.launches) for found in view.failures)
    candidates = len({found.candidate_id for found in view.failures})
    words = [f"{count(launches, 'launch', 'launches')} of {count(candidates, 'candidate')} failed"] if launches else []
    words += [f"{count(ruled_out, 'candidate')} ruled out before a launch"] if ruled_out else []
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _by_class(view: StudyView) -> list[Block | None]:
    if not view.failures:
        return []
    launches: Counter[str] = Counter()
    candidates: dict[str, set[str]] = {}
    blame = {}
    for found in view.failures:
        kind = found.failure.kind
        launches[kind] += len(found.launches)
        candidates.setdefault(kind, set()).add(found.candidate_id)
        blame[kind] = found.failure.blame
    bars = tuple(Bar(kind, (float(n),)) for kind, n in launches.most_common())
    rows = [[code(kind), str(n), str(len(candidates[kind])), blame[kind]] for kind, n in launches.most_common()]
    return [
        Bars("Failed launches by class", ("launches",), bars),
        table(["Class", "Launches", "Candidates", "Held against"], rows, "lrrl", "Failures by class."),
    ]


def _failure(found: FailureView) -> list[Block]:
    failure = found.failure
    launches = f"launch{'es' * (len(found.launches) != 1)} {', '.join(map(str, found.launches))}"
    blame = "the candidate's" if failure.blame == "candidate" else "the environment's, not held against the candidate"
    where = f"In phase {failure.phase}, {launches}; {blame}. Log: "
    blocks: list[Block] = [
        Heading(line(code(failure.kind), " of ", code(found.candidate_id))),
        Paragraph(line(failure.message)),
        Paragraph(line(where, code(found.log_path or "none"))),
    ]
    return [*blocks, Excerpt(failure.evidence)] if failure.evidence.strip() else blocks
