"""What rounds on a device compute with tensors is what the host computes with arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DraftShape, tree_capacity
from engine.ops.reference import ReferenceOps
from engine.ops.sampling import coins, coins_of, sample_cut, without_unlikely
from engine.spec.accept import accept, ancestor_mask
from engine.spec.base import DraftTree
from engine.spec.board import NO_TOKEN, Board, Standing
from engine.spec.device_tree import DeviceCandidates
from engine.spec.tree import Candidates

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(0, 2**31))
def test_coins_are_the_same_to_the_last_bit(seeds: list[int], position: int) -> None:
    numbers, positions = np.array(seeds, dtype=np.uint64), np.arange(len(seeds), dtype=np.uint64) + np.uint64(position)
    found = coins_of(torch.from_numpy(numbers.view(np.int64)), torch.from_numpy(positions.astype(np.int64)))
    assert found.tolist() == coins(numbers, positions).tolist()


@pytest.mark.parametrize("vocab", [50, 3000])
def test_a_coin_picks_the_token_that_the_host_would_pick(vocab: int) -> None:
    draw = np.random.default_rng(0)
    n = 60
    logits = torch.from_numpy(draw.normal(size=(n, vocab)).astype(np.float32) * 3)
    temperature, coin, min_p = draw.choice([0.3, 1.0, 2.0], n), draw.random(n), draw.choice([0.0, 0.05], n)
    top_k, top_p = draw.choice([0, 2, 7, vocab + 5], n), draw.choice([1.0, 0.9, 0.3], n)
    cut = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
    wanted = ReferenceOps().choose(logits, temperature, top_k, top_p, coin, min_p)
    heat, likely, flips = (torch.from_numpy(values) for values in (temperature, min_p, coin))
    left = without_unlikely(logits, heat, likely)
    some, limits = torch.from_numpy(cut), (torch.from_numpy(top_k), torch.from_numpy(top_p))
    found = torch.where(some, sample_cut(left, heat, *limits, flips), ReferenceOps().sample(left, heat, flips))
    assert found.tolist() == wanted.tolist()


def board(requests: int, shape: DraftShape, lengths: list[int], steps: list[int], **more: np.ndarray) -> Board:
    """Request i has pages 50 i, 50 i + 1, … of four tokens; the last of the board's requests is nobody."""
    made = Board(requests + 1, shape, 50, 4, nowhere=4000, nobody=99).on(CPU)
    given_ = {
        "row": np.arange(requests),
        "known": np.ones(requests, dtype=bool),
        "length": np.array(lengths),
        "root": np.arange(requests) + 50,
        "steps": np.array(steps),
        "seed": np.zeros(requests, dtype=np.int64),
        "found": np.zeros(requests, dtype=np.int64),
        "looked_up": np.zeros((requests, shape.num_steps), dtype=np.int64),
        **more,
    }
    table = (np.arange(requests)[:, None] * 50 + np.arange(50)).astype(np.int32)
    made.fill(given_, table, Standing(99, CPU))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_trees_are_those_of_the_host(seed: int) -> None:
    draw = np.random.default_rng(seed)
    b, k, deepest = 3, int(draw.integers(2, 5)), int(draw.integers(1, 5))
    n = int(draw.integers(2, tree_capacity(deepest, k) + 1))
    steps = draw.integers(0, deepest + 1, b)

    def scored(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        scores = -np.sort(draw.integers(0, 4, shape) * 0.5, axis=-1)  # with many ties
        scores[draw.random(shape[:-1]) < 0.1] = np.nan
        return scores, draw.integers(0, 40, shape)

    made = board(b, DraftShape(deepest, k, n), [5, 0, 9], steps.tolist())
    nobody_scores, nobody_tokens = np.zeros((1, k)), np.zeros((1, k), dtype=np.int64)
    scores, tokens = scored(b, k)
    host = Candidates(k, scores, tokens)
    device = DeviceCandidates(
        k,
        torch.from_numpy(np.concatenate((scores, nobody_scores))),
        torch.from_numpy(np.concatenate((tokens, nobody_tokens))),
    )
    for _ in range(1, deepest):
        scores, tokens = scored(b, k, k)
        wanted = host.grow(scores, tokens)
        found = device.grow(
            torch.from_numpy(np.concatenate((scores, np.zeros((1, k, k))))),
            torch.from_numpy(np.concatenate((tokens, np.zeros((1, k, k), dtype=np.int64)))),
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine[:b].tolist() == theirs.tolist()
    tree = host.select(np.arange(b) + 50, n, steps)
    device.select(made)
    masks, offsets = ancestor_mask(tree)
    view = made.tree_view()
    for i in range(b):
        first, last = int(tree.start[i]), int(tree.start[i + 1])
        size = last - first
        assert int(made.size[i]) == size
        assert made.tokens[i, :size].tolist() == tree.tokens[first:last].tolist()
        assert made.depth[i, :size].tolist() == tree.depth[first:last].tolist()
        above = np.where(tree.parent[first:last] < 0, -1, tree.parent[first:last] - first)
        assert made.parent[i, :size].tolist() == above.tolist()
        assert made.tokens[i, size:].tolist() == [NO_TOKEN] * (n - size)
        assert view.mask is not None
        assert view.mask_width is not None
        assert int(view.mask_width[i]) == size
        at = int(view.mask_start[i])
        assert view.mask[at : at + size * size].tolist() == masks[offsets[i] : offsets[i] + size * size].tolist()
        slots = view.slots.view(b + 1, n)[i]
        where = int(made.length[i]) + np.arange(size)
        assert slots[:size].tolist() == ((50 * i + where // 4) * 4 + where % 4).tolist()
        assert slots[size:].tolist() == [4000] * (n - size)


def test_what_does_not_exist_is_stored_nowhere_and_sees_one_row() -> None:
    made = board(2, DraftShape(3, 1, 4), [5, 8], [3, 1])
    made.chain(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), 1 + made.steps)
    assert made.tokens.tolist() == [[50, 1, 2, 3], [51, 4, NO_TOKEN, NO_TOKEN], [0, NO_TOKEN, NO_TOKEN, NO_TOKEN]]
    view = made.tree_view()
    assert view.slots.view(3, 4).tolist()[1:] == [[208, 209, 4000, 4000], [4000] * 4]
    assert view.mask is not None
    assert view.mask[16:24].view(4, 2).tolist() == [[1, 0], [1, 1], [1, 0], [1, 0]]
    made.accepted.copy_(torch.tensor([2, 1, 0]))
    assert made.committed_view().slots.view(3, 4).tolist() == [[5, 6, 4000, 4000], [208, 4000, 4000, 4000], [4000] * 4]
    assert made.last().tolist() == [1, 4, 8]


def test_drafts_that_were_looked_up_replace_others() -> None:
    found = {"found": np.array([0, 2]), "looked_up": np.array([[0, 0, 0], [30, 31, 0]])}
    made = board(2, DraftShape(3, 1, 4), [5, 8], [3, 3], **found)
    made.chain(torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0]]), 1 + made.steps)
    made.prefer_found()
    assert made.tokens.tolist()[:2] == [[50, 1, 2, 3], [51, 30, 31, NO_TOKEN]]
    assert made.size.tolist() == [4, 3, 1]


