"""A study's records as the model of the search takes them."""

from __future__ import annotations

import math

from tuner.records import StoredBlock
from tuner.search.evidence import Evidence, Measurement
from tuner.search.guide import Goal
from tuner.study.data import StudyData
from tuner.study.score import weights

USUAL_WINDOW_S = 30.0
BLOCK_SD = 0.012
"""Of ln(tokens per second) of a window of this length; shorter ones are noisier."""


def evidence_of(data: StudyData) -> Evidence:
    """All valid blocks, and the candidates that could not be measured."""
    blocks = sorted(data.blocks.values(), key=lambda stored: stored.order)
    measured = [_measurement(data, stored) for stored in blocks if stored.block.valid and stored.block.tokens_per_s > 0]
    failed = [
        data.candidates[trial.candidate_id]
        for trial in data.trials
        if trial.kind in ("measured", "known_crash") and not trial.running and trial.constraints.get("launch", 0) > 0
    ]
    return Evidence(tuple(measured), tuple(failed))


def _measurement(data: StudyData, stored: StoredBlock) -> Measurement:
    block = stored.block
    sd = BLOCK_SD * math.sqrt(max(1.0, USUAL_WINDOW_S / max(block.window_s, 1.0)))
    return Measurement(
        data.candidates[stored.candidate_id],
        stored.concurrency,
        block.tokens_per_s,
        block.accept_length,
        block.ttft_ms.p90,
        sd,
    )


def goal_of(data: StudyData) -> Goal:
    """What the study's objective asks for, in the order of its levels."""
    guard = data.space.objective.guard
    weight = weights(data)
    least = math.log(guard.min_speedup) if guard.min_speedup is not None else None
    return Goal(tuple(weight[level] for level in data.levels), least, guard.ttft_p90_ms)
