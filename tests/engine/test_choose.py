"""Choosing tokens from logits: what is drawn, and the likeliest ones, by every implementation on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from engine.ops.base import Ops
from engine.ops.native import NativeOps
from engine.ops.reference import ReferenceOps
from engine.ops.sampling import coins, distribution

NATIVE = NativeOps(torch.bfloat16)

every_ops = pytest.mark.parametrize("ops", [ReferenceOps(), NATIVE], ids=lambda ops: ops.name)


def spread(ops: Ops, logits: Tensor, n: int, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row [V] drawn from with n coins, evenly spread."""
    same = [np.full(n, value) for value in (temperature, top_k, top_p, min_p)]
    rows = logits.reshape(1, -1).expand(n, -1)
    return ops.choose(rows, *same[:3], (np.arange(n) + 0.5) / n, same[3])


@every_ops
@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 0.9),
    vocab=st.sampled_from([10, 64, 200]),
    seed=st.integers(0, 2**20),
)
def test_a_coin_picks_the_token_at_its_place_in_the_distribution(
    ops: Ops, temperature: float, top_k: int, top_p: float, min_p: float, vocab: int, seed: int
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    n = 400
    chosen = spread(ops, logits, n, temperature, top_k, top_p, min_p)
    exact = distribution(logits, temperature, top_k, top_p, min_p).numpy()
    share = np.bincount(chosen, minlength=vocab) / n
    # Evenly spread coins hit each token in proportion to its probability, to within one coin at either end. Where
    # top-p falls on a cumulative sum to the last bit, one token more or less is right as well.
    if top_k != 1:
        assert np.abs(share - exact).max() < 2.5 / n + 1e-9 or np.abs(share - exact).sum() < 0.02


@settings(max_examples=30, deadline=None)
@given(
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 40, 5000, 20_000, 30_000]),
    top_p=st.sampled_from([0.1, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**20),
)
def test_both_draw_the_same_tokens_from_a_whole_vocabulary(
    scale: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) * scale
    wanted, drawn = (spread(ops, logits, 40, temperature, top_k, top_p, min_p) for ops in (ReferenceOps(), NATIVE))
    # Weights in single precision move a border by some millionths of the whole; a coin seldom falls between the two.
    assert (wanted == drawn).sum() >= 38


@every_ops
def test_of_equal_logits_every_one_is_drawn(ops: Ops) -> None:
    drawn = spread(ops, torch.zeros(5000), 1000, 1.0, 0, 0.9, 0.0)
    assert len(set(drawn.tolist())) == 1000
    assert set(spread(ops, torch.zeros(300), 1000, 1.0, 7, 1.0, 0.0).tolist()) <= set(range(300))


@every_ops
def test_what_has_no_weight_is_never_drawn(ops: Ops) -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, [70, 130]] = torch.tensor([2.0, 1.9])  # shares of 0.525 and 0.475
    for coin in (0.0, 0.52, 0.53, 1 - 2**-53):
        for top_p in (1.0, 0.9999):
            chosen = ops.choose(logits, *map(np.array, ([1.0], [0], [top_p], [coin], [0.0])))
            assert chosen.tolist() == [70 if coin < 0.525 else 130]


@every_ops
def test_a_row_with_a_nan_has_no_token_and_spoils_no_other(ops: Ops) -> None:
    logits = torch.randn(3, 500)
    logits[1, 77] = float("nan")
    settings = np.full(3, 0.8), np.array([0, 0, 5]), np.full(3, 0.9), np.full(3, 0.3), np.zeros(3)
    chosen = ops.choose(logits, *settings)
    assert chosen[1] == -1
    assert chosen[0] >= 0
    assert chosen[2] >= 0
    scores, _ = ops.likeliest(logits, 3)
    assert np.isnan(scores[1]).all()
    assert np.isfinite(scores[[0, 2]]).all()


@every_ops
def test_a_row_is_chosen_the_same_way_whatever_else_is_in_the_batch(ops: Ops) -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    rng = np.random.default_rng(2)
    temperature, coin = rng.choice([0.0, 0.7, 1.5], 40), rng.random(40)
    top_k, top_p, min_p = rng.choice([0, 1, 7], 40), rng.choice([1.0, 0.8], 40), rng.choice([0.0, 0.1], 40)
    together = ops.choose(logits, temperature, top_k, top_p, coin, min_p)
    for i in range(40):
        row = slice(i, i + 1)
        alone = ops.choose(logits[row], temperature[row], top_k[row], top_p[row], coin[row], min_p[row])
        assert alone[0] == together[i]


@every_ops
@pytest.mark.parametrize("temperature", [5e-324, 1e-307, 1e-300, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(ops: Ops, temperature: float, top_p: float) -> None:
    logits = torch.randn(6, 300)
    n = len(logits)
    same = np.full(n, temperature), np.zeros(n, dtype=int), np.full(n, top_p), np.linspace(0, 0.99, n), np.zeros(n)
    assert ops.choose(logits, *same).tolist() == logits.argmax(-1).tolist()


@every_ops
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("vocab", [8, 63, 1000, 8192])
def test_the_likeliest_are_those_of_the_distribution(ops: Ops, count: int, vocab: int) -> None:
    logits = torch.randn(5, vocab) * 3
    scores, index = ops.likeliest(logits, count)
    wanted, order = logits.double().log_softmax(-1).sort(-1, descending=True)
    assert index.tolist() == order[:, :count].tolist()
    assert np.allclose(scores, wanted[:, :count].numpy(), atol=2e-6)


def test_coins_are_uniform_and_depend_on_seed_and_position() -> None:
    at = np.arange(20_000, dtype=np.uint64)
    coin = coins(np.full_like(at, 7), at)
    assert chisquare(np.histogram(coin, bins=50, range=(0, 1))[0]).pvalue > 1e-4
    assert (coin != coins(np.full_like(at, 8), at)).all()
    neighbours = coins(at, np.zeros_like(at))
    assert chisquare(np.histogram(neighbours, bins=50, range=(0, 1))[0]).pvalue > 1e-4
    assert abs(np.corrcoef(coin[:-1], coin[1:])[0, 1]) < 0.03
