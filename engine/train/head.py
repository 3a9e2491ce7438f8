"""The EAGLE-3 head as it is trained: unrolled over whole sequences on its own output (see engine.model.eagle3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.eagle3 import EPS, HeadShape


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Over the last dimension, in float32; rounded once, to the type of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (normed if weight is None else normed * weight).to(x.dtype)


def chunked(features: Tensor) -> Tensor:
    """[.., 3H] with each third RMS-normalised."""
    return rms(features.unflatten(-1, (3, -1))).flatten(-2)


class Unroll:
    """The passes over one padded batch: pass j drafts token i + 2 + j from row i, on the output of pass j - 1.

    Row i of pass j attends to the rows ≤ i of pass 0, as a draft cache holds true features there, and to its own keys
    of passes 1 … j, which it would have written while drafting (training-time test).
    """

    def __init__(self, shape: HeadShape, weights: dict[str, Tensor], features: Tensor) -> None:
        """features [B, T, 3H], whose type is computed in; weights by `HeadShape.parameters`, any float type."""
        self._shape = shape
        self._dtype = features.dtype
        self._w = {name: w if w.dim() == 1 else w.to(self._dtype) for name, w in weights.items()}
        normed = (chunked(features).float() * self._w["chunk_norm"]).to(self._dtype)
        self._x = functional.linear(normed, self._w["fc"])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        steps = features.shape[1]
        self._causal = torch.ones(steps, steps, dtype=torch.bool).tril()
        d = shape.head_dim
        inverse = 1.0 / shape.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.outer(torch.arange(steps + 8, dtype=torch.float32), inverse)
        self._cos, self._sin = angles.cos(), angles.sin()

    def step(self, embedded: Tensor) -> Tensor:
        """The next pass, given embeddings [B, T, H] of the tokens i + 1 + j: normed hidden [B, T, H] for `lm_head`."""
        shape, w, x = self._shape, self._w, self._x
        j = len(self._keys)
        both = torch.cat((rms(embedded, w["input_norm"]), rms(x, w["hidden_norm"])), dim=-1)
        qkv = functional.linear(both, w["qkv"]).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((shape.q_heads, shape.kv_heads, shape.kv_heads), dim=1)
        q, k = self._rotate(q, j), self._rotate(k, j)
        group = shape.q_heads // shape.kv_heads
        self._keys.append(k.repeat_interleave(group, 1))
        self._values.append(v.repeat_interleave(group, 1))
        scale = shape.head_dim**-0.5
        scores = (q @ self._keys[0].transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~self._causal, float("-inf"))
        own = [(q * keys).float().sum(-1, keepdim=True) * scale for keys in self._keys[1:]]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(self._dtype)
        steps = scores.shape[-1]
        mixed = weights[..., :steps] @ self._values[0]
        for m, values in enumerate(self._values[1:]):
            mixed = mixed + weights[..., steps + m, None] * values
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), w["out"])
        gate, up = functional.linear(rms(x, w["mlp_norm"]), w["gate_up"]).chunk(2, dim=-1)
        x = x + functional.linear(functional.silu(gate) * up, w["down"])
        self._x = x
        return rms(x, w["final_norm"])

    def _rotate(self, heads: Tensor, shift: int) -> Tensor:
        steps = heads.shape[2]
        cos, sin = self._cos[shift : shift + steps], self._sin[shift : shift + steps]
        a, b = heads.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(self._dtype)


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight · CE(teacher, softmax(hidden · lm_headᵀ)), its gradient made in the forward pass.

    The logits [n, Vd] are the largest tensors of training: they exist once, and become the gradient in place.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, lm_head: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        """hidden [n, H], lm_head [Vd, H], the teacher's probabilities float32 [n, Vd], weight [n]."""
        matrix = lm_head.to(hidden.dtype)
        logits = (hidden @ matrix.t()).float()
        high = logits.amax(-1, keepdim=True)
        logits.sub_(high)
        dot = (teacher * logits).sum(-1)
        logits.exp_()
        total = logits.sum(-1, keepdim=True)
        loss = ((total.squeeze(-1).log() - dot) * weight).sum()
        gradient = logits.div_(total).sub_(teacher).mul_(weight.unsqueeze(-1)).to(hidden.dtype)
        ctx.save_for_backward(gradient @ matrix, (gradient.t() @ hidden).float())
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        """The gradients that `forward` made, scaled."""
        to_hidden, to_head = ctx.saved_tensors
        return to_hidden * scale.to(to_hidden.dtype), to_head * scale, None, None
