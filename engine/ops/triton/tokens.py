"""Choosing tokens and accepting drafts without bringing logits to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _argmax(logits, out, vocab, BLOCK: tl.constexpr):
    """A program per row: the first largest; -1 where there is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    best, at, broken = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32), axis=0)
        x = tl.where(x == x, x, float("-inf"))
        top = tl.max(x, axis=0)
        where = tl.min(tl.where((x == top) & inside, ids, _NONE), axis=0)
        at = tl.where(top > best, where, at)
        best = tl.maximum(best, top)
    tl.store(out + row, tl.where(broken > 0, -1, at).to(tl.int64))


@triton.jit
def _sample(logits, temperature, coin, out, vocab, BLOCK: tl.constexpr):
    """A program per row: the first token whose cumulative probability exceeds the coin; -1 where there is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    best, broken = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32), axis=0)
        best = tl.maximum(best, tl.max(tl.where(x == x, x, float("-inf")), axis=0))
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf")).to(tl.float64)
        total += tl.sum(tl.exp((x - best) / heat), axis=0)
    wanted = tl.load(coin + row) * total
    before = tl.full([], 0.0, tl.float64)
    at, last = tl.full([], _NONE, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf")).to(tl.float64)
        weights = tl.exp((x - best) / heat)
        cumulative = before + tl.cumsum(weights, axis=0)
        at = tl.minimum(at, tl.min(tl.where((cumulative > wanted) & (weights > 0), ids, _NONE), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), axis=0))
        before += tl.sum(weights, axis=0)
    tl.store(out + row, tl.where(broken > 0, -1, tl.minimum(at, last)).to(tl.int64))


@triton.jit
def _accept(tokens, parent, start, chosen, length, path, DEPTH: tl.constexpr, NODES: tl.constexpr):
    """A program per request: down the tree, from each node to the child that was chosen there."""
    b = tl.program_id(0)
    first, end = tl.load(start + b), tl.load(start + b + 1)
    at = first + tl.arange(0, NODES)
    inside = at < end
    drafted = tl.load(tokens + at, mask=inside, other=-2)
    above = tl.load(parent + at, mask=inside, other=-2)
    node, count = first, tl.full([], 1, tl.int64)
    tl.store(path + b * DEPTH, node)
    for depth in range(1, DEPTH):
        wanted = tl.load(chosen + tl.maximum(node, 0))
        child = tl.min(tl.where(inside & (above == node) & (drafted == wanted) & (node >= 0), at, end), axis=0)
        node = tl.where(child < end, child, -1)
        count += (child < end).to(tl.int64)
        tl.store(path + b * DEPTH + depth, node)
    tl.store(length + b, count)


def argmax(logits: Tensor) -> Tensor:
    """See `Ops.argmax`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _argmax[(len(logits),)](logits, out, logits.shape[1], BLOCK=min(_BLOCK, triton.next_power_of_2(logits.shape[1])))
    return out


def sample(logits: Tensor, temperature: Tensor, coin: Tensor) -> Tensor:
    """One token per row of float32 logits [R, V], int64 [R], by float64 temperatures above 0 and coins in [0, 1).

    As `engine.ops.sampling.choose` does it for rows without top-k, top-p and min-p.
    """
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
    _sample[(len(logits),)](logits, temperature, coin, out, logits.shape[1], BLOCK=block)
    return out


def accept(
    tokens: Tensor, parent: Tensor, start: Tensor, chosen: Tensor, deepest: int, most: int
) -> tuple[Tensor, Tensor]:
    """`engine.spec.accept.accept` on the device: lengths, int64 [B], and paths, int64 [B, deepest + 1].

    tokens, parent, chosen: int64 [N]; start: int64 [B + 1]; `most`: nodes of the largest tree.
    """
    requests = len(start) - 1
    length = torch.empty(requests, dtype=torch.int64, device=tokens.device)
    path = torch.empty(requests, deepest + 1, dtype=torch.int64, device=tokens.device)
    _accept[(requests,)](
        tokens, parent, start, chosen, length, path, DEPTH=deepest + 1, NODES=triton.next_power_of_2(most)
    )
    return length, path
