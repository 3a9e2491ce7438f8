"""What a gain hangs on: streams by prompt kind and by context length. Pure functions of a study's blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.bench.axes import AXES, Group, context_words, groups
from tuner.records import Block, Pair
from tuner.study.data import StudyData

__all__ = ["AXES", "AxisChange", "axis_changes", "context_words"]


@dataclass(frozen=True)
class AxisChange:
    """How much faster one candidate's streams are on one class of requests (a ratio to the baseline), and the tokens
    per chunk on both sides; `name` is a prompt kind, or where a class of prompt lengths begins."""

    candidate_id: str
    concurrency: int
    axis: str
    name: str
    speedup: float
    baseline_ms: float
    candidate_ms: float
    baseline_tokens_per_chunk: float
    tokens_per_chunk: float
    baseline_requests: int
    requests: int


def axis_changes(data: StudyData, candidate_id: str, pairs: Sequence[Pair]) -> tuple[AxisChange, ...]:
    """A candidate in these pairs of its, by level; kinds first, then context lengths in order."""
    found = []
    for level in sorted(data.levels):
        mine = [pair for pair in pairs if pair.concurrency == level]
        sides = [
            _by_axis([data.blocks[pair.baseline_block].block for pair in mine]),
            _by_axis([data.blocks[pair.candidate_block].block for pair in mine]),
        ]
        for axis, name in sorted(sides[0].keys() & sides[1].keys(), key=_axis_order):
            base, other = (side[axis, name] for side in sides)
            found.append(
                AxisChange(
                    candidate_id,
                    level,
                    axis,
                    name,
                    base.ms_per_token / other.ms_per_token,
                    base.ms_per_token,
                    other.ms_per_token,
                    base.tokens_per_chunk,
                    other.tokens_per_chunk,
                    round(base.requests),
                    round(other.requests),
                )
            )
    return tuple(found)


def _axis_order(key: tuple[str, str]) -> tuple[bool, int, str]:
    axis, name = key
    return axis != "kind", int(name) if axis == "context" else 0, name


def _by_axis(blocks: Sequence[Block]) -> dict[tuple[str, str], Group]:
    """The classes of several blocks together, by their requests."""
    told: dict[tuple[str, str], list[Group]] = {}
    for block in blocks:
        for axis, name, group in groups(block.counters):
            if group.ms_per_token > 0:
                told.setdefault((axis, name), []).append(group)
    return {key: _together(several) for key, several in told.items()}


def _together(several: Sequence[Group]) -> Group:
    requests = math.fsum(group.requests for group in several)
    return Group(
        requests,
        math.fsum(group.requests * group.ms_per_token for group in several) / requests,
        math.fsum(group.requests * group.tokens_per_chunk for group in several) / requests,
    )
