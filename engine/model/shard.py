"""Which part of a model each rank of a tensor-parallel group has.

Attention is cut between groups of heads: one KV head and the query heads that read it. Groups are spread as evenly as
they go, so three of them over two ranks are 2 + 1. The MLP's columns are then cut so that all ranks have about the same
number of weights: who has more heads gets fewer columns. The output layer is cut by vocabulary; embeddings and norms
are whole on every rank. So a layer has two sums over the ranks (behind attention and MLP), and a forward one gather
(of logits).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.collectives.base import Group
from engine.errors import InvalidConfig
from engine.ops.grouped import GROUP

_VOCAB_UNIT = 16


@dataclass(frozen=True)
class Sizes:
    """Of a model or a draft head, in elements."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


@dataclass(frozen=True)
class Shard:
    """What one rank has: ranges of heads, of the MLP's inner columns, and of the vocabulary.

    `widths`: of the vocabulary, every rank's part.
    """

    q_heads: range
    kv_heads: range
    inner: range
    vocab: range
    widths: tuple[int, ...]


def shards(sizes: Sizes, ranks: int) -> tuple[Shard, ...]:
    """Every rank's part; of one rank, everything.

    Raises:
        InvalidConfig: there is not something of everything for every rank; the message says how many ranks can be.
    """
    most = sizes.kv_heads
    if ranks > most:
        raise InvalidConfig(
            f"tp: {ranks} ranks, but the model has {most} KV head{'s' * (most > 1)}, and each rank needs one of its "
            f"own; valid: 1 to {most}"
        )
    each = sizes.q_heads // sizes.kv_heads
    heads = _even(sizes.kv_heads, ranks)
    inner = _balanced(sizes, heads)
    vocab = _even(sizes.vocab, ranks, _VOCAB_UNIT)
    if min(map(len, (*inner, *vocab))) < 1:
        raise InvalidConfig(f"tp: {ranks} ranks are too many for a model this small; valid: 1 to {ranks - 1}")
    widths = tuple(map(len, vocab))
    return tuple(
        Shard(range(kv.start * each, kv.stop * each), kv, columns, ids, widths)
        for kv, columns, ids in zip(heads, inner, vocab, strict=True)
    )


def cut_over(group: Group, kv_heads: int) -> Group:
    """The ranks that a draft is cut over: all, or, where it has too few heads for them, each alone has all of it."""
    return group if kv_heads >= group.ranks else Group()


def _even(total: int, parts: int, unit: int = 1) -> list[range]:
    """`total` in ranges as equal as can be, the larger ones first, cut at multiples of `unit`."""
    units = -(-total // unit)
    sizes = [units // parts + (i < units % parts) for i in range(parts)]
    return _ranges([size * unit for size in sizes], total)


def _balanced(sizes: Sizes, heads: list[range]) -> list[range]:
    """The MLP's columns, so that attention and MLP together weigh the same everywhere, as nearly as units allow."""
    ranks = len(heads)
    # Whole groups of numbers, so that int8 and int4 weights are cut without being rounded again.
    unit = GROUP if sizes.intermediate >= 2 * ranks * GROUP else 1
    each = sizes.q_heads // sizes.kv_heads
    group = sizes.hidden * sizes.head_dim * (2 * each + 2)
    column = 3 * sizes.hidden
    whole = (sizes.kv_heads * group + sizes.intermediate * column) / ranks
    wanted = [max(0.0, whole - len(part) * group) for part in heads]
    # One unit for everybody, and of the rest what each lacks.
    spare = -(-sizes.intermediate // unit) - ranks
    ends, reached = [], 0.0
    for rank, part in enumerate(wanted, 1):
        reached += part / sum(wanted)
        ends.append((rank + round(reached * spare)) * unit)
    return _ranges([end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)], sizes.intermediate)


def _ranges(sizes: list[int], total: int) -> list[range]:
    found, start = [], 0
    for size in sizes:
        end = min(total, start + size)
        found.append(range(start, end))
        start = end
    return found
