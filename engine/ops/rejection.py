"""Acceptance of sampled drafts: keep a draft or sample what it leaves (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.ops.sampling import inverse


def probabilities(
    logits: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> Tensor:
    """What `engine.ops.sampling.choose` samples from, float64 [n, V], for rows with a temperature above 0."""
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / torch.from_numpy(temperature).unsqueeze(1)
    if min_p.any():
        scaled = scaled.masked_fill(scaled < torch.from_numpy(min_p).log().unsqueeze(1), float("-inf"))
    weights = scaled.softmax(-1)
    cut = np.flatnonzero((top_k > 0) | (top_p < 1.0))
    if len(cut):
        vocab = weights.shape[1]
        values, order = weights[cut].sort(dim=-1, descending=True, stable=True)
        limit = torch.from_numpy(np.where(top_k[cut] > 0, top_k[cut], vocab)).unsqueeze(1)
        values = values.masked_fill(torch.arange(vocab) >= limit, 0.0)
        values = values / values.sum(-1, keepdim=True)
        before = values.cumsum(-1) - values
        values = values.masked_fill(before >= torch.from_numpy(top_p[cut]).unsqueeze(1), 0.0)
        weights[cut] = torch.zeros_like(values).scatter(1, order, values / values.sum(-1, keepdim=True))
    return weights


def keep_or_sample(
    p: Tensor, q: Tensor, hot: Tensor | None, drafts: np.ndarray, keep: np.ndarray, rest: np.ndarray
) -> np.ndarray:
    """One token per row with distribution p, int64 [n], which is the draft as often as can be.

    Args:
        p: float64 [n, V], the target's distribution.
        q: float64 [n, Vd], the distribution that each draft was sampled from.
        hot: int64 [Vd], target ids of the draft's ids; None: they are the same.
        drafts: int64 [n], target ids.
        keep, rest: coins in [0, 1): of the decision, and of the sample where the draft is not kept.
    """
    wide = q if hot is None else torch.zeros_like(p).index_copy_(1, hot, q)
    at = torch.from_numpy(drafts).unsqueeze(1)
    kept = torch.from_numpy(keep).unsqueeze(1) * wide.gather(1, at) < p.gather(1, at)
    left = (p - wide).clamp_min(0.0)
    empty = left.sum(-1, keepdim=True) <= 0.0  # p and q agree to the last bit: what is not kept is nothing but rounding
    sampled = inverse(torch.where(empty, p, left), torch.from_numpy(rest))
    return torch.where(kept.squeeze(1), at.squeeze(1), sampled).numpy()
