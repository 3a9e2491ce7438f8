"""Settings that a window's counters give the lie to: a server may say that it has them, and run with others.

Bounds are those of the settings themselves. No verify step accepts more drafts than it was told to make, so a server
that drafts deeper, or makes larger trees, runs with something else. A head or a draft model always drafts as deep as
it is told; one that draws less does not do so. What a lookup finds says nothing from below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.engines.speculation import capacity, schedule
from tuner.records import Block, Gate

FEW_STEPS = 50
"""Verify steps under which a window says nothing."""

MAX_DEEPER = 0.001
"""Share of verify steps that may accept more drafts than the settings allow: those of a change just under way."""

MAX_OVER = 0.01
"""Drafts per verify step beyond what the settings allow, in the mean."""

ENDS_OVER = 0.2
"""The same share of tokens per verify step where they are counted when a request ends, its first token among them."""

OFF_FROM = 2
"""From so many times the last load with speculation on, running requests do not come down to it for long."""

MAX_SPECULATED = 0.5
"""Share of the tokens that may come of verify steps where there are to be none."""

FULL = ("eagle3", "draft_model", "mtp")
"""Drafters that always draft as deep as they are told."""

ONLY_SHALLOWER = ("bundled",)
"""Engines whose adaptive policy stays below the depth that they were told; SGLang's has a table of its own."""

MAY_STOP = ("llama_server",)
"""Engines whose drafts end where the drafter is in doubt."""


def belied(engine: str, told: Mapping[str, Any], block: Block) -> Gate | None:
    """The red gate of a block whose counters cannot come from these settings; None where nothing speaks against them.

    Args:
        engine: the kind of the engine.
        told: all settings of the server, by neutral name.
        block: what was measured.
    """
    steps, level = block.counters.get("server_verify_steps", 0.0), block.concurrency
    depth = _whole(told.get("num_steps"))
    if steps < FEW_STEPS or depth is None or told.get("speculation", "none") in ("none", False):
        return None
    if told.get("policy", "fixed") != "fixed" and engine not in ONLY_SHALLOWER:
        return None
    table = _table(told) or [(1, depth)]
    here = [entry for entry in table if entry[0] <= level]
    # Fewer requests may run for a moment, and SGLang rounds their number up to a size that was captured.
    allowed = max(entry for _, entry in (table if engine == "sglang" else here))
    if here[-1][1] == 0 and (found := _off(here, allowed, block)):
        return found
    if allowed < 1:
        return None
    return _over(told, allowed, block) or _under(engine, told, allowed, len(here) > 1, block)


def _over(told: Mapping[str, Any], allowed: int, block: Block) -> Gate | None:
    """More than the settings allow at this load."""
    counters = block.counters
    steps = counters["server_verify_steps"]
    deeper = counters.get(f"accepted_at_depth_{allowed + 1}", 0.0)
    if deeper > MAX_DEEPER * steps:
        said = f"of {steps:.0f} verify steps accepted more than {allowed} drafts, which is all that was asked for"
        return Gate("no_op_setting", deeper, MAX_DEEPER * steps, False, said)
    exact = "server_accepted" in counters
    most = allowed + 1 + MAX_OVER if exact else (allowed + 1) * (1 + ENDS_OVER)
    if block.accept_length is not None and block.accept_length > most:
        said = f"tokens a verify step, though {allowed} drafts give {allowed + 1} at most"
        return Gate("no_op_setting", round(block.accept_length, 6), most, False, said)
    topk, rows = told.get("topk", 1), _whole(told.get("num_draft_tokens"))
    if "server_drafted" not in counters or (topk != 1 and rows is None):
        return None
    drafts = allowed if topk == 1 else min(capacity(allowed, int(topk)), rows or 0) - 1
    mean = counters["server_drafted"] / steps
    if mean > drafts + MAX_OVER:
        said = f"drafts a verify step, though {drafts} were asked for at most"
        return Gate("no_op_setting", round(mean, 6), drafts + MAX_OVER, False, said)
    return None


def _under(engine: str, told: Mapping[str, Any], depth: int, varies: bool, block: Block) -> Gate | None:
    """Less than a drafter of this kind drafts; towards the end of an answer less is drafted, too."""
    full = told.get("speculation") in FULL and engine not in MAY_STOP and told.get("topk", 1) == 1
    if not full or varies or told.get("policy", "fixed") != "fixed" or "server_drafted" not in block.counters:
        return None
    if not block.mean_output_tokens:
        return None
    least = depth - 0.5 - depth**2 / (2 * block.mean_output_tokens)
    mean = block.counters["server_drafted"] / block.counters["server_verify_steps"]
    if mean >= least:
        return None
    said = f"drafts a verify step, though {depth} were asked for"
    return Gate("capped_effective", round(mean, 6), least, False, said)


def _off(here: list[tuple[int, int]], allowed: int, block: Block) -> Gate | None:
    """Verify steps at a load at which there are to be none."""
    generated, ends = block.counters.get("server_generated"), here[-1][0]
    if not generated or (allowed and block.concurrency < OFF_FROM * (ends - 1)):
        return None
    speculated = block.counters["server_verify_steps"] + block.counters.get("server_accepted", 0.0)
    share = speculated / generated
    if share <= MAX_SPECULATED:
        return None
    said = f"of the tokens came of verify steps, though speculation is to be off from {ends} requests on"
    return Gate("no_op_setting", round(share, 6), MAX_SPECULATED, False, said)


def _table(told: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Draft depth by running requests, from either setting that says it; empty where one depth holds throughout."""
    if told.get("steps_by_batch"):
        try:
            return schedule(str(told["steps_by_batch"]))
        except ValueError:
            return []
    threshold, depth = _whole(told.get("disable_batch_threshold")), _whole(told.get("num_steps"))
    return [] if threshold is None or depth is None else [(1, depth), (threshold + 1, 0)]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
