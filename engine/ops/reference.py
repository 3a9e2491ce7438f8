"""The operations in plain torch, on any device: the oracle that faster ones are tested against, and the fallback."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import sampling
from engine.ops.base import Fused, Linear, Stack, View
from engine.ops.grouped import KINDS, GroupedWeight, grouped_linear, quantize


class ReferenceOps:
    """Clear rather than fast; attention gathers each request's keys."""

    name = "reference"

    def describe(self, weights: str) -> dict[str, str]:
        """See `Ops.describe`."""
        return {"linear": f"{weights}, torch", "attention": "torch, gathered", "other": "torch"}

    def linear(
        self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, as_float: bool = False, weights: str = "auto"
    ) -> Linear:
        """See `Ops.linear`. Whole numbers are kept as the float32 values they stand for."""
        if isinstance(weight, Tensor) and weights in KINDS:
            weight = quantize(weight, weights)
        if isinstance(weight, GroupedWeight):
            values = weight.dequantize()

            def multiply(x: Tensor) -> Tensor:
                out = grouped_linear(x, values, bias)
                return out if as_float else out.to(x.dtype)

            return multiply
        kept = weight.bfloat16() if weights == "bf16" else weight

        def apply(x: Tensor) -> Tensor:
            out = functional.linear(x, kept.to(x.dtype), None if bias is None else bias.to(x.dtype))
            return out.float() if as_float else out

        return apply

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`. Computed in float32 and rounded once."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.add_rms_norm`."""
        residual.add_(delta)
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def rope_store(
        self, qkv: Tensor, view: View, rope: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, q_heads: int
    ) -> None:
        """See `Ops.rope_store`."""
        kv_heads, dim = k_cache.shape[1:]
        heads = qkv.view(len(qkv), -1, dim)
        rotated = heads[:, : q_heads + kv_heads].float()
        cos, sin = (table[view.positions.long()].unsqueeze(1) for table in rope)
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)
        heads[:, :q_heads] = rotated[:, :q_heads]
        k_cache[view.slots] = rotated[:, q_heads:]
        v_cache[view.slots] = heads[:, q_heads + kv_heads :]

    def attention(self, qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int) -> Tensor:
        """See `Ops.attention`."""
        kv_heads, dim = k_cache.shape[1:]
        queries = qkv.view(len(qkv), -1, dim)[:, :q_heads].float()
        out = torch.empty_like(queries)
        starts, contexts = view.row_start.tolist(), view.context.tolist()
        for b, (context, mask_start) in enumerate(zip(contexts, view.mask_start.tolist(), strict=True)):
            first, last = starts[b], starts[b + 1]
            n = last - first
            masked = mask_start >= 0 and view.mask is not None
            width = int(view.mask_width[b]) if masked and view.mask_width is not None else n
            at = torch.arange(context + width, device=qkv.device)
            pages = view.page_table[view.table_row[b].long(), at // view.page_size].long()
            slots = pages * view.page_size + at % view.page_size
            keys, values = (
                cache[slots].float().repeat_interleave(q_heads // kv_heads, 1) for cache in (k_cache, v_cache)
            )
            if masked and view.mask is not None:
                among = view.mask[mask_start : mask_start + n * width].view(n, width).bool()
            else:
                among = torch.ones(n, n, dtype=torch.bool, device=qkv.device).tril()
            seen = torch.cat((torch.ones(n, context, dtype=torch.bool, device=qkv.device), among), dim=1)
            scores = torch.einsum("qhd,khd->hqk", queries[first:last], keys) * dim**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
        return out.to(qkv.dtype).view(len(qkv), -1)

    def fuse(self, stack: Stack) -> Fused | None:
        """See `Ops.fuse`."""
        return None

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`."""
        best = logits.argmax(-1)
        return torch.where(logits.isnan().any(-1), -1, best)

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
        greedy = self.argmax(logits).numpy()
        return sampling.choose(logits, greedy, temperature, top_k, top_p, coin, min_p)

    def likeliest(self, logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ops.likeliest`."""
        scores, index = self.best(logits, count)
        return scores.cpu().numpy(), index.cpu().numpy()

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `DeviceOps.best`."""
        top = logits.topk(count, dim=-1)
        return top.values.double() - logits.logsumexp(-1, keepdim=True), top.indices

    def sample(self, logits: Tensor, temperature: Tensor, coin: Tensor) -> Tensor:
        """See `DeviceOps.sample`."""
        return torch.where(logits.isnan().any(-1), -1, sampling.sample(logits, temperature, coin))

    def accept(
        self, drafts: Tensor, parent: Tensor, start: Tensor, chosen: Tensor, deepest: int, most: int
    ) -> tuple[Tensor, Tensor]:
        """See `DeviceOps.accept`."""
        del most
        node, none = start[:-1], torch.full_like(start[:-1], -1)
        path = [node]
        for _ in range(deepest):
            above = node.clamp(min=0)
            child = (parent == node.unsqueeze(1)) & (drafts == chosen[above].unsqueeze(1)) & (node >= 0).unsqueeze(1)
            node = torch.where(child.any(1), child.byte().argmax(1), none)
            path.append(node)
        paths = torch.stack(path, dim=1)
        return (paths >= 0).sum(1), paths
