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
    return all(value <= limit for _, value, limit in _told(block, slo))


def _told(block: Block, slo: SloSection) -> list[tuple[str, float, float]]:
    """Name, p90 and limit of every latency that is limited and known, in milliseconds."""
    p90 = {"ttft_ms": block.ttft_ms.p90, "tpot_ms": tpot_p90(block), "e2e_ms": block.e2e_ms.p90}
    return [(name, ms, most) for name, most in slo if most is not None and (ms := p90[name]) is not None]


def tpot_p90(block: Block) -> float | None:
    """p90 of the time per token, in milliseconds; its mean where that is not known, which throughput tells."""
    if block.tpot_ms.p90 is None and block.per_stream_tokens_per_s > 0:
        return 1000 / block.per_stream_tokens_per_s
    return block.tpot_ms.p90


def unknown_limits(blocks: Iterable[Block], slo: SloSection) -> list[str]:
    """The limits that none of the blocks can be held against."""
    told = {name for block in blocks for name, _, _ in _told(block, slo)}
    return [name for name, most in slo if most is not None and name not in told]


def goodput(blocks: Iterable[Block], slo: SloSection) -> float:
    """Tokens per second at the best level that keeps the limits; half of those at the lowest level where none does."""
    every = sorted(blocks, key=lambda block: block.concurrency)
    good = [block.tokens_per_s for block in every if keeps(block, slo)]
    return max(good, default=NONE * every[0].tokens_per_s)


def log_gain(pairs: Iterable[Pair], blocks: Mapping[int, StoredBlock], slo: SloSection) -> float:
    """ln(goodput of the candidate / the baseline's) of pairs of one index, one a level; 0 where neither has any."""
    some = list(pairs)
    before = [blocks[pair.baseline_block].block for pair in some]
    after = [blocks[pair.candidate_block].block for pair in some]
    if best_level((*before, *after), slo) is None:
        return 0.0
    return math.log(goodput(after, slo) / goodput(before, slo))


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


def nobody_keeps(blocks: Sequence[Block], slo: SloSection) -> str:
    """A sentence for where none of these blocks keeps the limits, with the least of each latency; "" where one does."""
    if not blocks or best_level(blocks, slo) is not None:
        return ""
    least: dict[str, tuple[float, int, float]] = {}
    for block in blocks:
        for name, ms, most in _told(block, slo):
            least[name] = min(least.get(name, (math.inf, 0, most)), (ms, block.concurrency, most))
    seen = "; ".join(
        f"the lowest p90 of {name} was {ms:.4g} ms at concurrency {level}, limit {most:g} ms"
        for name, (ms, level, most) in least.items()
    )
    return (
        f"No block keeps these limits, the baseline's as little as any candidate's: nobody has goodput, and none wins "
        f"overall ({seen}). Raise the limits, or name a lower concurrency."
    )