def test_who_was_in_the_round_before_goes_on_where_that_has_left_it() -> None:
    standing = Standing(99, CPU)
    standing.length[1], standing.bonus[1] = 17, 18
    made = Board(3, DraftShape(), 10, 4, nowhere=4000, nobody=99).on(CPU)
    names = ("row", "known", "length", "root", "steps", "seed", "found")
    given_ = {name: np.array([1, 2]) for name in names} | {"known": np.array([0, 1]), "looked_up": np.zeros((2, 0))}
    made.fill(given_, np.zeros((2, 10), dtype=np.int32), standing)
    assert made.length.tolist() == [17, 2, 0]
    assert made.root.tolist() == [18, 2, 0]
    assert made.row.tolist() == [1, 2, 99]


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_is_that_of_the_host(seed: int) -> None:
    draw = np.random.default_rng(seed)
    token, parent, depth, start = [], [], [], [0]
    for _ in range(5):
        base = len(token)
        token, parent, depth = [*token, 0], [*parent, -1], [*depth, 0]
        for _ in range(int(draw.integers(0, 12))):
            above, candidate = int(draw.integers(base, len(token))), int(draw.integers(0, 3))
            if not any(p == above and t == candidate for p, t in zip(parent, token, strict=True)):
                token, parent, depth = [*token, candidate], [*parent, above], [*depth, depth[above] + 1]
        start.append(len(token))
    chosen = draw.integers(0, 3, len(token))
    tree = DraftTree(np.array(token), np.array(parent), np.array(depth), np.array(start), chain=False)
    wanted = accept(tree, chosen)
    arrays = (torch.from_numpy(a) for a in (tree.tokens, tree.parent, tree.start, chosen))
    length, path = ReferenceOps().accept(*arrays, int(tree.depth.max()), int(np.diff(tree.start).max()))
    assert length.tolist() == wanted.length.tolist()
    assert path[:, : wanted.path.shape[1]].tolist() == wanted.path.tolist()
