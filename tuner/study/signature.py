"""What makes two failures the same one: their class, and what the log first said, without what differs every time."""

from __future__ import annotations

import re

from tuner.records import Failure

_VARYING = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),  # colours
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"(?:/[\w.+@-]+)+/?"), "/…"),
    (re.compile(r"\d+(?:[.,:]\d+)*"), "#"),
)


def signature(failure: Failure) -> str:
    """Class and first line of evidence (of the message, where there is none), numbers, addresses and paths left out."""
    lines = [line.strip() for line in (failure.evidence or failure.message).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    for pattern, instead in _VARYING:
        said = pattern.sub(instead, said)
    return f"{failure.kind}: {' '.join(said.split())}"
