"""A study's records as the model of the search takes them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from operator import attrgetter

from tuner.bench.axes import groups
from tuner.records import Block, Candidate, Setting, StoredBlock
from tuner.search.evidence import Accepted, Evidence, Measurement
from tuner.search.guide import Costs, Goal, Limit
from tuner.space.space import SPECULATIVE, visible
from tuner.study.crashes import crashes_seen
from tuner.study.data import StoredLaunch, StudyData
from tuner.study.hot import candidate_s, start_s
from tuner.study.score import weights

USUAL_WINDOW_S = 30.0
BLOCK_SD = 0.012
"""Of ln(tokens per second) of a window of this length; shorter ones are noisier."""

CHUNKS_ARE_STEPS = 0.15
"""So close to the tokens per verify step the tokens per chunk are, where a server sends a chunk a step."""


class Reader:
    """Reads a study as it grows. Each block is taken to pieces once: there may be thousands."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[StoredBlock, float, Measurement | None]] = {}

    def measurements(self, data: StudyData) -> list[Measurement]:
        """Of all blocks that tell of throughput, in order, as if of one host."""
        slower = {place: math.exp(-ahead) for place, ahead in place_speeds(data).items()}
        scales = {launch.id: slower.get(launch.place, 1.0) for launch in data.launches}
        found = []
        for stored in sorted(data.blocks.values(), key=_order):
            scale = scales.get(stored.launch_id, 1.0)
            known = self._read.get(stored.id)
            if known is None or known[0] is not stored or known[1] != scale:
                told = _measurement(data, stored, scale) if _tells(stored) else None
                known = self._read[stored.id] = stored, scale, told
            if known[2] is not None:
                found.append(known[2])
        return found


_order = attrgetter("order")


def _tells(stored: StoredBlock) -> bool:
    """Whether a block tells of its candidate's throughput."""
    return stored.role != "edge" and stored.block.valid and stored.block.tokens_per_s > 0


def evidence_of(data: StudyData, reader: Reader | None = None) -> Evidence:
    """All valid blocks, as if of one host, and the candidates that could not be measured."""
    measured = (reader or Reader()).measurements(data)
    failed = [
        data.candidates[trial.candidate_id]
        for trial in data.trials
        if trial.kind in ("measured", "known_crash") and not trial.running and trial.constraints.get("launch", 0) > 0
    ]
    crashed = (Candidate(crash.settings) for crash in crashes_seen(data).crashed)
    return Evidence(tuple(measured), tuple(failed), tuple(crashed))


def fixed_of(data: StudyData) -> dict[str, Setting]:
    """The settings that all candidates of a study share."""
    return visible(data.space.args)


def place_speeds(data: StudyData) -> dict[str, float]:
    """Place → ln of how fast it is, by its baseline, against the mean of all places.

    The model learns from tokens per second; hosts of one kind differ in them by more than candidates do.
    """
    at = {launch.id: launch.place for launch in data.launches}
    seen: dict[int, dict[str, list[float]]] = {}
    baseline = data.baseline.id
    for stored in data.blocks.values():
        if stored.candidate_id == baseline and _tells(stored):
            places = seen.setdefault(stored.concurrency, {})
            places.setdefault(at.get(stored.launch_id, ""), []).append(math.log(stored.block.tokens_per_s))
    offsets: dict[str, list[float]] = {}
    for places in seen.values():
        means = {place: math.fsum(values) / len(values) for place, values in places.items()}
        middle = math.fsum(means.values()) / len(means)
        for place, mean in means.items():
            offsets.setdefault(place, []).append(mean - middle)
    return {place: math.fsum(values) / len(values) for place, values in offsets.items()}


def _measurement(data: StudyData, stored: StoredBlock, scale: float) -> Measurement:
    """`scale`: what the block's place has to be multiplied by, to be as fast as the mean of all."""
    block = stored.block
    sd = BLOCK_SD * math.sqrt(max(1.0, USUAL_WINDOW_S / max(block.window_s, 1.0)))
    return Measurement(
        data.candidates[stored.candidate_id],
        stored.concurrency,
        block.tokens_per_s * scale,
        block.accept_length,
        block.ttft_ms.p90,
        block.tpot_ms.p90,
        block.e2e_ms.p90,
        sd,
        accepted_of(block),
    )


