"""`Ops` by Triton kernels, with torch for the multiplications."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.ops.base import Fused, Linear, Stack, View
from engine.ops.grouped import GroupedWeight
from engine.ops.reference import ReferenceOps
from engine.ops.triton import attention, rows, tokens
from engine.ops.triton.attention import INTERPRETED
from engine.ops.triton.tuned import Tuned


class TritonOps:
    """For tensors on one GPU, or in Triton's interpreter on the CPU. `verified`: whether it has run on a GPU."""

    name = "triton"
    verified = False

    def __init__(self, tuned: Tuned | None = None) -> None:
        """`tuned`: which tilings attention uses; None: always the first."""
        self._reference = ReferenceOps()
        self._tuned = tuned or Tuned(None)

    def describe(self, weights: str) -> dict[str, str]:
        """See `Ops.describe`."""
        return {"linear": f"{weights}, torch", "attention": "triton, paged, split keys", "other": "triton"}

    def linear(
        self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, as_float: bool = False, weights: str = "auto"
    ) -> Linear:
        """See `Ops.linear`."""
        return self._reference.linear(weight, bias, as_float, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return rows.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.add_rms_norm`."""
        return rows.add_rms_norm(delta, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        return rows.silu_mul(gate_up)

    def rope_store(
        self, qkv: Tensor, view: View, rope: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, q_heads: int
    ) -> None:
        """See `Ops.rope_store`."""
        rows.rope_store(qkv, view, rope, k_cache, v_cache, q_heads)

    def attention(self, qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int) -> Tensor:
        """See `Ops.attention`."""
        requests, each = len(view.table_row), q_heads // k_cache.shape[1]
        if len(qkv) == requests and view.mask is None:
            tiling = self._tuned.pick(
                f"decode {_bucket(requests)}x{each}x{k_cache.shape[2]} {qkv.dtype}",
                attention.DECODE,
                lambda tiling: attention.decode(qkv, view, k_cache, v_cache, q_heads, tiling),
            )
            return attention.decode(qkv, view, k_cache, v_cache, q_heads, tiling)
        tiling = self._tuned.pick(
            f"extend {_bucket(len(qkv))}x{k_cache.shape[2]} {qkv.dtype}",
            attention.EXTEND,
            lambda tiling: attention.extend(qkv, view, k_cache, v_cache, q_heads, tiling),
        )
        return attention.extend(qkv, view, k_cache, v_cache, q_heads, tiling)

    def fuse(self, stack: Stack) -> Fused | None:
        """See `Ops.fuse`."""
        return None

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`."""
        if not logits.is_cuda and not INTERPRETED:
            return self._reference.argmax(logits)  # logits that were brought to the host
        return tokens.argmax(logits)

    def choose(
        self,
        logits: Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        coin: np.ndarray,
        min_p: np.ndarray,
    ) -> np.ndarray:
        """See `Ops.choose`."""
        return self._reference.choose(logits, temperature, top_k, top_p, coin, min_p)

    def likeliest(self, logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ops.likeliest`."""
        return self._reference.likeliest(logits, count)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `DeviceOps.best`."""
        return self._reference.best(logits, count)

    def sample(self, logits: Tensor, temperature: Tensor, coin: Tensor) -> Tensor:
        """See `DeviceOps.sample`."""
        return tokens.sample(logits, temperature, coin)

    def accept(
        self, drafts: Tensor, parent: Tensor, start: Tensor, chosen: Tensor, deepest: int, most: int
    ) -> tuple[Tensor, Tensor]:
        """See `DeviceOps.accept`."""
        return tokens.accept(drafts, parent, start, chosen, deepest, most)


def _bucket(count: int) -> int:
    """Shapes alike enough to share a tiling."""
    return 1 << (count - 1).bit_length()
