"""A recommendation for people (plain lines) and for programs (a JSON-able dictionary)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tuner.judge.recommend import percent
from tuner.records import Candidate, Choice, Recommendation, Setting, Verdict, mark


def recommendation_lines(found: Recommendation) -> list[str]:
    """The recommendation as lines of plain text, without styling or line ends."""
    lines = [f"Recommendation of study {found.study} ({found.profile} profile){mark(found.simulated)}", ""]
    for choice in (found.overall, *found.per_concurrency):
        lines += _choice(choice)
    lines += _confidence(found)
    if found.advice:
        lines += ["", *(f"Note: {note}" for note in found.advice)]
    return lines


def _confidence(found: Recommendation) -> list[str]:
    """What the intervals promise, in words; nothing where none is shown."""
    shown = [c.verdict for c in (found.overall, *found.per_concurrency) if c.verdict is not None]
    levels = sorted({each.confidence for each in shown if each.low is not None})
    if not levels:
        return []
    text = f"An interval of {100 * levels[0]:.4g} % would miss the true change in {_one_in(levels[0])} such studies"
    if len(levels) > 1:
        text += f", one of {100 * levels[-1]:.4g} % in {_one_in(levels[-1])}: where more is claimed, each must be surer"
    return ["", f"{text}."]


def _one_in(confidence: float) -> str:
    return f"one of {1 / (1 - confidence):.0f}"


def settings_line(settings: Mapping[str, Setting]) -> str:
    """Settings on one line, sorted by name: `num_steps=3 speculation=ngram`."""
    return " ".join(f"{name}={_plain(value)}" for name, value in sorted(settings.items()))


def verdict_phrase(found: Verdict) -> str:
    """The figure with what can be said of it; no interval where there is none."""
    pairs = f"{found.n} pair{'s' * (found.n != 1)}"
    if found.low is None or found.high is None:
        return f"{percent(found.speedup)} seen over {pairs}, no interval"
    confidence = f"{100 * found.confidence:.4g} % interval"
    return f"{percent(found.speedup)} ({confidence} {percent(found.low)} to {percent(found.high)}, {pairs})"


def _choice(choice: Choice) -> list[str]:
    where = "overall" if choice.concurrency is None else f"concurrency {choice.concurrency}"
    head = f"  {where + ':':<17}"
    indent = " " * len(head)
    rates = _rates(choice)
    if choice.winner is not None and choice.verdict is not None:
        return [
            f"{head}winner {choice.winner.id}: {verdict_phrase(choice.verdict)}{rates}",
            f"{indent}{settings_line(choice.winner.settings)}",
            f"{indent}because {choice.why}",
        ]
    lines = [f"{head}no winner: keep the baseline{rates}", f"{indent}because {choice.why}"]
    if choice.verdict is not None:
        lines.append(f"{indent}best finalist {choice.verdict.candidate_id}: {verdict_phrase(choice.verdict)}")
        if choice.finalist is not None:
            lines.append(f"{indent}  {settings_line(choice.finalist.settings)}")
    return lines


def _rates(choice: Choice) -> str:
    if choice.baseline_tokens_per_s is None:
        return ""
    base = f"{choice.baseline_tokens_per_s:.1f} tok/s"
    if choice.winner_tokens_per_s is None:
        return f" ({base})"
    return f"; {base} → {choice.winner_tokens_per_s:.1f} tok/s"


def _plain(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def recommendation_dict(found: Recommendation) -> dict[str, Any]:
    """The recommendation in plain JSON types: ratios as numbers, absent figures as null."""
    return {
        "study": found.study,
        "profile": found.profile,
        "simulated": found.simulated,
        "overall": _choice_dict(found.overall),
        "per_concurrency": [_choice_dict(choice) for choice in found.per_concurrency],
        "advice": list(found.advice),
    }


def _choice_dict(choice: Choice) -> dict[str, Any]:
    return {
        "concurrency": choice.concurrency,
        "winner": _candidate_dict(choice.winner) if choice.winner is not None else None,
        "verdict": asdict(choice.verdict) if choice.verdict is not None else None,
        "baseline_tokens_per_s": choice.baseline_tokens_per_s,
        "winner_tokens_per_s": choice.winner_tokens_per_s,
        "why": choice.why,
        "finalist": _candidate_dict(choice.finalist) if choice.finalist is not None else None,
    }


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {"id": candidate.id, "settings": dict(candidate.settings)}
