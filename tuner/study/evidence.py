"""A study's records as the model of the search takes them."""

from __future__ import annotations

import math
import random

from tuner.records import Candidate, StoredBlock
from tuner.search.evidence import Evidence, Measurement
from tuner.search.guide import Costs, Goal
from tuner.space.space import SPECULATIVE
from tuner.study.crashes import crashes_seen
from tuner.study.data import StoredLaunch, StudyData
from tuner.study.hot import candidate_s, start_s
from tuner.study.score import weights

USUAL_WINDOW_S = 30.0
BLOCK_SD = 0.012
"""Of ln(tokens per second) of a window of this length; shorter ones are noisier."""


def evidence_of(data: StudyData) -> Evidence:
    """All valid blocks, as if of one host, and the candidates that could not be measured."""
    fast = place_speeds(data)
    at = {launch.id: launch.place for launch in data.launches}
    blocks = sorted(data.blocks.values(), key=lambda stored: stored.order)
    usable = [b for b in blocks if b.block.valid and b.block.tokens_per_s > 0 and b.role != "edge"]
    slower = {place: math.exp(-ahead) for place, ahead in fast.items()}
    measured = [_measurement(data, stored, slower.get(at.get(stored.launch_id, ""), 1.0)) for stored in usable]
    failed = [
        data.candidates[trial.candidate_id]
        for trial in data.trials
        if trial.kind in ("measured", "known_crash") and not trial.running and trial.constraints.get("launch", 0) > 0
    ]
    crashed = (Candidate(crash.settings) for crash in crashes_seen(data).crashed)
    return Evidence(tuple(measured), tuple(failed), tuple(crashed))


def place_speeds(data: StudyData) -> dict[str, float]:
    """Place → ln of how fast it is, by its baseline, against the mean of all places.

    The model learns from tokens per second; hosts of one kind differ in them by more than candidates do.
    """
    at = {launch.id: launch.place for launch in data.launches}
    seen: dict[int, dict[str, list[float]]] = {}
    for stored in data.blocks.values():
        if stored.role == "edge":
            continue
        if stored.candidate_id == data.baseline.id and stored.block.valid and stored.block.tokens_per_s > 0:
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
        sd,
    )


def costs_of(data: StudyData, hot: frozenset[str], launch: StoredLaunch | None, *, stay: bool = False) -> Costs:
    """What a launch and the blocks of a candidate have taken so far, and what can change on the server of a launch.

    With `stay` that server is all there is. A launch that failed has left none. Of all starts only the first counts,
    in coarse steps: so a study that was killed proposes what it would have otherwise.
    """
    if launch is not None and launch.failure is not None and not stay:
        launch = None
    usual = Costs()
    return Costs(
        launch_s=start_s(data) or usual.launch_s,
        blocks_s=max(1.0, candidate_s(data) or usual.blocks_s),
        hot=hot,
        running=data.settings_of(launch.slot.candidate_id) if launch is not None else None,
        stay=stay,
        idle=SPECULATIVE,
    )


def goal_of(data: StudyData) -> Goal:
    """What the study's objective asks for, in the order of its levels.

    For `pareto` other weights of the levels with every trial, so that the whole front is sought.
    """
    guard = data.space.objective.guard
    weight = weights(data)
    if data.space.objective.maximize == "pareto":
        weight = _some_weights(data)
    least = math.log(guard.min_speedup) if guard.min_speedup is not None else None
    return Goal(tuple(weight[level] for level in data.levels), least, guard.ttft_p90_ms)


def _some_weights(data: StudyData) -> dict[int, float]:
    draw = random.Random(f"{data.seed}/pareto/{len(data.trials)}")
    drawn = {level: draw.expovariate(1.0) for level in data.levels}
    return {level: value / math.fsum(drawn.values()) for level, value in drawn.items()}
