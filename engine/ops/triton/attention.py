"""Attention over the paged cache: a decode kernel that splits the keys, and one for rows that see a tree or a chunk.

Both are flash attention (Dao, 2023): one pass over the keys with a running maximum. The split of a long context over
several programs, whose results are weighted together, follows Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.base import View

INTERPRETED = bool(triton.knobs.runtime.interpret)
_LEAST = 16  # rows and columns of a tensor core's tile


@dataclass(frozen=True)
class Tiling:
    """What may be tuned: keys a step, rows a program (extend), programs a context (decode), warps."""

    keys: int = 64
    rows: int = 16
    splits: int = 1
    warps: int = 4


DECODE = tuple(
    Tiling(keys=keys, splits=splits, warps=w) for splits in (8, 1, 4, 16) for keys in (64, 32) for w in (4, 2)
)
EXTEND = tuple(Tiling(keys=keys, rows=rows, warps=w) for rows in (16, 64) for keys in (64, 32) for w in (4, 8))
"""What may be fastest on some device, what usually is first."""


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """float32 a · b; WIDE: of float32 operands, since Triton's interpreter cannot multiply bfloat16 ones."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _slots(page_table, pages_per_row, table_row, page_size, at, inside):
    """Of these logical positions of a request."""
    page = tl.load(page_table + table_row.to(tl.int64) * pages_per_row + at // page_size, mask=inside, other=0)
    return page.to(tl.int64) * page_size + at % page_size


@triton.jit
def _decode(
    qkv, k_cache, v_cache, page_table, pages_per_row, page_size, table_rows, row_start, context, scale,
    best_out, sum_out, mixed_out, q_heads, kv_heads, stride,
    EACH: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program per request, KV head and part of the context: its query heads at once, unnormalised."""
    b, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_start + b).to(tl.int64)
    length = tl.load(context + b) + 1
    table_row = tl.load(table_rows + b)
    heads, d = tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    mine = (heads[:, None] < EACH) & (d[None, :] < DIM)
    q = tl.load(qkv + row * stride + (g * EACH + heads[:, None]) * DIM + d[None, :], mask=mine, other=0.0)
    share = tl.cdiv(tl.cdiv(length, KEYS), SPLITS) * KEYS
    first = part * share
    last = tl.minimum(length, first + share)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for start in range(first, last, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < last
        slots = _slots(page_table, pages_per_row, table_row, page_size, at, inside)
        there = (slots[:, None] * kv_heads + g) * DIM + d[None, :]
        seen = inside[:, None] & (d[None, :] < DIM)
        k = tl.load(k_cache + there, mask=seen, other=0.0)
        v = tl.load(v_cache + there, mask=seen, other=0.0)
        scores = _dot(q, tl.trans(k), WIDE) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + _dot(weights.to(v.dtype), v, WIDE)
        best = higher
    place = ((b * kv_heads + g) * SPLITS + part) * HEADS + heads
    tl.store(best_out + place, best)
    tl.store(sum_out + place, total)
    tl.store(mixed_out + place[:, None] * BLOCK_D + d[None, :], mixed)


@triton.jit
def _combine(
    best_in, sum_in, mixed_in, row_start, out, q_heads, kv_heads,
    EACH: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program per request and query head: the parts of its context, weighted together."""
    b, head = tl.program_id(0), tl.program_id(1)
    parts, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    place = ((b * kv_heads + head // EACH) * SPLITS + parts) * HEADS + head % EACH
    best = tl.load(best_in + place, mask=parts < SPLITS, other=float("-inf"))
    weights = tl.exp(best - tl.max(best, axis=0))
    total = tl.sum(weights * tl.load(sum_in + place, mask=parts < SPLITS, other=0.0), axis=0)
    mixed = tl.load(mixed_in + place[:, None] * BLOCK_D + d[None, :], mask=(parts < SPLITS)[:, None], other=0.0)
    result = tl.sum(weights[:, None] * mixed, axis=0) / total
    row = tl.load(row_start + b).to(tl.int64)
    tl.store(out + (row * q_heads + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _extend(
    qkv, k_cache, v_cache, page_table, pages_per_row, page_size, table_rows, row_start, context, mask, mask_start,
    mask_width, block_request, block_first, scale, out, q_heads, kv_heads, stride,
    EACH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WIDTHS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program per block of rows of one request and query head. Rows see the context, and of what is behind it what
    their mask says, or what is not after them."""
    b, head = tl.load(block_request + tl.program_id(0)), tl.program_id(1)
    g = head // EACH
    start_row = tl.load(row_start + b)
    rows = tl.load(row_start + b + 1) - start_row
    known = tl.load(context + b)
    table_row = tl.load(table_rows + b)
    width = rows
    if WIDTHS:
        width = tl.load(mask_width + b)
    base = tl.load(mask_start + b)
    width = tl.where(base >= 0, width, rows)
    local, d = tl.load(block_first + tl.program_id(0)) + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    present = local < rows
    where = (start_row + local).to(tl.int64)
    mine = present[:, None] & (d[None, :] < DIM)
    q = tl.load(qkv + where[:, None] * stride + head * DIM + d[None, :], mask=mine, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
    length = tl.where(tl.load(block_first + tl.program_id(0)) < rows, known + width, 0)
    causal = tl.where(base >= 0, -1, rows)  # places behind the context that a row sees without a mask, at most
    under_mask = tl.where(base >= 0, known, length)
    for start in range(0, length, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < length
        slots = _slots(page_table, pages_per_row, table_row, page_size, at, inside)
        there = (slots[:, None] * kv_heads + g) * DIM + d[None, :]
        loaded = inside[:, None] & (d[None, :] < DIM)
        k = tl.load(k_cache + there, mask=loaded, other=0.0)
        v = tl.load(v_cache + there, mask=loaded, other=0.0)
        behind = at[None, :] - known
        seen = behind <= tl.minimum(local[:, None], causal)
        if MASKED:
            asked = present[:, None] & inside[None, :] & (at[None, :] >= under_mask)
            told = tl.load(mask + base + local[:, None].to(tl.int64) * width + behind, mask=asked, other=0)
            seen = seen | (told != 0)
        seen = (seen | (behind < 0)) & inside[None, :]
        scores = _dot(q, tl.trans(k), WIDE) * scale
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps weights of zero, not NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(best - safe)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + _dot(weights.to(v.dtype), v, WIDE)
        best = higher
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + (where[:, None] * q_heads + head) * DIM + d[None, :], result.to(out.dtype.element_ty), mask=mine)


def decode(qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int, tiling: Tiling) -> Tensor:
    """One row of each request."""
    kv_heads, dim = k_cache.shape[1:]
    requests, each = len(view.table_row), q_heads // kv_heads
    heads, block_d = max(_LEAST, triton.next_power_of_2(each)), max(_LEAST, triton.next_power_of_2(dim))
    places = requests * kv_heads * tiling.splits * heads
    best, total = (torch.empty(places, dtype=torch.float32, device=qkv.device) for _ in range(2))
    mixed = torch.empty(places, block_d, dtype=torch.float32, device=qkv.device)
    out = torch.empty(requests, q_heads * dim, dtype=qkv.dtype, device=qkv.device)
    shape = {"EACH": each, "HEADS": heads, "DIM": dim, "BLOCK_D": block_d, "SPLITS": tiling.splits}
    _decode[(requests, kv_heads, tiling.splits)](
        qkv, k_cache, v_cache, view.page_table, view.page_table.stride(0), view.page_size, view.table_row,
        view.row_start, view.context, dim**-0.5, best, total, mixed, q_heads, kv_heads, qkv.stride(0),
        **shape, KEYS=tiling.keys, WIDE=INTERPRETED, num_warps=tiling.warps,
    )  # fmt: skip
    _combine[(requests, q_heads)](
        best, total, mixed, view.row_start, out, q_heads, kv_heads,
        **shape, BLOCK_S=triton.next_power_of_2(tiling.splits),
    )  # fmt: skip
    return out


def extend(qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int, tiling: Tiling) -> Tensor:
    """Any rows of each request, causal or under a mask."""
    kv_heads, dim = k_cache.shape[1:]
    # As many programs as there can be blocks at most: how many there are is known on the device alone, and asking it
    # would wait for it.
    requests, most = len(view.table_row), len(qkv) // tiling.rows + len(view.table_row)
    blocks = (view.row_start.diff() + tiling.rows - 1) // tiling.rows
    ends = blocks.cumsum(0)
    index = torch.arange(most, device=qkv.device)
    request = torch.searchsorted(ends, index, right=True).clamp_(max=requests - 1)
    first = (index - (ends - blocks)[request]) * tiling.rows
    out = torch.empty(len(qkv), q_heads * dim, dtype=qkv.dtype, device=qkv.device)
    nothing = view.mask_start
    _extend[(most, q_heads)](
        qkv, k_cache, v_cache, view.page_table, view.page_table.stride(0), view.page_size, view.table_row,
        view.row_start, view.context, nothing if view.mask is None else view.mask, view.mask_start,
        nothing if view.mask_width is None else view.mask_width, request.int(), first.int(), dim**-0.5, out,
        q_heads, kv_heads, qkv.stride(0),
        EACH=q_heads // kv_heads, DIM=dim, BLOCK_D=max(_LEAST, triton.next_power_of_2(dim)), ROWS=tiling.rows,
        KEYS=tiling.keys, MASKED=view.mask is not None, WIDTHS=view.mask_width is not None,
        WIDE=INTERPRETED, num_warps=tiling.warps,
    )  # fmt: skip
    return out
