"""Choosing tokens from logits: greedy rows by argmax, the others by inverse transform with reproducible coins."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FIRST_LOOK = 1024
"""Candidates sorted first for top-p; the whole row is sorted only where their mass falls short."""

DRAFT_STREAM, KEEP_STREAM, REST_STREAM = (
    np.uint64(n) for n in (0x9E6C63D0876A9A47, 0x5851F42D4C957F2D, 0xC2B2AE3D27D4EB4F)
)
"""Flipped in a seed for coins of their own: of sampled drafts, of keeping them, and of what replaces them."""


def coins(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) from (seed, position), both uint64 [n]: splitmix64 (Steele et al., 2014).

    A token's coin depends on nothing else, so batch, preemption and speculation do not change what is sampled.
    """
    with np.errstate(over="ignore"):
        z = seeds * np.uint64(0xD1342543DE82EF95) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def coins_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """`coins` on any device, from the same 64 bits as int64."""

    def shifted(z: Tensor, by: int) -> Tensor:
        return (z >> by) & ((1 << (64 - by)) - 1)  # >> of int64 brings the sign along

    z = seeds * _signed(0xD1342543DE82EF95) + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return shifted(z ^ shifted(z, 31), 11).double() * 2.0**-53


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def choose(
    logits: Tensor,
    greedy: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    coin: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    """`Ops.choose` in torch, given each row's argmax (-1 where it holds a NaN)."""
    floor = torch.from_numpy(min_p).log() if min_p.any() else None
    chosen = greedy.copy()
    sampled = (temperature > 0) & (top_k != 1) & (chosen >= 0)
    whole = ((top_k == 0) | (top_k >= logits.shape[1])) & (top_p >= 1.0)
    # Each kind by itself: a row must be chosen the same way whatever else is in the batch.
    for kind, pick in ((sampled & whole, _from_all), (sampled & ~whole, _from_head)):
        rows = np.flatnonzero(kind)
        if len(rows):
            at = torch.from_numpy(rows)
            scaled = logits[at].double()
            # The largest first becomes 0, so that no temperature, however small, makes an infinity of it.
            scaled = (scaled - scaled.amax(-1, keepdim=True)) / torch.from_numpy(temperature[rows]).unsqueeze(1)
            if floor is not None:
                scaled.masked_fill_(scaled < floor[at].unsqueeze(1), float("-inf"))
            picked = pick(scaled, top_k[rows], torch.from_numpy(top_p[rows]), torch.from_numpy(coin[rows]))
            chosen[rows] = picked.numpy()
    return chosen


def sample(logits: Tensor, temperature: Tensor, coin: Tensor) -> Tensor:
    """`choose` on any device for rows without top-k, top-p and min-p; rows that hold a NaN give anything."""
    return inverse(_scaled(logits, temperature).exp(), coin)


def without_unlikely(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Logits [R, V] with -inf in place of what min-p, float64 [R], leaves out."""
    return logits.masked_fill(_scaled(logits, temperature) < min_p.log().unsqueeze(1), float("-inf"))


def sample_cut(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, coin: Tensor) -> Tensor:
    """`choose` on any device for rows with top-k (int64 [R]), top-p or both; otherwise as `sample`."""
    scaled = _scaled(logits, temperature)
    values, order = scaled.sort(dim=-1, descending=True)
    weights = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    rank = torch.arange(weights.shape[1], device=weights.device)
    few = (top_k > 0) & (top_k < weights.shape[1])
    weights = weights.masked_fill(rank >= torch.where(few, top_k, weights.shape[1]).unsqueeze(1), 0.0)
    whole = torch.where(few, weights.sum(-1), 1.0).unsqueeze(1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(before >= top_p.unsqueeze(1) * whole, 0.0)
    return order.gather(1, inverse(weights, coin).unsqueeze(1)).squeeze(1)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    wide = logits.double()
    return (wide - wide.amax(-1, keepdim=True)) / temperature.unsqueeze(1)


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """What `choose` samples from, written plainly: float64 [V] from logits [V]. The oracle of its tests."""
    scaled = logits.double() / temperature
    share = scaled.softmax(-1)
    scaled[share < min_p * share.max()] = float("-inf")
    order = scaled.argsort(descending=True, stable=True)
    weights = scaled[order].softmax(-1)
    if top_k:
        weights[top_k:] = 0
    before = weights.cumsum(-1) / weights.sum() - weights / weights.sum()
    weights[before >= top_p] = 0
    out = torch.zeros_like(scaled)
    out[order] = weights / weights.sum()
    return out


def _from_all(scaled: Tensor, top_k: np.ndarray, top_p: Tensor, coin: Tensor) -> Tensor:
    """Tokens, int64 [n], for rows without top-k and top-p."""
    del top_k, top_p
    return inverse(scaled.exp(), coin)


def _from_head(scaled: Tensor, top_k: np.ndarray, top_p: Tensor, coin: Tensor) -> Tensor:
    """Tokens, int64 [n], for rows with either or both."""
    vocab = scaled.shape[1]
    plain = (top_k == 0) | (top_k >= vocab)
    # Sorting a whole vocabulary costs milliseconds a row; the head of it nearly always suffices.
    wanted = int(top_k[~plain].max(initial=0))
    most = min(vocab, max(wanted, _FIRST_LOOK))
    normaliser = scaled.logsumexp(-1, keepdim=True)
    values, order = scaled.topk(most, dim=-1)
    if most < vocab:
        mass = (values - normaliser).exp().sum(-1).numpy()
        if bool((plain & (mass < top_p.numpy())).any()):
            values, order = scaled.sort(dim=-1, descending=True)
    weights = (values - normaliser).exp()
    rank = torch.arange(weights.shape[1])
    limit = torch.from_numpy(np.where(plain, vocab, top_k)).unsqueeze(1)
    weights = weights.masked_fill(rank >= limit, 0.0)
    # top-p is a share of what top-k left; a row without top-k has the whole distribution, normalised to 1.
    whole = torch.where(torch.from_numpy(plain), 1.0, weights.sum(-1)).unsqueeze(1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(before >= top_p.unsqueeze(1) * whole, 0.0)
    return order.gather(1, inverse(weights, coin).unsqueeze(1)).squeeze(1)


def inverse(weights: Tensor, coin: Tensor) -> Tensor:
    """Of each row of weights [n, V], which need not sum to 1: the first index whose cumulative weight exceeds
    coin * total; never one of weight zero."""
    cumulative = weights.cumsum(-1)
    at = torch.searchsorted(cumulative, (coin * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    last = (weights > 0).long().mul(torch.arange(weights.shape[1], device=weights.device)).amax(-1)
    return torch.minimum(at, last)
