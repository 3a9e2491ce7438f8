"""What a study of a space would come to, before anything is started: candidates, launches, hours. Pure but for reading
how long launches took in earlier studies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from tuner.search.crashes import Crash, Regions
from tuner.space import Space
from tuner.study.canary import to_prove
from tuner.study.data import StudyData
from tuner.study.effect import Effects
from tuner.study.engine import StudyEngine, hot_settings, illegal
from tuner.study.hot import HOT_BASELINE_EVERY, LEAST_ROW, MOST_ROW, cold_part
from tuner.study.policy import POLICIES, Policy, planned_pairs, policy_of
from tuner.study.race import NO_RACE
from tuner.study.score import BASELINE_EVERY

RACED_ON = 0.57
"""Share of the levels that are measured further behind a first look (`benchmarks/results/racing.json`)."""

STARTUP_S = 60.0
"""Assumed of a server's start, where no earlier launch tells."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a server's start, of a block and of its warm-up alone, and where they are known from."""

    startup_s: float
    block_s: float
    source: str
    warmup_s: float = 0.0


@dataclass(frozen=True)
class RuledOut:
    """So many combinations fall to one rule, and where it stands: in the space, in the engine, among crashes seen."""

    rule: str
    source: str
    combinations: int


@dataclass(frozen=True)
class Plan:
    """The outlook of a study. Counts are None where the space cannot be listed.

    `combinations` of values make `merged` fewer candidates, since some are equal in effect; `legal` are left after
    what is ruled out. Of the launches, `search` ones serve `candidates` (with hot settings several each, which saves
    `saved`), and `confirmation` ones are kept for the end. `hours` is what they take, at most the budget's.
    """

    combinations: int | None
    merged: int
    ruled_out: tuple[RuledOut, ...]
    legal: int | None
    hot: tuple[str, ...]
    groups: int | None
    candidates: int
    search: int
    confirmation: int
    saved: int
    hours: float
    budget_hours: float | None
    timing: Timing
    notes: tuple[str, ...]

    @property
    def launches(self) -> int:
        """All of them."""
        return self.search + self.confirmation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "launches": self.launches}


def plan(
    space: Space,
    engine: StudyEngine,
    timing: Timing,
    *,
    pairs: int | None = None,
    crashed: Sequence[Crash] = (),
) -> Plan:
    """The outlook of a new study of `space`.

    Args:
        space: what may be tried.
        engine: its engine.
        timing: how long launches and blocks take.
        pairs: of the confirmation, where a calibration asks for them.
        crashed: what crashed in other studies on this machine.
    """
    policy = POLICIES[space.profile]
    policy = policy if pairs is None else replace(policy, pairs=pairs)
    found = _Candidates(space, engine, crashed)
    kept = planned_pairs(space.budget.launches, policy)
    confirmation = 2 * kept
    room = max(0, space.budget.launches - confirmation - 1)
    hot = frozenset(p.name for p in space.parameters) & hot_settings(engine)
    wanted = space.budget.candidates if found.legal is None else min(found.legal, space.budget.candidates)
    slot_s = len(space.workload.concurrency) * timing.block_s
    every = BASELINE_EVERY[space.profile]
    if hot:
        row = min(max(round(timing.startup_s / max(slot_s, 1e-9)), LEAST_ROW), MOST_ROW)
        groups = found.groups if found.groups is not None else wanted
        starts = min(room, max(min(groups, wanted), math.ceil(wanted / row)) if groups > 1 else 0)
        candidates = wanted
    else:
        starts = min(room, wanted + (wanted // every if every else 0))
        candidates = starts - (starts // (every + 1) if every else 0)
    search = min(space.budget.launches, 1 + starts)
    again = candidates // HOT_BASELINE_EVERY[space.profile]
    turns = 1 + (max(starts, again) if hot else starts - candidates)
    # What the search leaves of the launches confirms further finalists, each against the same baselines.
    left = (space.budget.launches - search) // kept - 2 if kept else 0
    finalists = min(1 + max(0, left), policy.max_finalists, max(1, candidates))
    confirmation = kept * (1 + finalists)
    seconds = (search + confirmation) * timing.startup_s + (turns + confirmation) * slot_s
    seconds += candidates * len(space.workload.concurrency) * candidate_block_s(space, policy, timing)
    limit = space.budget.hours
    return Plan(
        combinations=found.combinations,
        merged=found.merged,
        ruled_out=found.ruled_out,
        legal=found.legal,
        hot=tuple(sorted(hot)),
        groups=found.groups if hot else None,
        candidates=candidates,
        search=search,
        confirmation=confirmation,
        saved=max(0, candidates - starts) if hot else 0,
        hours=min(seconds / 3600, limit) if limit is not None else seconds / 3600,
        budget_hours=limit,
        timing=timing,
        notes=_notes(space, found, policy, seconds / 3600),
    )


def candidate_block_s(space: Space, policy: Policy, timing: Timing) -> float:
    """Seconds that a level of a candidate of the search is expected to take: with racing less than a whole block."""
    if not policy.look or space.objective.maximize in NO_RACE:
        return timing.block_s
    window_s = timing.block_s - timing.warmup_s
    raced = timing.warmup_s + policy.look * window_s
    raced += RACED_ON * (timing.warmup_s + (1 - policy.look) * window_s)
    return min(raced, timing.block_s)  # looks end by themselves where they do not pay


def _notes(space: Space, found: _Candidates, policy: Policy, hours: float) -> tuple[str, ...]:
    notes = []
    budget = space.budget
    if found.legal == 0:
        notes.append("nothing is left to try: every combination is ruled out, or is the baseline in effect")
    elif found.legal == 1:
        notes.append("only one candidate is left: the study compares it with the baseline, there is nothing to search")
    if found.proven:
        named = ", ".join(dict.fromkeys(name for name, _ in found.proven))
        room = budget.launches - 2 * planned_pairs(budget.launches, policy) - 1
        most = (
            f", most of the search's {room} launches; give more, or fewer values"
            if 2 * len(found.proven) > room
            else ""
        )
        notes.append(
            f"{len(found.proven)} launches are canaries: values of {named}, each tried alone before it is searched"
            f"{most}"
        )
    if planned_pairs(budget.launches, policy) < 4:
        notes.append(f"a claim needs 4 pairs of confirmation, so at least 10 launches; the budget is {budget.launches}")
    if budget.hours is not None and hours > budget.hours:
        notes.append(f"the budget of {budget.hours:g} hours ends the search before all candidates are tried")
    if found.legal is None:
        notes.append("the candidates cannot be listed: what rules out how many is not known")
    return tuple(notes)


class _Candidates:
    """Every combination of a space, sorted by what becomes of it."""

    def __init__(self, space: Space, engine: StudyEngine, crashed: Sequence[Crash]) -> None:
        self.combinations: int | None = None
        self.legal: int | None = None
        self.groups: int | None = None
        self.merged = 0
        self.ruled_out: tuple[RuledOut, ...] = ()
        self.proven: list[tuple[str, Any]] = []
        combinations = space.combinations()
        if combinations is None:
            return
        effects = Effects(space, engine)
        hot = hot_settings(engine)
        known = {str(sorted(crash.settings.items())): crash.source for crash in crashed}
        regions = Regions(crashed, [space.baseline.settings])
        why: Counter[tuple[str, str]] = Counter()
        first: dict[str, str] = {effects.of(space.baseline): space.baseline.id}
        groups = set()
        legal = 0
        proven = to_prove(space)
        found: set[tuple[str, Any]] = set()
        for each in combinations:
            candidate = each.candidate
            if rule := space.forbidden(candidate):
                why[rule, "space"] += 1
            elif problem := illegal(space, engine, candidate):
                why[problem, "engine"] += 1
            elif source := known.get(str(sorted(candidate.settings.items()))):
                why[f"it crashed in {source} on this machine", "crash"] += 1
            elif region := regions.of(candidate.settings):
                why[f"{region} on this machine", "crash"] += 1
            elif (effect := effects.of(candidate)) in first:
                self.merged += 1
            else:
                first[effect] = candidate.id
                groups.add(cold_part(hot, candidate.settings))
                found.update(each for each in proven if candidate.settings.get(each[0]) == each[1])
                legal += 1
        self.combinations = len(combinations)
        self.legal, self.groups = legal, len(groups)
        self.proven = [each for each in proven if each in found]
        self.ruled_out = tuple(RuledOut(rule, source, n) for (rule, source), n in why.most_common())


def timing_of(studies: Sequence[StudyData], space: Space, block_s: float, warmup_s: float = 0.0) -> Timing:
    """How long launches of this kind of engine took in earlier studies, of this model where there are any."""
    mine = [data for data in studies if data.space.kind == space.kind]
    same = [data for data in mine if data.space.model == space.model] or mine
    starts = [x.ready_at - x.started_at for data in same for x in data.launches if x.ready_at is not None]
    blocks = [
        b.block.warmup_s + b.block.window_s
        for data in same
        if data.space.profile == space.profile
        for b in data.blocks.values()
        if b.role == "confirm" or b.candidate_id == data.baseline.id or not policy_of(data).look
    ]
    if not starts:
        said = f"assumed: {STARTUP_S:g} s for a start (no earlier launch of {space.kind}), {block_s:.0f} s for a block"
        return Timing(STARTUP_S, block_s, said, warmup_s)
    names = ", ".join(sorted({data.name for data in same})[:3])
    measured = median(blocks) if blocks else block_s
    warmups = [b.block.warmup_s for data in same if data.space.profile == space.profile for b in data.blocks.values()]
    warmup_s = median(warmups) if warmups else warmup_s
    return Timing(median(starts), measured, f"medians of {len(starts)} earlier launches (studies {names})", warmup_s)
