"""Adding up what several GPUs show each other."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_parts(parts, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """A program per block: the parts, by their addresses, in the order of the ranks, in float32, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(RANKS):
        part = tl.load(parts + rank).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, ranks: int, out: Tensor) -> None:
    """out [n] = the sum of the n values of its type at each address of `parts`, int64 [ranks]."""
    _add_parts[(triton.cdiv(out.numel(), _BLOCK),)](parts, out, out.numel(), RANKS=ranks, BLOCK=_BLOCK)
