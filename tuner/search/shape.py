"""What speculative settings come to while so many requests run: the only part of them that physics sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.engines.speculation import draft_tokens

UNDERSTOOD = frozenset(
    (
        *("speculation", "num_steps", "topk", "num_draft_tokens", "spec_version"),
        *("disable_batch_threshold", "steps_by_batch"),
    )
)
"""Settings whose effect on a step follows from its shape; of all others only measurements tell."""

USUAL_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """A decode step: `depth` drafts in a row, `topk` wide, `rows` verified for each request. Depth 0: plain decoding.

    `overlap`: host work is hidden behind the device's (spec_version v2).
    """

    drafter: str
    depth: int
    topk: int
    rows: int
    overlap: bool


PLAIN = Shape("none", 0, 1, 1, True)


def shape_at(settings: Mapping[str, Any], running: int) -> Shape:
    """The step of these settings at `running` requests."""
    drafter = settings.get("speculation", "none")
    steps = _whole(settings.get("num_steps"), USUAL_STEPS)
    depth = _depth(settings, steps, running)
    if drafter in ("none", False) or depth <= 0:
        return PLAIN
    topk = max(1, _whole(settings.get("topk"), 1))
    told = _whole(settings.get("num_draft_tokens"), 0)
    rows = depth + 1 if topk == 1 else max(2, told or draft_tokens(depth, topk))
    return Shape(str(drafter), depth, topk, rows, settings.get("spec_version", "v1") == "v2")


def _depth(settings: Mapping[str, Any], steps: int, running: int) -> int:
    depth = steps
    table = str(settings.get("steps_by_batch") or "")
    for entry in table.split(",") if table else ():
        size, _, told = entry.partition(":")
        if size.strip().isdigit() and told.strip().isdigit() and int(size) <= running:
            depth = int(told)
    threshold = settings.get("disable_batch_threshold")
    off = isinstance(threshold, int) and not isinstance(threshold, bool) and running > threshold
    return 0 if off and not table else depth


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
