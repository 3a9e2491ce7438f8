"""Row by row: RMSNorm, gated SiLU, and the rotary embedding with the store into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.base import View


@triton.jit
def _rms_norm(delta, residual, weight, out, dim, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row: `out` = norm of (residual + delta), which is stored to `residual` when ADD."""
    row = tl.program_id(0).to(tl.int64) * dim
    at = tl.arange(0, BLOCK)
    inside = at < dim
    x = tl.load(residual + row + at, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded before it is normalised: what the next layer adds to is what was normalised here.
        x = (x.to(tl.float32) + tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    normed = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, normed.to(x.dtype), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """A program per row and block of columns."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=inside)


@triton.jit
def _rope_store(
    qkv, positions, slots, cos, sin, k_cache, v_cache, q_heads, kv_heads, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """A program per row and head: queries are rotated in place, keys rotated into the cache, values copied there."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    here = qkv + (row * (q_heads + 2 * kv_heads) + head) * 2 * HALF
    low = tl.load(here + at, mask=inside, other=0.0)
    high = tl.load(here + HALF + at, mask=inside, other=0.0)
    if head < q_heads + kv_heads:
        angle = tl.load(positions + row).to(tl.int64) * HALF
        c = tl.load(cos + angle + at, mask=inside, other=0.0)
        s = tl.load(sin + angle + at, mask=inside, other=0.0)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * c - b * s).to(low.dtype), (b * c + a * s).to(high.dtype)
    if head < q_heads:
        tl.store(here + at, low, mask=inside)
        tl.store(here + HALF + at, high, mask=inside)
    else:
        of_values = head >= q_heads + kv_heads
        slot = tl.load(slots + row)
        place = (slot * kv_heads + (head - q_heads) % kv_heads) * 2 * HALF
        if of_values:
            tl.store(v_cache + place + at, low, mask=inside)
            tl.store(v_cache + place + HALF + at, high, mask=inside)
        else:
            tl.store(k_cache + place + at, low, mask=inside)
            tl.store(k_cache + place + HALF + at, high, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`."""
    out = torch.empty_like(x)
    rows, dim = x.shape
    _rms_norm[(rows,)](x, x, weight, out, dim, eps, ADD=False, BLOCK=triton.next_power_of_2(dim))
    return out


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.add_rms_norm`."""
    out = torch.empty_like(residual)
    rows, dim = residual.shape
    _rms_norm[(rows,)](delta, residual, weight, out, dim, eps, ADD=True, BLOCK=triton.next_power_of_2(dim))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


def rope_store(
    qkv: Tensor, view: View, rope: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, q_heads: int
) -> None:
    """See `Ops.rope_store`."""
    kv_heads, dim = k_cache.shape[1:]
    half = dim // 2
    _rope_store[(len(qkv), q_heads + 2 * kv_heads)](
        qkv,
        view.positions,
        view.slots,
        *rope,
        k_cache,
        v_cache,
        q_heads,
        kv_heads,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
    )
