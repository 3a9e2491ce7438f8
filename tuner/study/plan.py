"""What a study of a space would come to, before anything is started: candidates, launches, hours. Pure but for reading
how long launches took in earlier studies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from tuner.records import Candidate
from tuner.search.crashes import Regions
from tuner.space import Space
from tuner.study.ahead import Ahead, Pace, Scope, ahead
from tuner.study.canary import to_prove
from tuner.study.crashes import Elsewhere
from tuner.study.data import Budget, StudyData
from tuner.study.edges import ROUNDS
from tuner.study.effect import Effects
from tuner.study.engine import StudyEngine, hot_settings, legality, none_drawn
from tuner.study.hot import scope_to_try
from tuner.study.plain import baseline_speculates, out_of_race
from tuner.study.policy import CLAIM_PAIRS, POLICIES, Policy, planned_pairs, policy_of
from tuner.study.race import NO_RACE

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
    `saved`), and `confirmation` ones are kept for the end; `hours` is what they take. A budget of hours holds all of
    these.
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
    crashed: Elsewhere = Elsewhere(),
) -> Plan:
    """The outlook of a new study of `space`.

    Args:
        space: what may be tried.
        engine: its engine.
        timing: how long launches and blocks take.
        pairs: of the confirmation, where a calibration asks for them.
        crashed: what crashed, and what worked, in other studies on this machine.
    """
    policy = POLICIES[space.profile]
    policy = policy if pairs is None else replace(policy, pairs=pairs)
    found = _Candidates(space, engine, crashed)
    hot = frozenset(p.name for p in space.parameters) & hot_settings(engine)
    levels, budget = len(space.workload.concurrency), Budget(**space.budget.model_dump())
    scope = found.scope if hot else Scope(found.legal)
    if hot and scope.groups is None:
        scope = replace(scope, groups=budget.candidates)
    slot_s = levels * timing.block_s
    pace = Pace(timing.startup_s, slot_s, levels * candidate_block_s(space, policy, timing))
    whole = ahead(budget, policy, space.profile, levels, scope, pace)
    notes = _notes(space, found, policy, whole, pace) + _plain(space, engine) + _beside_changes(space, hot, timing)
    notes += _not_held(space)
    return Plan(
        combinations=found.combinations,
        merged=found.merged,
        ruled_out=found.ruled_out,
        legal=found.legal,
        hot=tuple(sorted(hot)),
        groups=found.scope.groups if hot else None,
        candidates=whole.candidates,
        search=whole.search,
        confirmation=whole.confirmation,
        saved=max(0, whole.candidates - (whole.search - 1)) if hot else 0,
        hours=whole.seconds / 3600,
        budget_hours=budget.hours,
        timing=timing,
        notes=notes,
    )


def to_try(space: Space, engine: StudyEngine) -> int | None:
    """Candidates that differ from the baseline and from one another in effect; None where they cannot be listed."""
    return _Candidates(space, engine, Elsewhere()).legal


def candidate_block_s(space: Space, policy: Policy, timing: Timing) -> float:
    """Seconds that a level of a candidate of the search is expected to take: with racing less than a whole block."""
    if not policy.look or space.objective.maximize in NO_RACE:
        return timing.block_s
    window_s = timing.block_s - timing.warmup_s
    raced = timing.warmup_s + policy.look * window_s
    raced += RACED_ON * (timing.warmup_s + (1 - policy.look) * window_s)
    return min(raced, timing.block_s)  # looks end by themselves where they do not pay


def _notes(space: Space, found: _Candidates, policy: Policy, whole: Ahead, pace: Pace) -> tuple[str, ...]:
    notes = []
    budget = space.budget
    pairs = planned_pairs(budget.launches, policy)
    if found.legal == 0:
        notes.append("nothing is left to try: every combination is ruled out, or is the baseline in effect")
    elif found.legal == 1:
        notes.append("only one candidate is left: the study compares it with the baseline, there is nothing to search")
    if found.proven:
        named = ", ".join(dict.fromkeys(name for name, _ in found.proven))
        room = budget.launches - 2 * pairs - 1
        most = (
            f", most of the search's {room} launches; give more, or fewer values"
            if 2 * len(found.proven) > room
            else ""
        )
        notes.append(
            f"{len(found.proven)} launches are canaries: values of {named}, each tried alone before it is searched"
            f"{most}"
        )
    if pairs < CLAIM_PAIRS:
        least = f"{CLAIM_PAIRS} pairs of confirmation, so at least {2 + 2 * CLAIM_PAIRS} launches"
        notes.append(f"a claim needs {least}; the budget is {budget.launches}")
    notes += _of_hours(budget.hours, pairs, whole, pace) if budget.hours is not None else []
    if found.legal is None:
        notes.append("the candidates cannot be listed: what rules out how many is not known")
    if found.none_drawn:
        notes.append(found.none_drawn)
    return tuple(notes)


def _of_hours(hours: float, pairs: int, whole: Ahead, pace: Pace) -> list[str]:
    """What a budget of hours leaves out, of `pairs` of confirmation and of the candidates."""
    notes = []
    if whole.pairs == 0 < pairs and (whole.candidates or whole.cut):
        launches = 2 + 2 * min(pairs, CLAIM_PAIRS)
        enough = math.ceil(launches * pace.launch_s / 36) / 100
        notes.append(
            f"the budget of {hours:g} hours holds no confirmation, so that nothing can be claimed; {enough:g} hours "
            f"hold the {launches} launches of one candidate and its confirmation"
        )
    elif 0 < whole.pairs < pairs:
        notes.append(f"the budget of {hours:g} hours holds {whole.pairs} of {pairs} pairs of confirmation")
    if whole.cut:
        notes.append(f"the budget of {hours:g} hours ends the search before all candidates are tried")
    return notes


def _beside_changes(space: Space, hot: frozenset[str], timing: Timing) -> tuple[str, ...]:
    """Told and not counted: nobody knows beforehand whether the best depth changes between two levels."""
    levels = sorted(space.workload.concurrency)
    gaps = any(high - low > 1 for low, high in pairwise(levels))
    if not gaps or not hot & {"speculation", "num_steps"}:
        return ()
    most = 4 * ROUNDS
    return (
        f"not counted: up to {most} blocks ({most * timing.block_s / 60:.0f} min) between two levels where the best "
        "depth changes, to find the load at which it should",
    )


def _not_held(space: Space) -> tuple[str, ...]:
    """Limits of the objective that a virtual clock cannot be held against."""
    if space.simulation is None or space.simulation.clock != "virtual":
        return ()
    guard, slo = space.objective.guard, space.objective.slo
    named = ["guard.ttft_p90_ms"] if guard.ttft_p90_ms is not None else []
    named += [f"slo.{name}" for name, most in slo or () if most is not None and name != "tpot_ms"]
    if not named:
        return ()
    said = " and ".join(f"objective.{name}" for name in named)
    return (
        f"nothing is held against {said}: blocks of a virtual clock have no latencies (simulation.clock: real has)",
    )


def _plain(space: Space, engine: StudyEngine) -> tuple[str, ...]:
    """What becomes of decoding without speculation, where the baseline speculates."""
    if not baseline_speculates(space):
        return ()
    tried = "the baseline speculates: plain decoding is tried once, as a candidate of its own"
    return (out_of_race(space, engine) or tried,)


class _Candidates:
    """Every combination of a space, sorted by what becomes of it."""

    def __init__(self, space: Space, engine: StudyEngine, crashed: Elsewhere) -> None:
        self.combinations: int | None = None
        self.legal: int | None = None
        self.scope = Scope()
        self.merged = 0
        self.ruled_out: tuple[RuledOut, ...] = ()
        self.proven: list[tuple[str, Any]] = []
        self.none_drawn = ""
        combinations = space.combinations()
        if combinations is None:
            self.none_drawn = none_drawn(space, engine)
            return
        effects = Effects(space, engine)
        hot = hot_settings(engine)
        known = {str(sorted(crash.settings.items())): crash.source for crash in crashed.crashed}
        regions = Regions(crashed.telling, [space.baseline.settings, *crashed.worked])
        why: Counter[tuple[str, str]] = Counter()
        first: dict[str, str] = {effects.of(space.baseline): space.baseline.id}
        legal: list[Candidate] = []
        proven = to_prove(space)
        why_not = legality(space, engine)
        found: set[tuple[str, Any]] = set()
        for each in combinations:
            candidate = each.candidate
            if rule := space.forbidden(candidate):
                why[rule, "space"] += 1
            elif problem := why_not(candidate):
                why[problem, "engine"] += 1
            elif source := known.get(str(sorted(candidate.settings.items()))):
                why[f"it crashed in {source} on this machine", "crash"] += 1
            elif region := regions.of(candidate.settings):
                why[f"{region} on this machine", "crash"] += 1
            elif (effect := effects.of(candidate)) in first:
                self.merged += 1
            else:
                first[effect] = candidate.id
                found.update(each for each in proven if candidate.settings.get(each[0]) == each[1])
                legal.append(candidate)
        self.combinations = len(combinations)
        self.legal, self.scope = len(legal), scope_to_try(legal, hot, space.baseline)
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