def accepted_of(block: Block) -> Accepted:
    """What a block's counters tell of its drafts, by depth and by prompt kind.

    A kind's tokens per verify step are those of all, times its tokens per chunk over those of all requests. Where a
    chunk is not a step (a server that sends token by token, or counts only the steps that had a draft) chunks tell
    nothing of kinds.
    """
    counters = block.counters
    if not block.accept_length:
        return Accepted()
    steps = counters.get("server_verify_steps", 0.0)
    reached: list[float] = []
    while steps > 0 and (count := counters.get(f"accepted_at_depth_{len(reached) + 1}")) is not None:
        reached.append(count / steps)
    chunks = counters.get("chunks", 0.0)
    whole = block.tokens / chunks if chunks > 0 else 0.0
    if not abs(whole / block.accept_length - 1) < CHUNKS_ARE_STEPS:
        return Accepted(steps, tuple(reached))
    kinds = [
        (name, group.requests, group.tokens or group.requests, block.accept_length * group.tokens_per_chunk / whole)
        for axis, name, group in groups(counters)
        if axis == "kind" and group.tokens_per_chunk > 0
    ]
    return Accepted(steps, tuple(reached), tuple(kinds))


def costs_of(
    data: StudyData, hot: frozenset[str], launch: StoredLaunch | None, *, stay: bool = False, each: float = 1.0
) -> Costs:
    """What a launch and the blocks of a candidate have taken so far, and what can change on the server of a launch.

    With `stay` that server is all there is. A launch that failed has left none. Of all starts only the first counts,
    in coarse steps: so a study that was killed proposes what it would have otherwise. A launch whose server can be
    changed to the baseline has it measured there first, in as long as a candidate takes.

    Where launches are scarcer than time, a launch counts for more than it takes: as many candidates as `each` of those
    left has to serve, if all that are wanted are to be tried.
    """
    if launch is not None and launch.failure is not None and not stay:
        launch = None
    usual = Costs()
    blocks_s = max(1.0, candidate_s(data) or usual.blocks_s)
    return Costs(
        launch_s=max(start_s(data) or usual.launch_s, blocks_s * (each - 1) if hot else 0.0),
        blocks_s=blocks_s,
        hot=hot,
        running=data.settings_of(launch.slot.candidate_id) if launch is not None else None,
        stay=stay,
        idle=SPECULATIVE,
        baseline=data.baseline.settings if hot else None,
        turn_s=blocks_s if hot else 0.0,
        scarce=bool(hot) and each > 1,
    )


def goal_of(data: StudyData) -> Goal:
    """What the study's objective asks for, in the order of its levels.

    For `pareto` other weights of the levels with every trial, so that the whole front is sought. For `goodput` the
    limits of the objective hold at the level that has the weight.
    """
    return _goal(data, _some_weights(data) if data.space.objective.maximize == "pareto" else weights(data))


def goals_of(data: StudyData) -> tuple[Goal, ...]:
    """All that has to be out of reach before more search cannot pay: for `pareto` every level alone as well."""
    goal = goal_of(data)
    if data.space.objective.maximize != "pareto":
        return (goal,)
    alone = [_goal(data, {each: float(each == level) for each in data.levels}) for level in data.levels]
    return (*alone, _goal(data, weights(data)), goal)


def _goal(data: StudyData, weight: Mapping[int, float]) -> Goal:
    guard, slo = data.space.objective.guard, data.space.objective.slo
    least = math.log(guard.min_speedup) if guard.min_speedup is not None else None
    asked: list[tuple[str, float | None, int | None]] = [
        ("ttft_p90_ms", guard.ttft_p90_ms, None),
        ("tpot_p90_ms", guard.tpot_p90_ms, None),
    ]
    if slo is not None:
        level = max(data.levels, key=lambda each: weight[each])
        asked += [
            ("ttft_p90_ms", slo.ttft_ms, level),
            ("tpot_p90_ms", slo.tpot_ms, level),
            ("e2e_p90_ms", slo.e2e_ms, level),
        ]
    limits = tuple(Limit(name, most, level) for name, most, level in asked if most is not None)
    return Goal(tuple(weight[level] for level in data.levels), least, limits)


def _some_weights(data: StudyData) -> dict[int, float]:
    draw = random.Random(f"{data.seed}/pareto/{len(data.trials)}")
    drawn = {level: draw.expovariate(1.0) for level in data.levels}
    return {level: value / math.fsum(drawn.values()) for level, value in drawn.items()}
