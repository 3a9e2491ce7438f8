"""What depths, trees and schedules mean, for every engine alike: sizes, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_ROWS = 64
"""Rows verified per request and round that are worth trying, root included."""


def capacity(steps: int, topk: int) -> int:
    """Nodes of the largest tree of so many steps, root included; topk 1 is a chain."""
    return min(MOST_ROWS, 1 + topk + (steps - 1) * topk * topk) if topk > 1 else steps + 1


def draft_tokens(steps: int, topk: int) -> int:
    """Rows that are verified where it is not said, root included."""
    return min(capacity(steps, topk), max(16, steps + 1))


def schedule(text: str) -> list[tuple[int, int]]:
    """`1:0,8:3,64:0` as (running requests from, draft depth).

    Raises:
        ValueError: it is not of that form.
    """
    return [(int(size), int(depth)) for size, depth in (part.split(":") for part in text.split(","))]


def schedule_problems(text: str, steps: int) -> list[str]:
    """What is wrong with a text of `steps_by_batch` beside a depth of `num_steps`."""
    try:
        table = schedule(text)
    except ValueError:
        return [f"steps_by_batch: '{text}' is not of the form 1:0,8:3,64:0"]
    sizes = [size for size, _ in table]
    if sizes[0] != 1 or sizes != sorted(set(sizes)):
        return ["steps_by_batch: the numbers of requests must begin with 1 and rise, as in 1:0,8:3,64:0"]
    if any(not 0 <= depth <= steps for _, depth in table):
        return [f"steps_by_batch: a depth is outside 0 to num_steps ({steps})"]
    return []


def depths(values: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """Draft depth by running requests, from either setting that says it; None where one depth holds throughout."""
    if "steps_by_batch" in values:
        return schedule(str(values["steps_by_batch"]))
    threshold = values.get("disable_batch_threshold", "never")
    return None if threshold == "never" else [(1, values["num_steps"]), (threshold + 1, 0)]


def shape_problems(values: Mapping[str, Any], chains: tuple[str, ...], own: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with the speculative settings together, where each is valid by itself.

    Args:
        values: all settings of the server.
        chains: drafters that do not branch.
        own: settings that have no meaning without speculation.
    """
    if values.get("speculation", "none") == "none":
        idle = [name for name in own if name in values and name != "speculation"]
        advice = "leave it out, or make it a parameter with when: speculation != 'none'"
        return [f"{name}: has no meaning while speculation is 'none'; {advice}" for name in idle]
    if "num_steps" not in values:
        return ["num_steps: is needed with speculation; valid: a whole number from 1 to 8"]
    found: list[str] = []
    steps, topk = values["num_steps"], values.get("topk", 1)
    rows = values.get("num_draft_tokens", draft_tokens(steps, topk))
    if topk > 1 and values["speculation"] in chains:
        found.append(f"topk: the drafter '{values['speculation']}' only chains; valid: 1")
    elif topk == 1 and rows != steps + 1:
        found.append(f"num_draft_tokens: a chain (topk 1) of {steps} steps has {steps + 1}, not {rows}")
    elif topk > 1 and rows > capacity(steps, topk):
        most = capacity(steps, topk)
        found.append(f"num_draft_tokens: a tree of {steps} steps and topk {topk} holds at most {most}, not {rows}")
    if topk > 1 and values.get("acceptance") == "rejection":
        found.append(f"acceptance: 'rejection' is for chains (topk 1), not topk {topk}; valid: target")
    if "steps_by_batch" in values:
        found += schedule_problems(str(values["steps_by_batch"]), steps)
        if values.get("disable_batch_threshold", "never") != "never":
            found.append("steps_by_batch: cannot be combined with disable_batch_threshold, a short form of it")
    if {"ngram_min", "ngram_max"} <= values.keys() and values["ngram_min"] > values["ngram_max"]:
        found.append(f"ngram_min: {values['ngram_min']} is above ngram_max ({values['ngram_max']})")
    return found
