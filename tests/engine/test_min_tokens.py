"""`min_tokens`: no end token before so many tokens, whoever drafts, however rounds are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.build import Core
from engine.config import SpecConfig
from engine.scheduler.lane import InlineLane
from engine.spec.gate import SpecGate
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_logits import plain_logits, run
from tests.engine.test_overlap import LateInlineLane
from tests.engine.test_spec import SPECS, Branching, prompts

LEAST, MOST = 15, 30


def by_hand(core: Core, prompt: list[int], ends: tuple[int, ...], least: int, most: int = MOST) -> list[int]:
    """Greedy decoding in which end tokens are out of reach for `least` tokens."""
    output: list[int] = []
    while len(output) < most:
        row = plain_logits(core, prompt + output)[-1].clone()
        if len(output) < least:
            row[list(ends)] = float("-inf")
        output.append(int(row.argmax()))
        if output[-1] in ends:
            break
    return output


@pytest.fixture
def ended(make_core: Callable[..., Core]) -> tuple[list[list[int]], tuple[int, ...]]:
    """Prompts, and end tokens that come soon after each of them."""
    asked = prompts(4)
    soon = [output[2] for output in generate(make_core(), asked, max_tokens=4)]
    return asked, tuple(sorted(set(soon)))


def sampling(ends: tuple[int, ...], **more: object) -> dict[str, object]:
    return {"max_tokens": MOST, "min_tokens": LEAST, "stop_token_ids": ends, **more}


@pytest.mark.parametrize("name", ["none", "ngram 8", "eagle3 5", "tree 4", "draft_model", "hybrid tree"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_ends_are_out_of_reach_until_then_and_speculation_does_not_show(
    make_core: Callable[..., Core],
    spec_core: Callable[..., Core],
    ended: tuple[list[list[int]], tuple[int, ...]],
    name: str,
    version: str,
) -> None:
    asked, ends = ended
    expected = [by_hand(make_core(), prompt, ends, LEAST) for prompt in asked]
    assert any(output[-1] in ends for output in expected)
    assert all(not {*output[:LEAST]} & {*ends} for output in expected)
    core = spec_core(replace(SPECS[name], spec_version=version))
    assert generate(core, asked, **sampling(ends)) == expected
    core.scheduler.use_lane(LateInlineLane())
    assert generate(core, asked, **sampling(ends)) == expected
    core.scheduler.use_lane(InlineLane())


def test_a_drafted_end_is_refused_within_a_tree_too(
    make_core: Callable[..., Core], ended: tuple[list[list[int]], tuple[int, ...]]
) -> None:
    """Every branch that is drafted goes to what would have come without a least number."""
    asked, ends = ended
    core = make_core()
    expected = [by_hand(core, prompt, ends, LEAST) for prompt in asked]
    # Right up to where an end token would have been chosen, then that token, then what comes after the other one.
    known = {i: p + o for i, (p, o) in enumerate(zip(asked, expected, strict=True))}
    drafter = Branching(known, np.random.default_rng(1))
    tempted = drafter.propose

    def with_ends(given):  # type: ignore[no-untyped-def]
        tree = tempted(given)
        leaves = np.setdiff1d(np.arange(len(tree.tokens)), tree.parent)
        tree.tokens[leaves[tree.depth[leaves] > 0]] = ends[0]
        return tree

    drafter.propose = with_ends  # type: ignore[method-assign]
    core.scheduler.use_drafter(drafter)
    core.scheduler.gate = SpecGate(SpecConfig("eagle3", 4, 2, 9))
    assert generate(core, asked, **sampling(ends)) == expected
    assert core.round.stats.accepted > 10


@pytest.mark.parametrize("acceptance", ["target", "rejection"])
@pytest.mark.parametrize("name", ["none", "ngram 8", "eagle3 5", "draft_model"])
def test_sampled_outputs_hold_to_it_as_well(spec_core: Callable[..., Core], name: str, acceptance: str) -> None:
    ends = tuple(range(0, VOCAB, 3))  # a third of the vocabulary: it would soon come
    asked = prompts(4)
    given = sampling(ends, temperature=1.3, seed=5)
    outputs = generate(spec_core(replace(SPECS[name], acceptance=acceptance)), asked, **given)
    for output in outputs:
        assert not {*output[:LEAST]} & {*ends}
        assert len(output) >= LEAST
    assert any(len(output) < MOST for output in outputs)
    if acceptance == "target":
        assert outputs == generate(spec_core(SpecConfig()), asked, **given)


def test_it_survives_preemption_and_goes_with_penalties(
    make_core: Callable[..., Core], ended: tuple[list[list[int]], tuple[int, ...]]
) -> None:
    asked, ends = ended
    for more in ({}, {"repetition_penalty": 1.2, "logit_bias": ((ends[0], 5.0),)}):
        squeezed = make_core(kv_tokens=96, prefill_tokens=7)
        outputs = generate(squeezed, asked * 2, **sampling(ends, **more))
        assert squeezed.scheduler.preemptions > 0
        assert outputs == generate(make_core(), asked * 2, **sampling(ends, **more))
        assert all(not {*output[:LEAST]} & {*ends} for output in outputs)


def test_log_probabilities_stay_the_models_own(
    make_core: Callable[..., Core], ended: tuple[list[list[int]], tuple[int, ...]]
) -> None:
    asked, ends = ended
    core = make_core()
    updates = run(core, asked[0], logprobs=2, **sampling(ends))
    output = [token for update in updates for token in update.token_ids]
    exact = plain_logits(core, asked[0] + output).log_softmax(-1)[len(asked[0]) - 1 :]
    told = [entry for update in updates for entry in update.logprobs]
    for at, (entry, token) in enumerate(zip(told, output, strict=True)):
        assert entry.value == pytest.approx(exact[at, token].item(), abs=1e-4)
        assert [index for index, _ in entry.top] == exact[at].topk(2).indices.tolist()
    assert any(index in ends for entry in told[:LEAST] for index, _ in entry.top)
