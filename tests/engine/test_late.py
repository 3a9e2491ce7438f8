"""A drafter's cache that was let lie while speculation was off is, when it is wanted, what it would have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.build import Core
from engine.config import SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.reconfigure import reconfigure
from engine.scheduler.lane import InlineLane
from engine.spec import late
from engine.spec.base import Asked, DraftTree
from engine.spec.gate import HOLD_ROUNDS
from engine.spec.late import Entries, LateEntries
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_eagle3 import drafter_of, standing
from tests.engine.test_hostile_speculation import EXAMPLES, Traffic, random_request
from tests.engine.test_overlap import LateInlineLane
from tests.engine.test_spec import prompts

CHAIN, TREE = SpecConfig("eagle3", 3, 1, 4), SpecConfig("eagle3", 3, 3, 9)
MODEL, HYBRID = SpecConfig("draft_model", 3, 1, 4), SpecConfig("hybrid", 4, 1, 5, ngram_min=1, ngram_max=2)


@pytest.fixture
def core_of(make_core: Callable[..., Core], head_file: Path, small_model: Path) -> Callable[..., Core]:
    def make(spec: SpecConfig, **options: object) -> Core:
        return make_core(replace(spec, draft_head=str(head_file), draft_model=str(small_model)), **options)

    return make


def watched(core: Core) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of every tree that the core drafts from now on."""
    propose, trees = core.drafter.propose, []

    def spy(asked: Asked) -> DraftTree:
        tree = propose(asked)
        trees.append((tree.tokens.tolist(), tree.parent.tolist()))
        return tree

    core.drafter.propose = spy  # type: ignore[method-assign]
    return trees


def count_rows(core: Core) -> list[int]:
    """Rows of every run of the draft head from true features."""
    head, rows = drafter_of(core)._head, []
    extend = head.extend

    def counted(features: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(len(features))
        return extend(features, *rest)  # type: ignore[arg-type]

    head.extend = counted  # type: ignore[method-assign]
    return rows


def test_while_speculation_is_off_the_head_is_never_run_and_memory_stays_bounded(core_of: Callable[..., Core]) -> None:
    core = core_of(replace(CHAIN, disable_batch_threshold=1), kv_tokens=512)
    rows = count_rows(core)
    for _ in range(5):
        generate(core, prompts(5), max_tokens=30, stop_token_ids=())
        rows_of_last = [n for n in rows if n > 1]
    kept = drafter_of(core)._late._features
    assert kept is not None
    spare = drafter_of(core)._late._pages.page_size
    assert len(kept) == 512 + spare, "one place for each slot of the pool, however much was generated"
    # A request that is the last one for HOLD_ROUNDS rounds is drafted for; all others never were.
    assert len(rows_of_last) < 5 * HOLD_ROUNDS * 4


@pytest.mark.parametrize("spec", [CHAIN, TREE])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_made_up_late_is_what_a_fresh_run_over_the_same_text_has(
    core_of: Callable[..., Core], spec: SpecConfig, page_size: int
) -> None:
    core = core_of(replace(spec, disable_batch_threshold=1), page_size=page_size)
    prompt = prompts(3)[0]
    core.scheduler.submit(Submit(1, tuple(prompt), SamplingParams(max_tokens=200)))
    core.scheduler.submit(Submit(2, tuple(prompts(3)[1]), SamplingParams(max_tokens=20)))
    rows = count_rows(core)
    text = list(prompt)
    while not core.round.stats.drafted:
        assert not rows, "nothing was made while it was off"
        text += [t for u in core.scheduler.step() if u.rid == 1 for t in u.token_ids]
    assert sum(rows) >= len(prompt) + 20
    fresh = core_of(spec, page_size=page_size, prefill_tokens=7)
    fresh.scheduler.submit(Submit(1, tuple(text[:-1]), SamplingParams(max_tokens=200)))
    while not any(update.token_ids for update in fresh.scheduler.step()):
        pass
    old, new = (drafter_of(c)._hidden[standing(c, len(text)).rows[0]] for c in (core, fresh))
    assert torch.allclose(old, new, atol=1e-4)
    trees = [drafter_of(c).propose(standing(c, len(text))) for c in (core, fresh)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].parent.tolist() == trees[1].parent.tolist()


@pytest.mark.parametrize("spec", [CHAIN, TREE, MODEL, HYBRID], ids=lambda spec: f"{spec.speculation} {spec.topk}")
def test_a_prefix_that_ended_while_it_was_late_is_made_up_for_who_shares_it(
    core_of: Callable[..., Core], spec: SpecConfig
) -> None:
    begin = prompts(1, 50)[0] * 2
    core, eager = core_of(spec), core_of(spec)
    for c, change in ((core, {"steps_by_batch": "1:0"}), (eager, {})):
        reconfigure(c, change)
        generate(c, [begin], max_tokens=30)
        reconfigure(c, {"steps_by_batch": None})
    trees = [watched(c) for c in (core, eager)]
    text = begin + generate(make_plain(core_of), [begin], max_tokens=30)[0]
    outputs = [generate(c, [[*text[:70], 3], [*text[:60], 4, 5], text]) for c in (core, eager)]
    assert core.prefix.hit_tokens > 120
    assert outputs[0] == outputs[1]
    assert trees[0] == trees[1]


def make_plain(core_of: Callable[..., Core]) -> Core:
    return core_of(SpecConfig())


def test_what_is_late_is_made_a_bounded_part_at_a_time(
    core_of: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "AT_ONCE", 16)
    core = core_of(replace(CHAIN, disable_batch_threshold=2))
    expected = generate(core_of(SpecConfig()), prompts(4), max_tokens=60)
    rows, trees = count_rows(core), watched(core)
    for rid, prompt in enumerate(prompts(4)):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=60 if rid < 2 else 20)))
    outputs: dict[int, list[int]] = {rid: [] for rid in range(4)}
    while core.scheduler.busy:
        for update in core.scheduler.step():
            outputs[update.rid] += update.token_ids
    assert [outputs[0], outputs[1]] == expected[:2]
    assert max(rows) == 16
    assert rows[0] == 16
    sizes = [len(tokens) for tokens, _ in trees]
    assert max(sizes) == 8, "in the end both are drafted for, four nodes each"


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32))
def test_every_draft_is_that_of_a_cache_that_was_kept_up_all_the_time(
    core_of: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same traffic twice, with speculation going off and on: once put off, once not. Every tree is the same."""
    keep = LateEntries.keep
    found = []
    for eager in (False, True):
        rng = np.random.default_rng(seed)
        spec = [CHAIN, TREE, MODEL, HYBRID][int(rng.integers(4))]
        spec = replace(spec, disable_batch_threshold=int(rng.integers(1, 4)))
        core = core_of(
            spec,
            page_size=int(rng.choice([1, 4])),
            prefill_tokens=int(rng.choice([5, 512])),
            max_running_requests=int(rng.integers(2, 6)),
            kv_tokens=int(rng.choice([150, 4000])),
        )
        if rng.random() < 0.5:
            core.scheduler.use_lane(LateInlineLane())

        def kept(self: LateEntries, entries: Entries, speculating: bool, eager: bool = eager) -> Entries:
            return keep(self, entries, speculating or eager)

        with monkeypatch.context() as patch:
            patch.setattr(LateEntries, "keep", kept)
            trees, traffic = watched(core), Traffic(core, rng)
            shared = rng.integers(1, VOCAB, 40).tolist()
            traffic.run([random_request(rng, shared) for _ in range(10)], changes=0)
        core.scheduler.use_lane(InlineLane())
        found.append(trees)
    assert found[0] == found[1]
