"""The EAGLE-3 draft head: one decoder layer over the target's features and the embedding of the following token.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. Each of
the three feature chunks is RMS-normalised before `fc` (as in EAGLE 3.1): the first position of a sequence has
activations ten thousand times larger than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Group
from engine.memory.pool import KVPool
from engine.model.shard import Shard, Sizes, cut_over, shards
from engine.ops.base import Ops, View, rows_of

EPS = 1e-5


@dataclass(frozen=True)
class HeadShape:
    """Sizes; `layers` are the target layers whose outputs are read, in order."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocab: int
    rope_theta: float
    layers: tuple[int, int, int]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadShape:
        """The inverse of `to_dict`."""
        return cls(**{**data, "layers": tuple(data["layers"])})

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every trained tensor."""
        h, q, kv = self.hidden, self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "chunk_norm": (3 * h,),
            "fc": (h, 3 * h),
            "input_norm": (h,),
            "hidden_norm": (h,),
            "qkv": (q + 2 * kv, 2 * h),
            "out": (h, q),
            "mlp_norm": (h,),
            "gate_up": (2 * self.intermediate, h),
            "down": (h, self.intermediate),
            "final_norm": (h,),
            "lm_head": (self.draft_vocab, h),
        }


class Eagle3Head:
    """A loaded head. Entry p of its cache stands for (feature of position p, embedding of token p + 1).

    T rows, H hidden size, Vd draft vocabulary. It keeps no state of requests.
    """

    def __init__(
        self,
        shape: HeadShape,
        weights: Mapping[str, Tensor],
        hot: Tensor,
        embedding: Tensor,
        ops: Ops,
        dtype: torch.dtype,
        positions: int,
        group: Group | None = None,
    ) -> None:
        """weights by `HeadShape.parameters`; hot int64 [Vd]: target ids; embedding [V, H] of the target.

        It is cut over the group's ranks as a layer of the target is; `fc` and the norms are whole everywhere.
        """
        self.shape, self.hot, self.dtype = shape, hot, dtype
        self._group = cut_over(group or Group(), shape.kv_heads)
        heads, inner, head_dim = shape.q_heads, shape.intermediate, shape.head_dim
        sizes = Sizes(shape.hidden, heads, shape.kv_heads, head_dim, inner, shape.draft_vocab)
        mine = shards(sizes, self._group.ranks)[self._group.rank]
        self._q_heads, self._kv_heads, self._widths = len(mine.q_heads), len(mine.kv_heads), mine.widths
        if self._group.ranks > 1:
            weights = _part(weights, shape, mine)
        self._ops, self._embedding = ops, embedding
        device = embedding.device
        weights = {name: w.to(device) for name, w in weights.items()}
        cast = {name: w.to(dtype).contiguous() for name, w in weights.items()}
        # A norm's weight and the matrix behind it are one matrix.
        self._fc = ops.linear((weights["fc"].float() * weights["chunk_norm"].float()).to(dtype))
        self._ones = torch.ones(shape.hidden, dtype=dtype, device=device)
        self._qkv, self._out = ops.linear(cast["qkv"]), ops.linear(cast["out"])
        self._gate_up, self._down = ops.linear(cast["gate_up"]), ops.linear(cast["down"])
        self._norms = {name: cast[name] for name in ("input_norm", "hidden_norm", "mlp_norm", "final_norm")}
        # The largest matrix by far; what is drafted needs no exact logits, and its file holds no better ones.
        whole = dtype == torch.bfloat16 and shape.hidden % 32 == 0
        self._lm_head = ops.linear(cast["lm_head"], as_float=True, weights="int8" if whole else "auto")
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / shape.rope_theta**half)
        self._rope = (angles.cos().to(device), angles.sin().to(device))

    def new_pool(self, pages: int, page_size: int) -> KVPool:
        """Its cache: one layer, addressed by the same slots as the target's."""
        device = self._embedding.device
        return KVPool(1, pages, page_size, self._kv_heads, self.shape.head_dim, self.dtype, device)

    def extend(self, features: Tensor, view: View, pool: KVPool) -> Tensor:
        """Rows with true features [T, 3H] of the target and `view.tokens` that follow them; hidden states [T, H]."""
        chunks = features.reshape(-1, self.shape.hidden)
        normed = self._ops.rms_norm(chunks, self._ones, EPS).view(len(features), -1)
        return self.step(self._fc(normed), view, pool)

    def step(self, x: Tensor, view: View, pool: KVPool) -> Tensor:
        """Rows on the head's own hidden states x [T, H] (overwritten); the next hidden states [T, H]."""
        view = view.on(x.device)
        ops, norms, whole = self._ops, self._norms, self._group.all_reduce
        embedded = ops.rms_norm(rows_of(self._embedding, view.tokens), norms["input_norm"], EPS)
        qkv = self._qkv(torch.cat((embedded, ops.rms_norm(x, norms["hidden_norm"], EPS)), dim=-1))
        k_cache, v_cache = pool.layer(0)
        ops.rope_store(qkv, view, self._rope, k_cache, v_cache, self._q_heads)
        mixed = whole(self._out(ops.attention(qkv, view, k_cache, v_cache, self._q_heads)))
        normed = ops.add_rms_norm(mixed, x, norms["mlp_norm"], EPS)
        return x.add_(whole(self._down(ops.silu_mul(self._gate_up(normed)))))

    def logits(self, x: Tensor) -> Tensor:
        """Over the draft vocabulary, float32 [T, Vd]."""
        mine = self._lm_head(self._ops.rms_norm(x, self._norms["final_norm"], EPS))
        return self._group.all_gather(mine, self._widths)


def _part(weights: Mapping[str, Tensor], shape: HeadShape, shard: Shard) -> dict[str, Tensor]:
    """One rank's rows and columns."""
    d = shape.head_dim
    q, kv = (slice(heads.start * d, heads.stop * d) for heads in (shard.q_heads, shard.kv_heads))
    inner, ids = (slice(part.start, part.stop) for part in (shard.inner, shard.vocab))
    queries, keys, values = weights["qkv"].split([shape.q_heads * d, shape.kv_heads * d, shape.kv_heads * d])
    gate, up = weights["gate_up"].chunk(2)
    return {
        **weights,
        "qkv": torch.cat((queries[q], keys[kv], values[kv])),
        "out": weights["out"][:, q],
        "gate_up": torch.cat((gate[inner], up[inner])),
        "down": weights["down"][:, inner],
        "lm_head": weights["lm_head"][ids],
    }
