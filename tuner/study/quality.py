"""The output-quality gate of a study: what to ask which server, and what the stored answers come to."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.judge.quality import Answers, Quality, compare, lossy_settings
from tuner.study.data import Slot, StudyData

ANSWERS, JUDGED, VETO, COMPARED = "answers", "judged", "veto", "compared"
"""Kinds of stored facts: a candidate's answers; the same with the baseline's likelihoods; the user's check's objection,
"" where it has none; the gates between its blocks and the baseline's, by level."""


@dataclass(frozen=True)
class Wanted:
    """What a launch of confirmation is asked for besides its blocks: answers, and likelihoods of others'."""

    answers: bool
    likelihoods: tuple[str, ...]


def wanted(data: StudyData, slot: Slot) -> Wanted:
    """Which facts are still missing that this slot's server can give."""
    if slot.role != "confirm" or data.space.quality.prompts == 0:
        return Wanted(False, ())
    answers = (slot.candidate_id, ANSWERS) not in data.quality
    if slot.candidate_id != data.baseline.id:
        return Wanted(answers, ())
    known = {candidate for candidate, kind in data.quality if kind == ANSWERS} | {slot.candidate_id}
    return Wanted(answers, tuple(sorted(c for c in known if (c, JUDGED) not in data.quality)))


def verdicts(data: StudyData) -> dict[str, Quality]:
    """The verdict on every candidate whose answers, and the baseline's, are known."""
    baseline = _known(data, data.baseline.id)
    found = {}
    for candidate in sorted({candidate for candidate, _ in data.quality} - {data.baseline.id}):
        answers = _known(data, candidate)
        if baseline is not None and answers is not None:
            found[candidate] = compare(candidate, baseline, answers)
    return found


def _known(data: StudyData, candidate: str) -> Answers | None:
    stored = data.quality.get((candidate, JUDGED)) or data.quality.get((candidate, ANSWERS))
    return Answers.from_dict(stored) if stored else None


def refused(data: StudyData) -> dict[str, str]:
    """Candidate → why it cannot win: its answers are others than the baseline's, and the space does not allow that.

    A user's check counts in any case.
    """
    found = {
        candidate: f"the check objects: {stored['why']}"
        for (candidate, kind), stored in data.quality.items()
        if kind == VETO and stored["why"]
    }
    if data.space.quality.allow_lossy:
        return found
    for candidate, verdict in verdicts(data).items():
        if verdict.outcome == "different":
            found.setdefault(candidate, f"its answers are not the baseline's: {verdict.why}")
    for candidate, chosen in data.candidates.items():
        if names := lossy_settings(data.baseline.settings, chosen.settings):
            said = ", ".join(f"{name}={chosen.settings.get(name)}" for name in names)
            found.setdefault(candidate, f"lossy by its settings ({said})")
    return found


def notes(data: StudyData) -> list[str]:
    """What a person should know of the answers, one sentence a candidate."""
    finalists = {candidate for confirmation in data.confirmations for candidate in confirmation.finalists}
    why = refused(data)
    allow = "set quality.allow_lossy: true to let it win all the same"
    found = [
        f"Candidate {candidate} was left out: {reason}" + ("" if reason.startswith("the check") else f"; {allow}") + "."
        for candidate, reason in sorted(why.items())
        if candidate in finalists
    ]
    unconfirmed = [trial.candidate_id for trial in data.measured if trial.candidate_id in why.keys() - finalists]
    if unconfirmed:
        first = unconfirmed[0]
        others = f", and {len(unconfirmed) - 1} others like it" if len(unconfirmed) > 1 else ""
        found.append(f"Candidate {first}{others} could not win and was not confirmed: {why[first]}; {allow}.")
    for candidate, verdict in verdicts(data).items():
        if candidate not in why and verdict.outcome != "same":
            found.append(f"Answers of candidate {candidate}: {verdict.outcome} to the baseline's ({verdict.why}).")
    return found
