"""Sampled drafts, kept or replaced, leave exactly the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare

from engine.build import Core
from engine.config import DraftShape, SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.ops.base import causal_view
from engine.ops.reference import ReferenceOps
from engine.ops.rejection import keep_or_sample, probabilities
from engine.ops.sampling import KEEP_STREAM, REST_STREAM, coins, distribution, inverse
from engine.spec.base import Asked, ChainBuilder
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_spec import prompts


@settings(max_examples=50, deadline=None)
@given(st.floats(0.2, 3.0), st.integers(0, 12), st.floats(0.05, 1.0), st.floats(0.0, 0.3), st.integers(0, 2**20))
def test_probabilities_are_what_is_sampled_from(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed))
    got = probabilities(logits, np.full(3, temperature), np.full(3, top_k), np.full(3, top_p), np.full(3, min_p))
    for row, expected in zip(
        got, (distribution(line, temperature, top_k, top_p, min_p) for line in logits), strict=True
    ):
        assert torch.allclose(row, expected, atol=1e-9)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_kept_or_sampled_the_distribution_is_the_targets(reduced: bool, top_p: float) -> None:
    """Chi-square over 200,000 draws on a toy target of 12 tokens, the draft knowing 7 of them or all."""
    rng = torch.Generator().manual_seed(5)
    n, vocab = 200_000, 12
    p = distribution(torch.randn(vocab, generator=rng), 1.0, top_p=top_p)
    hot = torch.tensor([0, 2, 3, 5, 7, 8, 11]) if reduced else None
    q = torch.randn(7 if reduced else vocab, generator=rng).double().softmax(-1)
    seeds, zero = np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.uint64)
    draft_coin, keep, rest = (coins(seeds, zero + np.uint64(i)) for i in (1, 2, 3))
    ids = inverse(q.expand(n, -1), torch.from_numpy(draft_coin))
    drafts = (ids if hot is None else hot[ids]).numpy()
    got = keep_or_sample(p.expand(n, -1).contiguous(), q.expand(n, -1), hot, drafts, keep, rest)
    counts, expected = np.bincount(got, minlength=vocab), (p * n).numpy()
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    assert chisquare(counts[some], expected[some]).pvalue > 1e-4
    wide = torch.zeros(vocab, dtype=torch.float64)
    wide[torch.arange(vocab) if hot is None else hot] = q
    kept = float((got == drafts).mean())
    assert kept >= float(torch.minimum(p, wide).sum()) - 0.01, "a draft is kept as often as can be"


def test_drafts_from_nan_leave_the_targets_distribution() -> None:
    """A head that computes NaN drafts any of its tokens alike; what is kept or sampled is distributed as before."""
    n, vocab, hot = 100_000, 12, torch.tensor([0, 2, 3, 5, 7, 8, 11])
    p = distribution(torch.randn(vocab, generator=torch.Generator().manual_seed(6)), 1.0)
    seeds, zeros = np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int64)
    asked = Asked(range(n), zeros, zeros, zeros, zeros + 1, DraftShape(1, 1, 2), np.ones(n), seeds)
    builder = ChainBuilder(ReferenceOps(), asked, hot)
    builder.add(torch.full((n, 7), float("nan")))
    tree = builder.tree()
    (proposal,) = tree.proposals
    at = np.ones(n, dtype=np.uint64)
    keep, rest = (coins(seeds ^ stream, at) for stream in (KEEP_STREAM, REST_STREAM))
    got = keep_or_sample(p.expand(n, -1).contiguous(), proposal.q, hot, tree.tokens[proposal.nodes], keep, rest)
    assert chisquare(np.bincount(got, minlength=vocab), (p * n).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig(),
        SpecConfig("eagle3", 3, 1, 4, acceptance="rejection"),
        SpecConfig("draft_model", 2, 1, 3, acceptance="rejection"),
        SpecConfig("hybrid", 3, 1, 4, ngram_min=1, ngram_max=2, acceptance="rejection"),
        SpecConfig("eagle3", 2, 4, 12),
    ],
    ids=lambda spec: f"{spec.speculation} {spec.acceptance} {spec.topk}",
)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_every_acceptance_rule_yields_the_targets_distribution(
    make_core: Callable[..., Core], head_file: Path, small_model: Path, spec: SpecConfig, top_p: float
) -> None:
    """The first three tokens of 2,000 seeds: each one's distribution given those before it, against the exact one."""
    core = make_core(replace(spec, draft_head=str(head_file), draft_model=str(small_model)), max_running_requests=100)
    prompt = prompts(3)[0]
    temperature = 0.25 if top_p == 1.0 else 0.6
    params = SamplingParams(max_tokens=4, temperature=temperature, top_p=top_p)
    texts = []
    for first in range(0, 2000, 100):
        for rid in range(100):
            core.scheduler.submit(Submit(rid, tuple(prompt), replace(params, seed=first + rid)))
        made: dict[int, list[int]] = {rid: [] for rid in range(100)}
        while core.scheduler.busy:
            for update in core.scheduler.step():
                made[update.rid] += update.token_ids
        texts += made.values()
    statistic, freedom = 0.0, 0
    for depth in range(3):
        groups: dict[tuple[int, ...], list[int]] = {}
        for text in texts:
            groups.setdefault(tuple(text[:depth]), []).append(text[depth])
        for prefix, tokens in groups.items():
            if len(tokens) < 150:
                continue
            counts, exact = (
                np.bincount(tokens, minlength=VOCAB),
                exact_next(core, [*prompt, *prefix], temperature, top_p),
            )
            assert (counts[exact == 0] == 0).all()
            common = exact * len(tokens) >= 5
            seen = np.append(counts[common], counts[~common].sum())
            wanted = np.append(exact[common], exact[~common].sum()) * len(tokens)
            seen, wanted = seen[wanted > 0], wanted[wanted > 0]
            statistic += float(((seen - wanted) ** 2 / wanted).sum())
            freedom += len(seen) - 1
    assert freedom > 5
    assert chi2.sf(statistic, freedom) > 1e-4
    if spec.speculation != "none":
        assert core.round.stats.drafted > 1000


def exact_next(core: Core, tokens: list[int], temperature: float, top_p: float) -> np.ndarray:
    row = core.pages.open_row()
    core.pages.grow(row, len(tokens))
    view = causal_view(torch.tensor(tokens), core.pages.table[row : row + 1], core.pages.page_size)
    with torch.inference_mode():
        logits = core.model.forward(view, core.pool)[-1]
    core.pages.close_row(row)
    return distribution(logits, temperature, top_p=top_p).numpy()


def test_a_draft_from_the_target_itself_is_always_kept(make_core: Callable[..., Core], tiny_model: Path) -> None:
    core = make_core(SpecConfig("draft_model", 4, 1, 5, draft_model=str(tiny_model), acceptance="rejection"))
    generate(core, prompts(3), temperature=1.0, seed=3)
    assert core.round.stats.accepted >= 0.98 * core.round.stats.drafted


def test_greedy_requests_are_untouched_by_the_rule(make_core: Callable[..., Core], head_file: Path) -> None:
    core = make_core(SpecConfig("eagle3", 3, 1, 4, acceptance="rejection", draft_head=str(head_file)))
    assert generate(core, prompts(3)) == generate(make_core(), prompts(3))
