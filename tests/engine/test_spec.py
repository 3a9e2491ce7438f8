"""Speculation changes nothing but the time: trees, acceptance, drafters, whole generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.build import Core
from engine.config import SpecConfig
from engine.ops.reference import ReferenceOps
from engine.ops.sampling import choose, coins, distribution
from engine.spec.accept import accept, ancestor_mask
from engine.spec.base import DraftTree, make_drafter, registered
from engine.spec.ngram import NgramDrafter
from tests.engine.conftest import VOCAB, generate

trees = st.integers(1, 3).flatmap(
    lambda requests: st.lists(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), min_size=0, max_size=9),
        min_size=requests,
        max_size=requests,
    )
)


def build_tree(shape: list[list[tuple[int, int]]]) -> DraftTree:
    """From (choice of parent, token) per draft; siblings with equal tokens are dropped, as no drafter makes them."""
    tokens, parent, depth, start = [], [], [], [0]
    for drafts in shape:
        base = len(tokens)
        tokens, parent, depth = [*tokens, 0], [*parent, -1], [*depth, 0]
        for pick, token in drafts:
            above = base + pick % (len(tokens) - base)
            if any(p == above and t == token for p, t in zip(parent, tokens, strict=True)):
                continue
            tokens, parent, depth = [*tokens, token], [*parent, above], [*depth, depth[above] + 1]
        start.append(len(tokens))
    return DraftTree(np.array(tokens), np.array(parent), np.array(depth), np.array(start), chain=False)


@given(trees, st.integers(0, 2**32))
def test_acceptance_is_the_walk_along_the_chosen_tokens(shape: list[list[tuple[int, int]]], seed: int) -> None:
    tree = build_tree(shape)
    chosen = np.random.default_rng(seed).integers(0, 5, len(tree.tokens))
    accepted = accept(tree, chosen)
    for b in range(len(shape)):
        node, walk = tree.start[b], [tree.start[b]]
        while True:
            below = np.flatnonzero((tree.parent == node) & (tree.tokens == chosen[node]))
            if not len(below):
                break
            node = below[0]
            walk.append(node)
        assert accepted.length[b] == len(walk)
        assert accepted.path[b].tolist()[: len(walk)] == walk
        assert (accepted.path[b][len(walk) :] == -1).all()


@given(trees)
def test_the_mask_is_reachability(shape: list[list[tuple[int, int]]]) -> None:
    tree = build_tree(shape)
    mask, offsets = ancestor_mask(tree)
    for b, offset in enumerate(offsets):
        first, last = tree.start[b], tree.start[b + 1]
        matrix = mask[offset : offset + (last - first) ** 2].reshape(last - first, -1)
        for i in range(first, last):
            seen, node = set(), i
            while node >= 0:
                seen.add(node - first)
                node = tree.parent[node]
            assert set(np.flatnonzero(matrix[i - first]).tolist()) == seen


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 0.9),
    seed=st.integers(0, 2**20),
)
def test_a_coin_picks_the_token_at_its_place_in_the_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed))
    n = 400
    chosen = choose(
        ReferenceOps(),
        logits.expand(n, -1),
        np.full(n, temperature),
        np.full(n, top_k),
        np.full(n, top_p),
        (np.arange(n) + 0.5) / n,
        np.full(n, min_p),
    )
    exact = distribution(logits[0], temperature, top_k, top_p, min_p).numpy()
    share = np.bincount(chosen, minlength=10) / n
    # Evenly spread coins hit each token in proportion to its probability, to within one coin at either end. Where
    # top-p falls on a cumulative sum to the last bit, one token more or less is right as well.
    if top_k != 1:
        assert np.abs(share - exact).max() < 2.5 / n + 1e-9 or np.abs(share - exact).sum() < 0.02


def test_top_p_beyond_the_first_look_sorts_the_whole_row() -> None:
    logits = torch.zeros(1, 5000)
    chosen = choose(
        ReferenceOps(),
        logits.expand(2, -1),
        np.ones(2),
        np.zeros(2, dtype=int),
        np.full(2, 0.9),
        np.array([0.0, 0.9999]),
    )
    assert chosen[1] not in (chosen[0], -1)


def test_a_row_is_chosen_the_same_way_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    rng = np.random.default_rng(2)
    temperature, coin = rng.choice([0.0, 0.7, 1.5], 40), rng.random(40)
    top_k, top_p = rng.choice([0, 1, 7], 40), rng.choice([1.0, 0.8], 40)
    together = choose(ReferenceOps(), logits, temperature, top_k, top_p, coin)
    for i in range(40):
        row = slice(i, i + 1)
        alone = choose(ReferenceOps(), logits[row], temperature[row], top_k[row], top_p[row], coin[row])
        assert alone[0] == together[i]


@pytest.mark.parametrize("temperature", [5e-324, 1e-307, 1e-300, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(6, 300)
    n = len(logits)
    chosen = choose(
        ReferenceOps(),
        logits,
        np.full(n, temperature),
        np.zeros(n, dtype=int),
        np.full(n, top_p),
        np.linspace(0, 0.99, n),
    )
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_coins_are_uniform_and_depend_on_seed_and_position() -> None:
    at = np.arange(20_000, dtype=np.uint64)
    coin = coins(np.full_like(at, 7), at)
    assert chisquare(np.histogram(coin, bins=50, range=(0, 1))[0]).pvalue > 1e-4
    assert (coin != coins(np.full_like(at, 8), at)).all()
    neighbours = coins(at, np.zeros_like(at))
    assert chisquare(np.histogram(neighbours, bins=50, range=(0, 1))[0]).pvalue > 1e-4
    assert abs(np.corrcoef(coin[:-1], coin[1:])[0, 1]) < 0.03


SPECS = [
    SpecConfig(),
    *(SpecConfig("ngram", steps, 1, steps + 1, ngram_min=1, ngram_max=3) for steps in (1, 3, 8)),
    SpecConfig("ngram", 4, 1, 5, disable_batch_threshold=2, ngram_min=1, ngram_max=2),
]


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefill_tokens", [5, 512])
def test_greedy_output_is_the_same_token_by_token(
    make_core: Callable[..., Core], count: int, page_size: int, prefill_tokens: int
) -> None:
    asked = prompts(count)
    outputs = []
    for spec in SPECS:
        core = make_core(spec, page_size=page_size, prefill_tokens=prefill_tokens)
        outputs.append(generate(core, asked))
        if spec.disable_batch_threshold is None:
            assert (core.round.stats.drafted > 0) == (spec.speculation != "none")
    assert all(output == outputs[0] for output in outputs)
    alone = [generate(make_core(page_size=page_size), [prompt])[0] for prompt in asked]
    assert alone == outputs[0]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9}, {"temperature": 2.0, "top_k": 5}]
)
def test_a_seeded_request_samples_the_same_with_and_without_speculation(
    make_core: Callable[..., Core], sampling: dict[str, float]
) -> None:
    outputs = [generate(make_core(spec), prompts(3), seed=11, **sampling) for spec in SPECS]
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0] != generate(make_core(), prompts(3), seed=12, **sampling)


class Branching:
    """A drafter for tests: trees with right and wrong branches around a known continuation."""

    name = "branching"

    def __init__(self, continuation: dict[int, list[int]], rng: np.random.Generator) -> None:
        self.full, self.rng, self.length = continuation, rng, {}

    def add(self, rid: int, tokens: Sequence[int]) -> None:
        self.length[rid] = len(tokens)

    def extend(self, rid: int, tokens: Sequence[int]) -> None:
        self.length[rid] += len(tokens)

    def release(self, rid: int) -> None:
        del self.length[rid]

    def propose(self, rids: Sequence[int], roots: Sequence[int], num_steps: Sequence[int]) -> DraftTree:
        tokens, parent, depth, start = [], [], [], [0]
        for rid, root, steps in zip(rids, roots, num_steps, strict=True):
            right = len(tokens)
            tokens, parent, depth = [*tokens, root], [*parent, -1], [*depth, 0]
            known = self.full[rid][self.length[rid] :]
            for d in range(1, min(steps, len(known)) + 1):
                wrong = [int(t) for t in self.rng.integers(1, VOCAB, 2) if t != known[d - 1]][:1]
                below = [*wrong, known[d - 1]] if self.rng.random() < 0.7 else [known[d - 1], *wrong]
                if self.rng.random() < 0.2:
                    below = wrong
                base = len(tokens)
                tokens += below
                parent += [right] * len(below)
                depth += [d] * len(below)
                if known[d - 1] not in below:
                    break
                right = base + below.index(known[d - 1])
            start.append(len(tokens))
        return DraftTree(np.array(tokens), np.array(parent), np.array(depth), np.array(start), chain=False)


@pytest.mark.parametrize("page_size", [1, 4])
def test_trees_with_wrong_branches_leave_output_and_cache_as_they_were(
    make_core: Callable[..., Core], page_size: int
) -> None:
    asked = prompts(3)
    plain = generate(make_core(), asked)
    core = make_core(SpecConfig("ngram", 4, 1, 5), page_size=page_size)
    # A tree of depth 4 has up to 9 nodes here: let the scheduler keep room for them.
    core.gate._steps = 8
    drafter = Branching({i: p + o for i, (p, o) in enumerate(zip(asked, plain, strict=True))}, np.random.default_rng(3))
    core.scheduler._drafter = core.round._drafter = drafter
    original = drafter.propose
    drafter.propose = lambda rids, roots, steps: original(rids, roots, [s // 2 for s in steps])
    assert generate(core, asked) == plain
    assert core.round.stats.accepted > 20


@pytest.mark.parametrize("name", registered())
def test_every_drafter_conforms(name: str) -> None:
    drafter = make_drafter(SpecConfig() if name == "none" else SpecConfig(name, 4, 1, 5))
    drafter.add(5, [1, 2, 3, 4, 1, 2, 3])
    drafter.add(9, [8])
    tree = drafter.propose([5, 9], [3, 8], [4, 0])
    assert tree.tokens[tree.start[:-1]].tolist() == [3, 8]
    assert tree.start[-1] - tree.start[1] == 1, "no steps, no drafts"
    assert np.diff(tree.start).max() <= 1 + 4 * drafter.limits.max_topk
    roots = tree.depth == 0
    assert (tree.parent[roots] == -1).all()
    assert (tree.parent[~roots] < np.flatnonzero(~roots)).all()
    assert (tree.depth[~roots] == tree.depth[tree.parent[~roots]] + 1).all()
    drafter.extend(5, [4, 1])
    drafter.release(5)
    drafter.add(5, [7, 7, 7])
    assert drafter.propose([5], [7], [2]).start[-1] >= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 20))
def test_lookup_finds_the_latest_match_of_the_longest_suffix(text: list[int], steps: int, cut: int) -> None:
    drafter = NgramDrafter(SpecConfig("ngram", steps, 1, steps + 1, ngram_min=2, ngram_max=4))
    drafter.add(1, text[:cut])
    drafter.extend(1, text[cut:])
    drafts = drafter.propose([1], [text[-1]], [steps]).tokens[1:].tolist()
    expected: list[int] = []
    for n in (4, 3, 2):
        ends = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
        if ends and n <= len(text):
            expected = text[ends[-1] :][:steps]
            break
    assert drafts[: len(expected)] == expected
    assert len(drafts) == (steps if expected else 0)
