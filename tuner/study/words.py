"""How candidates and gains are said to a person."""

from __future__ import annotations

import math

from tuner.records import Candidate


def described(candidate: Candidate) -> str:
    """A candidate in one line."""
    return " ".join(f"{name}={value}" for name, value in candidate.settings.items()) or "no settings"


def change(log_ratio: float) -> str:
    """A log ratio as a signed percentage."""
    return f"{100 * (math.exp(log_ratio) - 1):+.1f} %".replace("-", "−")
