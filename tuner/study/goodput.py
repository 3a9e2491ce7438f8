"""Goodput: the most tokens per second at which nine in ten requests keep the service level objective. Pure functions.

A block tells p90 of each latency, so whether its load keeps the limits is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tuner.records import Block, Pair, StoredBlock
from tuner.space.schema import SloSection

NONE = 0.5
"""A server that keeps the limits at no level counts as half as fast as at its lowest: finite, and never the best."""


def keeps(block: Block, slo: SloSection) -> bool:
    """Whether nine in ten of the requests of a block kept every limit.

    A latency that is not known does not count against it, but for the time per token: throughput tells its mean.
    """
    tpot = block.tpot_ms.p90
    if tpot is None and block.per_stream_tokens_per_s > 0:
        tpot = 1000 / block.per_stream_tokens_per_s
    told = ((block.ttft_ms.p90, slo.ttft_ms), (tpot, slo.tpot_ms), (block.e2e_ms.p90, slo.e2e_ms))
    return all(limit is None or value is None or value <= limit for value, limit in told)


def goodput(blocks: Iterable[Block], slo: SloSection) -> float:
    """Tokens per second at the best level that keeps the limits; half of those at the lowest level where none does."""
    every = sorted(blocks, key=lambda block: block.concurrency)
    good = [block.tokens_per_s for block in every if keeps(block, slo)]
    return max(good, default=NONE * every[0].tokens_per_s)


def log_gain(pairs: Iterable[Pair], blocks: Mapping[int, StoredBlock], slo: SloSection) -> float:
    """ln(goodput of the candidate / the baseline's) of pairs of one index, one a level."""
    some = list(pairs)
    before = goodput((blocks[pair.baseline_block].block for pair in some), slo)
    after = goodput((blocks[pair.candidate_block].block for pair in some), slo)
    return math.log(after / before)


def composites(
    pairs: Sequence[Pair], levels: Sequence[int], blocks: Mapping[int, StoredBlock], slo: SloSection
) -> list[float]:
    """`log_gain` of every index of the pairs of one candidate that has all levels, in order."""
    by_index: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_index.setdefault(pair.index, []).append(pair)
    whole = [some for _, some in sorted(by_index.items()) if {p.concurrency for p in some} >= set(levels)]
    return [log_gain(some, blocks, slo) for some in whole]


def best_level(blocks: Iterable[Block], slo: SloSection) -> int | None:
    """The highest level at which any of these blocks keeps the limits."""
    return max((block.concurrency for block in blocks if keeps(block, slo)), default=None)
