"""A head that already predicts before the first gradient step: a linear map, written into the decoder layer.

The target's final hidden state (unit RMS) at p + 1 is regressed on the normalised features at p and the normalised
embedding of token p + 1. The feature part becomes `fc`. The embedding part, cut to the rank that the value heads can
carry, becomes the values and outputs of the first query head of each group, whose queries and keys share one random
projection of the embedding, so that it attends to its own position. Worth several times the data in a trial.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.eagle3 import HeadShape
from engine.train.head import chunked, rms

_SELF_ATTENTION = 20.0  # score of a position with itself in the heads that carry the embedding
_SMALL = 0.02


class Ridge:
    """Accumulates the normal equations, then solves them."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._xx = torch.zeros(4 * hidden, 4 * hidden, dtype=torch.float64)
        self._xz = torch.zeros(4 * hidden, hidden, dtype=torch.float64)
        self.positions = 0

    def add(self, features: Tensor, embedded: Tensor, following: Tensor) -> None:
        """features [n, 3H] at p, embeddings [n, H] of token p + 1, unit-RMS final hidden states [n, H] at p + 1."""
        x = torch.cat((chunked(features), rms(embedded)), dim=-1).float()
        self._xx += (x.t() @ x).double()
        self._xz += (x.t() @ following.float()).double()
        self.positions += len(x)

    def solve(self, strength: float = 3e-4) -> Tensor:
        """[4H, H], float32. `strength` is relative to the mean squared input."""
        matrix = self._xx + torch.eye(len(self._xx), dtype=torch.float64) * (
            strength * self._xx.diagonal().mean() + 1e-6
        )
        return torch.linalg.solve(matrix, self._xz).float()


def start(
    shape: HeadShape, solution: Tensor, final_norm: Tensor, kept_embedding: Tensor, seed: int, sharpness: float = 0.6
) -> dict[str, Tensor]:
    """Weights by `HeadShape.parameters`, float32.

    final_norm [H] is the target's; a prediction is less certain than the target, hence `sharpness`.
    """
    torch.manual_seed(seed)
    h, d = shape.hidden, shape.head_dim
    q, kv, group = shape.q_heads * d, shape.kv_heads * d, shape.q_heads // shape.kv_heads
    weights = {name: torch.randn(size) * _SMALL for name, size in shape.parameters().items()}
    for name in ("chunk_norm", "input_norm", "hidden_norm", "mlp_norm"):
        weights[name] = torch.ones_like(weights[name])
    weights["fc"] = solution[: 3 * h].t().contiguous()
    left, sizes, right = torch.linalg.svd(solution[3 * h :].t())
    rank = min(kv, h)
    root = sizes[:rank].sqrt()
    qkv, out = weights["qkv"], weights["out"].mul_(0.05)
    qkv[q + kv :] = 0
    qkv[q + kv : q + kv + rank, :h] = root.unsqueeze(1) * right[:rank]
    projection = torch.randn(d, h) * (_SELF_ATTENTION * d**0.5 / (d * h)) ** 0.5
    for g in range(shape.kv_heads):
        first = g * group * d
        for rows in (slice(first, first + d), slice(q + g * d, q + (g + 1) * d)):
            qkv[rows] = 0
            qkv[rows, :h] = projection
        width = min(d, max(0, rank - g * d))
        out[:, first : first + d] = 0
        out[:, first : first + width] = left[:, g * d : g * d + width] * root[g * d : g * d + width]
    weights["down"].mul_(0.05)
    weights["final_norm"] = final_norm.float() * sharpness
    weights["lm_head"] = kept_embedding.float().clone()
    return weights
