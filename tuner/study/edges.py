"""Where a schedule should change its depth, measured before the schedule is tried. Pure functions of records.

A change that the blocks ask for lies between two levels of the workload, and where between them only a straight line
says. So both depths are measured there, one after the other, at the two loads next to where their curves cross; and
again where they cross then, until such loads lie within a fifth of it on either side. It is done where depths change on
a running server, and so needs no launch but the one that the schedule itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tuner.engines.speculation import depths
from tuner.records import Candidate
from tuner.search.crossing import Change, Crossing, crossings, ratio, sides
from tuner.search.shape import shape_at
from tuner.space.space import SPECULATIVE
from tuner.study.data import Slot, StudyData
from tuner.study.planner import slot_state
from tuner.study.policy import Policy
from tuner.study.schedule import Family, Planned, curves_of, family_of, plain_family

CLOSE = 1.2
"""A load that was measured is near a crossing where they are no further apart than by this factor."""

ROUNDS = 3
"""Times that a change is looked for, at most."""


@dataclass(frozen=True)
class Edge:
    """One block that is due: of this candidate, at this load. `speculating` is of the two depths the deeper one."""

    candidate: Candidate
    load: int
    speculating: Candidate

    @property
    def slot(self) -> Slot:
        """What it is measured as."""
        return Slot(self.candidate.id, "edge", self.load)

    @property
    def launched(self) -> Slot:
        """What a server is launched for, where none is up: one that speculates can be put to plain decoding."""
        return Slot(self.speculating.id, "edge", self.load)


def edge_due(data: StudyData, policy: Policy, asked: Planned, legal: Callable[[Candidate], bool]) -> Edge | None:
    """The next block beside a change of the schedule; None where all changes are placed, or one cannot be measured."""
    for change in asked.changes:
        for edge in _wanted(data, asked, change):
            hopeless = any(_hopeless(data, policy, slot) for slot in (edge.slot, edge.launched))
            if hopeless or not (legal(edge.candidate) and legal(edge.speculating)):
                return None
            if data.block(edge.slot, edge.load) is None:
                return edge
    return None


def _wanted(data: StudyData, asked: Planned, change: Change) -> list[Edge]:
    """What is missing around the present place of a change, in an order of few changes of the server's settings."""
    before, after = asked.curves[change.before], asked.curves[change.after]
    known = sorted(load for load in before.keys() & after.keys() if change.low <= load <= change.high)
    fresh = [load for load in known if load not in data.levels]
    near_below = any(change.place / CLOSE <= load <= change.place for load in known)
    near_above = any(change.place <= load <= change.place * CLOSE for load in known)
    if (near_below and near_above) or len(fresh) >= 2 * ROUNDS:
        return []
    other, deep = (constant(data, asked.family, depth) for depth in sorted((change.before, change.after)))
    below, above = sides(change.place)
    order = [(below, deep), (below, other), (above, other), (above, deep)]
    return [Edge(one, load, deep) for load, one in order if change.low < load < change.high]


def constant(data: StudyData, family: Family, depth: int) -> Candidate:
    """The candidate of a family that has one depth at every load; one of the study's where there is such."""
    settings = dict(family)
    if depth == 0:
        settings = {n: v for n, v in settings.items() if n not in SPECULATIVE} | {"speculation": "none"}
    else:
        settings |= {"num_steps": depth}
    tried = [data.baseline, *(data.candidates[trial.candidate_id] for trial in data.trials)]
    made = Candidate(dict(sorted(settings.items())))
    return next((one for one in tried if _alike(data, one, made)), made)


def _alike(data: StudyData, one: Candidate, made: Candidate) -> bool:
    """Whether a candidate is another in all but thresholds that are never reached."""
    idle = {"disable_batch_threshold": "never"}
    if {**idle, **one.settings} == {**idle, **made.settings}:
        return True
    plain = made.settings.get("speculation") == "none" and one.settings.get("speculation", "none") == "none"
    return plain and plain_family(one.settings) == plain_family(made.settings)


def _hopeless(data: StudyData, policy: Policy, slot: Slot) -> bool:
    """Whether a block cannot be had: its server failed, it never passes its gates, or the tuner ends with it."""
    state = slot_state(data, policy, slot)
    if state.failure is not None or state.unusable is not None:
        return True
    launches, asked = data.launched_for.get(slot, ()), data.changed_to.get(slot, ())
    if any(one.failure for one in launches) or any(one.failure for one in asked):
        return True
    attempts = data.by_slot.get(slot, ())
    if attempts and not any(stored.block.valid for stored in attempts) and len(attempts) >= policy.block_attempts:
        return True
    begun = sum(one.state == "interrupted" for one in launches) + sum(one.state == "asked" for one in asked)
    return not attempts and begun >= policy.interruptions


# -- for a person -----------------------------------------------------------------------------------------------------


def crossing_note(data: StudyData, candidate: Candidate) -> str:
    """Up to which load, or from which on, a candidate's way of speculating is faster than plain decoding; "" where the
    blocks show no such load."""
    curves = curves_of(data).get(family_of(candidate.settings), {})
    settings = {**data.space.args, **candidate.settings}
    depth = max(shape_at(settings, level).depth for level in data.levels)
    gain = ratio(curves.get(depth, {}), curves.get(0, {}))
    found = crossings(gain)
    if not depth or not found:
        return ""
    drafter = candidate.settings.get("speculation", "speculation")
    said = "; ".join(_said(one, min(gain), max(gain)) for one in found)
    loads = ", ".join(map(str, sorted(gain)))
    steps = f"{depth} step{'s' * (depth != 1)}"
    note = f"Where it pays: {drafter} of {steps} is faster than plain decoding {said}; measured at {loads} requests."
    off = [at for at in _switches(data, candidate) if not any(one.low <= at <= one.high + 1 for one in found)]
    if off:
        note += (
            f" {candidate.id} switches at {off[0]}, away from there: a threshold nearer to it would serve the loads in "
            "between better."
        )
    return note


def _switches(data: StudyData, candidate: Candidate) -> list[int]:
    """The loads from which on a candidate begins or ceases to speculate, within what was measured."""
    table = depths({**data.space.args, **candidate.settings}) or []
    return [
        load
        for (_, before), (load, after) in pairwise(table)
        if (before == 0) != (after == 0) and load <= max(data.levels)
    ]


def _said(one: Crossing, lowest: int, highest: int) -> str:
    low, high = math.floor(one.low), math.ceil(one.high)
    limits = f"{low}{' or fewer' * (low <= lowest)} to {high}{' or more' * (high >= highest)}"
    if one.rising:
        return f"from about {math.ceil(one.at)} requests at once on (95 %: {limits})"
    return f"up to about {math.floor(one.at)} at once (95 %: {limits})"
