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

from tuner.records import Candidate
from tuner.search.crossing import Change, Crossing, Curve, crossings, ratio, sides
from tuner.search.shape import shape_at
from tuner.space.space import SPECULATIVE
from tuner.study.data import Slot, StudyData
from tuner.study.policy import Policy
from tuner.study.schedule import Family, Planned, curves_of, family_of, plain_family

CLOSE = 1.2
"""A load that was measured is near a crossing where they are no further apart than by this factor."""

ROUNDS = 3
"""Times that a change is looked for, at most."""

APART = 2.0
"""Standard deviations by which two depths that both draft have to differ at either end of a change, or its place is not
worth a block: what noise has made is nowhere. Between a depth and plain decoding any change is looked for."""


ROUNDING = 1e-6
"""Requests by which a limit of an interval, which was a logarithm, may be off."""


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
            if _hopeless(data, policy, edge) or not (legal(edge.candidate) and legal(edge.speculating)):
                return None
            if data.block(edge.slot, edge.load) is None:
                return edge
    return None


def _wanted(data: StudyData, asked: Planned, change: Change) -> list[Edge]:
    """What is missing around the present place of a change, in an order of few changes of the server's settings."""
    before, after = asked.curves[change.before], asked.curves[change.after]
    if change.before and change.after and not _told_apart(before, after, change):
        return []
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


def _told_apart(before: Curve, after: Curve, change: Change) -> bool:
    """Whether each is the faster one at its own end, noise apart; not where one was not measured there."""
    gain = ratio(after, before)
    if change.low not in gain or change.high not in gain:
        return False
    (low, low_sd), (high, high_sd) = gain[change.low], gain[change.high]
    return low < -APART * low_sd and high > APART * high_sd


def constant(data: StudyData, family: Family, depth: int) -> Candidate:
    """The candidate of a family that has one depth at every load; one of the study's where there is such."""
    settings = dict(family)
    if depth == 0:
        settings = {n: v for n, v in settings.items() if n not in SPECULATIVE} | {"speculation": "none"}
    elif "num_steps" not in data.space.args:
        settings |= {"num_steps": depth}
    elif depth != data.space.args["num_steps"]:
        settings |= {"steps_by_batch": f"1:{depth}"}
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


def _hopeless(data: StudyData, policy: Policy, edge: Edge) -> bool:
    """Whether a block cannot be had: its server failed, it never passes its gates, or the tuner ends with it."""
    launches, asked = data.launched_for.get(edge.launched, ()), data.changed_to.get(edge.slot, ())
    if any(one.failure for one in launches) or any(one.failure for one in asked):
        return True
    tries = [stored for stored in data.by_slot.get(edge.slot, ()) if not stored.block.valid]
    if len(tries) >= policy.block_attempts:
        return True
    measured = {stored.launch_id for stored in data.by_slot.get(edge.slot, ())}
    cut_short = [one for one in launches if one.state == "interrupted"]
    cut_short_by_changes = [one for one in asked if one.launch_id not in measured]
    return len(cut_short) + len(cut_short_by_changes) >= policy.interruptions


# -- for a person -----------------------------------------------------------------------------------------------------


def crossing_note(data: StudyData, candidate: Candidate) -> str:
    """Up to which load, or from which on, each depth of a candidate is faster than plain decoding; "" where the blocks
    show no such load."""
    curves = curves_of(data).get(family_of(candidate.settings), {})
    highest = max(data.levels)
    depth = [shape_at({**data.space.args, **candidate.settings}, load).depth for load in range(highest + 1)]
    begins_or_ends = [load for load in range(2, highest + 1) if (depth[load] == 0) != (depth[load - 1] == 0)]
    beside = {load: depth[load] or depth[load - 1] for load in begins_or_ends}
    said, off = [], []
    for steps in dict.fromkeys(beside.values() or [max(depth[1:])]):
        gain = ratio(curves.get(steps, {}), curves.get(0, {}))
        if not steps or not (found := crossings(gain)):
            continue
        loads = ", ".join(map(str, sorted(gain)))
        pays = "; ".join(_said(one, min(gain), max(gain)) for one in found)
        said.append(f"with {steps} step{'s' * (steps != 1)} {pays}, measured at {loads} requests")
        mine = [load for load, one in beside.items() if one == steps]
        off += [load for load in mine if not any(one.low <= load <= one.high + 1 for one in found)]
    if not said:
        return ""
    drafter = candidate.settings.get("speculation", "speculation")
    note = f"Where it pays: {drafter} is faster than plain decoding {'; '.join(said)}."
    if off:
        note += (
            f" {candidate.id} switches at {off[0]}, away from there: a threshold nearer to it would serve the loads in "
            "between better."
        )
    return note


def _said(one: Crossing, lowest: int, highest: int) -> str:
    low, high = math.floor(one.low + ROUNDING), math.ceil(one.high - ROUNDING)
    limits = f"{low}{' or fewer' * (low <= lowest)} to {high}{' or more' * (high >= highest)}"
    if one.rising:
        return f"from about {math.ceil(one.at)} requests at once on (95 %: {limits})"
    return f"up to about {math.floor(one.at)} at once (95 %: {limits})"
