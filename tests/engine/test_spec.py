"""Speculation changes nothing but the time: trees, acceptance, drafters, whole generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.build import Core, build
from engine.config import DRAFTERS, EngineConfig, SpecConfig, tree_capacity
from engine.scheduler.lane import InlineLane
from engine.spec.accept import accept, ancestor_mask
from engine.spec.base import Asked, DraftTree, Seen, joined, registered
from engine.spec.ngram import History
from engine.spec.tree import Candidates
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


SPECS = {
    "none": SpecConfig(),
    **{f"ngram {n}": SpecConfig("ngram", n, 1, n + 1, ngram_min=1, ngram_max=3) for n in (1, 8)},
    "threshold": SpecConfig("ngram", 4, 1, 5, disable_batch_threshold=2, ngram_min=1, ngram_max=2),
    "schedule": SpecConfig("eagle3", 4, 1, 5, steps_by_batch=((1, 0), (2, 4), (6, 1))),
    "adaptive": SpecConfig("eagle3", 5, 1, 6, policy="adaptive"),
    "eagle3 1": SpecConfig("eagle3", 1, 1, 2),
    "eagle3 5": SpecConfig("eagle3", 5, 1, 6),
    "tree 4": SpecConfig("eagle3", 3, 4, 12),
    "tree 3": SpecConfig("eagle3", 5, 3, 40),
    "draft_model": SpecConfig("draft_model", 3, 1, 4),
    "hybrid": SpecConfig("hybrid", 4, 1, 5, ngram_min=1, ngram_max=2),
    "hybrid, second shallow": SpecConfig("hybrid", 6, 1, 7, ngram_min=1, ngram_max=2, hybrid_steps=1),
    "hybrid tree": SpecConfig("hybrid", 3, 4, 16, ngram_min=1, ngram_max=2),
    "hybrid of two": SpecConfig("hybrid", 3, 1, 4, hybrid=("draft_model", "eagle3")),
}


class Plain:
    """Greedy outputs without speculation, each prompt alone, computed once."""

    def __init__(self, core: Core) -> None:
        self._core, self._known = core, {}

    def __call__(self, count: int) -> list[list[int]]:
        if count not in self._known:
            self._known[count] = [generate(self._core, [prompt])[0] for prompt in prompts(count)]
        return self._known[count]


@pytest.fixture(scope="session")
def plain(tiny_model: Path) -> Plain:
    return Plain(build(EngineConfig(model=str(tiny_model), dtype="float32", threads=1, prefix_cache=False)))


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("count", "page_size", "chunk"), [(1, 16, 512), (3, 1, 5), (7, 16, 5), (7, 4, 512)])
def test_greedy_output_is_the_same_token_by_token(
    spec_core: Callable[..., Core],
    plain: Plain,
    name: str,
    version: str,
    count: int,
    page_size: int,
    chunk: int,
) -> None:
    core = spec_core(replace(SPECS[name], spec_version=version), page_size=page_size, prefill_tokens=chunk)
    assert generate(core, prompts(count)) == plain(count)
    if not name.startswith(("none", "threshold", "schedule")):
        assert core.round.stats.drafted > 0
    core.scheduler.use_lane(InlineLane())


@pytest.mark.parametrize("name", ["ngram 8", "eagle3 5", "tree 4", "draft_model"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_shared_prefix_with_a_differing_next_token_changes_nothing(
    spec_core: Callable[..., Core], make_core: Callable[..., Core], name: str, version: str
) -> None:
    begin = prompts(1, 50)[0] * 2
    asked = [begin[:33], [*begin[:32], 7], [*begin[:32], 9, 8], [*begin[:33], 5]]
    core = spec_core(replace(SPECS[name], spec_version=version))
    outputs = [generate(core, [prompt])[0] for prompt in asked]
    assert core.prefix.hit_tokens > 60
    assert outputs == [generate(make_core(prefix_cache=False), [prompt])[0] for prompt in asked]
    core.scheduler.use_lane(InlineLane())


@pytest.mark.parametrize("name", ["none", "ngram 8", "eagle3 5", "tree 4", "draft_model", "hybrid tree"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9}, {"temperature": 2.0, "top_k": 5}]
)
def test_a_seeded_request_samples_the_same_with_and_without_speculation(
    spec_core: Callable[..., Core], name: str, sampling: dict[str, float]
) -> None:
    asked = prompts(3)
    expected = generate(spec_core(SpecConfig()), asked, seed=11, **sampling)
    assert generate(spec_core(SPECS[name]), asked, seed=11, **sampling) == expected
    assert generate(spec_core(SPECS[name]), asked, seed=12, **sampling) != expected


class Branching:
    """A drafter for tests: trees with right and wrong branches around a known continuation."""

    name = "branching"
    observes = True
    features: tuple[int, ...] = ()
    lookahead = 0
    alarm_floor = 0.0
    check = None

    def __init__(self, continuation: dict[int, list[int]], rng: np.random.Generator) -> None:
        self.full, self.rng, self.length = continuation, rng, {}

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        self.length[rid] = len(tokens)

    def observe(self, seen: Seen) -> None:
        for rid, emitted in zip(seen.rids, seen.emitted, strict=True):
            self.length[rid] += len(emitted)

    def release(self, rid: int) -> None:
        del self.length[rid]

    def propose(self, asked: Asked) -> DraftTree:
        tokens, parent, depth, start = [], [], [], [0]
        for rid, root, steps in zip(asked.rids, asked.roots.tolist(), asked.steps.tolist(), strict=True):
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
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_trees_with_wrong_branches_leave_output_and_cache_as_they_were(
    spec_core: Callable[..., Core], plain: Plain, page_size: int, version: str
) -> None:
    core = spec_core(SpecConfig("eagle3", 4, 2, 9, spec_version=version), page_size=page_size)
    known = {i: p + o for i, (p, o) in enumerate(zip(prompts(3), plain(3), strict=True))}
    core.scheduler.use_drafter(Branching(known, np.random.default_rng(3)))
    assert generate(core, prompts(3)) == plain(3)
    assert core.round.stats.accepted > 20
    core.scheduler.use_lane(InlineLane())


@pytest.mark.parametrize("name", registered())
@pytest.mark.parametrize("topk", [1, 3])
def test_every_drafter_conforms(spec_core: Callable[..., Core], name: str, topk: int) -> None:
    """Trees are well formed, no deeper and no larger than asked, in any mix of depths, for any mix of requests."""
    if topk > DRAFTERS[name].max_topk:
        return
    steps = min(4, DRAFTERS[name].max_depth)
    spec = SpecConfig().merged({"speculation": name, "num_steps": steps, "topk": topk})
    assert not spec.problems()
    core = spec_core(spec)
    drafter, seen = core.drafter, []
    propose = drafter.propose

    def spy(asked: Asked) -> DraftTree:
        tree = propose(asked)
        seen.append((asked, tree))
        return tree

    drafter.propose = spy
    generate(core, prompts(5), max_tokens=12)
    for asked, tree in seen:
        sizes = np.diff(tree.start)
        assert tree.tokens[tree.start[:-1]].tolist() == asked.roots.tolist()
        assert (sizes[asked.steps == 0] == 1).all(), "no steps, no drafts"
        assert sizes.max(initial=0) <= max(asked.shape.num_draft_tokens, 1)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        assert (tree.depth <= asked.steps[owner]).all()
        roots = tree.depth == 0
        assert (tree.parent[roots] == -1).all()
        assert (tree.parent[~roots] < np.flatnonzero(~roots)).all()
        assert (owner[tree.parent[~roots]] == owner[~roots]).all()
        assert (tree.depth[~roots] == tree.depth[tree.parent[~roots]] + 1).all()
        below = set(zip(tree.parent[~roots].tolist(), tree.tokens[~roots].tolist(), strict=True))
        assert len(below) == (~roots).sum(), "siblings carry different tokens"
        assert ((tree.tokens >= 0) & (tree.tokens < VOCAB)).all()
    assert seen
    assert drafter.limits == DRAFTERS[name]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 8), st.data())
def test_trees_keep_the_best_nodes_and_their_ancestors(
    requests: int, steps: int, topk: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tied = data.draw(st.booleans())

    def scores(*shape: int) -> np.ndarray:
        values = -rng.integers(0, 3, shape).astype(float) if tied else np.log(rng.random(shape))
        return -np.sort(-values, axis=-1)

    def children(*shape: int) -> np.ndarray:
        return rng.permuted(np.broadcast_to(np.arange(50), (*shape[:-1], 50)), axis=-1)[..., : shape[-1]].copy()

    grown = Candidates(topk, scores(requests, topk), children(requests, topk))
    for _ in range(steps - 1):
        parent, beams = grown.grow(scores(requests, topk, topk), children(requests, topk, topk))
        assert parent.max() < topk
        assert beams.shape == (requests, topk)
    most = tree_capacity(steps, topk)
    assert grown.count == most - 1
    budget = data.draw(st.integers(2, most))
    limits = rng.integers(1, steps + 1, requests)
    tree = grown.select(np.arange(requests), budget, limits)
    sizes = np.diff(tree.start)
    for b in range(requests):
        assert sizes[b] == min(budget, tree_capacity(int(limits[b]), topk))
        nodes = range(int(tree.start[b]) + 1, int(tree.start[b + 1]))
        assert all(tree.start[b] <= tree.parent[n] < n for n in nodes)
        assert all(tree.depth[n] == tree.depth[tree.parent[n]] + 1 <= limits[b] for n in nodes)


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 2**16))
def test_joined_trees_are_those_they_were_joined_from(second: list[bool], seed: int) -> None:
    rng = np.random.default_rng(seed)

    def tree(count: int) -> tuple[DraftTree, list[list[tuple[int, int]]]]:
        shape = [[tuple(rng.integers(0, 40, 2).tolist()) for _ in range(rng.integers(0, 5))] for _ in range(count)]
        return build_tree(shape), shape

    def parts(tree: DraftTree) -> list[tuple[list[int], ...]]:
        cut = [slice(a, b) for a, b in zip(tree.start[:-1], tree.start[1:], strict=True)]
        return [
            (tree.tokens[c].tolist(), np.maximum(tree.parent[c] - c.start, -1).tolist(), tree.depth[c].tolist())
            for c in cut
        ]

    which = np.array(second)
    first, others = tree(len(second))[0], tree(int(which.sum()))[0]
    rest = iter(parts(others))
    expected = [next(rest) if other else part for part, other in zip(parts(first), second, strict=True)]
    assert parts(joined(first, others, which)) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 20))
def test_lookup_finds_the_latest_match_of_the_longest_suffix(text: list[int], steps: int, cut: int) -> None:
    history = History(range(4, 1, -1), text[:cut])
    history.extend(text[cut:])
    drafts = history.draft(steps)
    expected: list[int] = []
    for n in (4, 3, 2):
        ends = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
        if ends and n <= len(text):
            expected = text[ends[-1] :][:steps]
            break
    assert drafts[: len(expected)] == expected
    assert len(drafts) == (steps if expected else 0)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_hybrids_second_drafter_goes_no_deeper_than_it_is_told(spec_core: Callable[..., Core], topk: int) -> None:
    spec = SpecConfig("hybrid", 6, topk, 7 if topk == 1 else 12, ngram_min=2, ngram_max=3, hybrid_steps=2)
    core = spec_core(spec)
    propose, depths = core.drafter.propose, set()

    def watched(asked: Asked) -> DraftTree:
        tree = propose(asked)
        for b in np.flatnonzero(asked.steps == 6).tolist():
            depths.add(int(tree.depth[tree.start[b] : tree.start[b + 1]].max()))
        return tree

    core.drafter.propose = watched
    generate(core, prompts(4), max_tokens=80)
    assert depths == {2, 6}
