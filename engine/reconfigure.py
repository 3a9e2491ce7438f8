"""Settings that change on a running engine, between two rounds, with requests in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.build import Core
from engine.config import SpecConfig, parse_schedule
from engine.errors import EngineError, InvalidConfig, RanksDisagree
from engine.ipc.messages import TokenUpdate
from engine.spec.base import make_drafter
from engine.spec.gate import SpecGate

HOT: dict[str, str] = {
    "speculation": "text",
    "num_steps": "a whole number",
    "topk": "a whole number",
    "num_draft_tokens": "a whole number",
    "spec_version": "text",
    "disable_batch_threshold": "a whole number or 'never'",
    "steps_by_batch": "an object of running requests to draft depth, the same as text (1:0,8:3), or null",
    "hybrid_steps": "a whole number, or null",
    "policy": "text",
    "acceptance": "text",
}
"""Each setting and what it takes."""


def reconfigure(core: Core, changes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[TokenUpdate, ...]]:
    """Apply the changes, all or none; the reply, and what the round in flight emitted meanwhile.

    Everything that a fresh launch would do differently is done: a change of drafter runs the requests in flight again
    from their tokens, so that the new one has seen them. An empty change only begins a new window of counters.

    Raises:
        InvalidConfig: with the reason and what would be valid; nothing was changed, on any rank.
    """
    new = _merged(core.gate.config, changes)
    drafter, refused = None, ""
    try:
        drafter = make_drafter(new.speculation, core.surroundings)
    except EngineError as error:
        refused = f"speculation: '{new.speculation}' is not available here: {error}"
    told = core.crew.exchange((refused, "" if drafter is None else drafter.identity))
    everywhere = [problem for problem, _ in told if problem]
    if everywhere or drafter is None:
        raise InvalidConfig(everywhere[0])
    other = next((rank for rank, (_, identity) in enumerate(told) if identity != told[0][1]), None)
    if other is not None:
        raise RanksDisagree(f"rank {other} has read another draft head or model than rank 0; was a file replaced?")
    updates = core.scheduler.land()
    if (new.spec_version == "v2") != core.scheduler.overlapping:
        core.scheduler.use_lane(core.lane(new.spec_version))
    if drafter is not core.drafter:
        core.scheduler.use_drafter(drafter)
    if new != core.gate.config:
        before = core.gate.transitions
        core.scheduler.gate = SpecGate(new)
        core.gate.transitions = before
    core.round.rejection = new.acceptance == "rejection"
    core.epoch += 1
    core.reset_window()
    effective = core.effective()
    return {"applied": dict(changes), "effective": {n: effective[n] for n in HOT}, "epoch": core.epoch}, updates


def _merged(spec: SpecConfig, changes: Mapping[str, Any]) -> SpecConfig:
    problems, given = [], {}
    for name, value in changes.items():
        if name not in HOT:
            problems.append(f"{name}: cannot be changed on a running server; valid: {', '.join(HOT)}")
            continue
        try:
            given[name] = _parsed(name, value)
        except ValueError:
            problems.append(f"{name}: {value!r} is not valid; it takes {HOT[name]}")
    if not problems:
        merged = spec.merged(given)
        problems = merged.problems()
        if not problems:
            return merged
    raise InvalidConfig("; ".join(problems))


def _parsed(name: str, value: Any) -> Any:
    """The value as `SpecConfig` has it. Raises ValueError."""
    kind = HOT[name]
    if name == "disable_batch_threshold" and value in ("never", None):
        return None
    if name == "hybrid_steps" and value is None:
        return None
    if name == "steps_by_batch":
        return None if value is None else _table(value)
    wanted = str if kind == "text" else int
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(name)
    return value


def _table(value: Any) -> tuple[tuple[int, int], ...]:
    if isinstance(value, str):
        return parse_schedule(value)
    if not isinstance(value, Mapping):
        raise ValueError("steps_by_batch")
    table = []
    for size, steps in value.items():
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise ValueError("steps_by_batch")
        table.append((int(size), steps))
    return tuple(sorted(table))
