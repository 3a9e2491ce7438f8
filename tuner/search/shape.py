"""What speculative settings come to while so many requests run: the only part of them that physics sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
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
    return _shape(
        running, drafter_of(settings), settings.get("spec_version", "v1"), *(settings.get(name) for name in _COUNTS)
    )


def drafter_of(settings: Mapping[str, Any]) -> str:
    """What drafts, and with what: another head, or another model, guesses otherwise. "none" where nothing does."""
    drafter = settings.get("speculation", "none")
    if drafter in ("none", False):
        return "none"
    made_of = [str(settings[name]) for name in _MADE_OF if settings.get(name) is not None]
    return WITH.join([str(drafter), *made_of])


WITH = " with "
"""Between a drafter and what it is made of."""

_MADE_OF = ("draft_head", "draft_model", "hybrid")


_COUNTS = ("num_steps", "topk", "num_draft_tokens", "disable_batch_threshold", "steps_by_batch")


@lru_cache(maxsize=8192, typed=True)  # few differ among the many candidates of a space
def _shape(
    running: int,
    drafter: str,
    version: Any,
    num_steps: Any,
    topk: Any,
    num_draft_tokens: Any,
    threshold: Any,
    table: Any,
) -> Shape:
    depth = _depth(_whole(num_steps, USUAL_STEPS), threshold, str(table or ""), running)
    if drafter == "none" or depth <= 0:
        return PLAIN
    wide = max(1, _whole(topk, 1))
    told = _whole(num_draft_tokens, 0)
    rows = depth + 1 if wide == 1 else max(2, told or draft_tokens(depth, wide))
    return Shape(drafter, depth, wide, rows, version == "v2")


def _depth(steps: int, threshold: Any, table: str, running: int) -> int:
    depth = steps
    for entry in table.split(",") if table else ():
        size, _, told = entry.partition(":")
        if size.strip().isdigit() and told.strip().isdigit() and int(size) <= running:
            depth = int(told)
    off = isinstance(threshold, int) and not isinstance(threshold, bool) and running > threshold
    return 0 if off and not table else depth


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
