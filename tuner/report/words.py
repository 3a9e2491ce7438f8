"""Figures as words: one spelling for numbers, changes and intervals in every section."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line
from tuner.records import Setting
from tuner.report.document import NONE
from tuner.report.evidence import Estimate


def number(value: float | None, digits: int = 1) -> str:
    """A figure with so many digits behind the point."""
    return NONE if value is None else f"{value:.{digits}f}"


def seconds(milliseconds: float | None) -> str:
    """Milliseconds as seconds."""
    return NONE if milliseconds is None else f"{milliseconds / 1000:.2f}"


def count(n: int, noun: str, plural: str = "") -> str:
    """`1 pair`, `4 pairs`."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def change(found: Estimate, noun: str = "pair") -> str:
    """A ratio as a signed change, with its interval where it has one and with what it was seen over."""
    seen = count(found.n, noun)
    if found.low is None or found.high is None:
        return f"{percent(found.value)} ({seen}, no interval)"
    return f"{percent(found.value)} (95 % interval {percent(found.low)} to {percent(found.high)}, {seen})"


def estimate(found: Estimate, digits: int = 2, noun: str = "block") -> str:
    """A mean with its interval where it has one."""
    seen = count(found.n, noun)
    if found.low is None or found.high is None:
        return f"{found.value:.{digits}f} ({seen}, no interval)"
    return f"{found.value:.{digits}f} (95 % interval {found.low:.{digits}f} to {found.high:.{digits}f}, {seen})"


def share(found: Estimate, noun: str = "block") -> str:
    """A share of 1 in per cent."""
    seen = count(found.n, noun)
    if found.low is None or found.high is None:
        return f"{100 * found.value:.0f} % ({seen}, no interval)"
    return f"{100 * found.value:.0f} % (95 % interval {100 * found.low:.0f} to {100 * found.high:.0f} %, {seen})"


def value(of: Any) -> str:
    """A setting's or argument's value as it would be written."""
    return json.dumps(of, ensure_ascii=False) if isinstance(of, (list, dict, bool)) else str(of)


def labels(candidates: Mapping[str, Mapping[str, Setting]], baseline: str) -> dict[str, str]:
    """Candidate → what tells it from the others: its settings without those that all of them share."""
    others = [settings for candidate_id, settings in candidates.items() if candidate_id != baseline]
    common = _common(others) if len(others) > 1 else set()
    found = {}
    for candidate_id, settings in candidates.items():
        told = {name: of for name, of in settings.items() if (name, of) not in common}
        found[candidate_id] = "baseline" if candidate_id == baseline else settings_line(told or settings)
    return found


def _common(settings: Iterable[Mapping[str, Setting]]) -> set[tuple[str, Setting]]:
    sets = [set(one.items()) for one in settings]
    return set.intersection(*sets) if sets else set()


def short(text: str, most: int) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
