"""Penalties do what they say, log-probabilities are the model's own, and speculation shows in neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.build import Core
from engine.config import SpecConfig
from engine.ipc.messages import SamplingParams, Submit, TokenUpdate
from engine.memory.pool import KVPool
from engine.ops.base import causal_view
from engine.spec.gate import SpecGate
from tests.engine.conftest import generate
from tests.engine.test_spec import Branching, prompts

NGRAM = SpecConfig("ngram", 3, 1, 4, ngram_min=1, ngram_max=3)
PENALTIES = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "frequency_penalty": -0.7},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "presence_penalty": 1.0, "logit_bias": ((5, 4.0), (17, -100.0))},
    {"logit_bias": ((33, 3.0),)},
]


def plain_logits(core: Core, tokens: Sequence[int]) -> torch.Tensor:
    """Of every position, by one forward over an empty cache."""
    config = core.model.config
    pool = KVPool(config.layers, len(tokens), 1, config.kv_heads, config.head_dim, torch.float32)
    with torch.inference_mode():
        table = torch.arange(len(tokens), dtype=torch.int32).unsqueeze(0)
        return core.model.forward(causal_view(torch.tensor(tokens), table, 1), pool)


def run(core: Core, prompt: Sequence[int], **sampling: object) -> list[TokenUpdate]:
    assert core.scheduler.submit(Submit(1, tuple(prompt), SamplingParams(**sampling))) is None
    updates = []
    while core.scheduler.busy:
        updates += core.scheduler.step()
    core.scheduler.check()
    return updates


def by_hand(core: Core, prompt: list[int], count: int, penalties: dict[str, object]) -> list[int]:
    """Greedy decoding with the penalties as their formulas stand, token by token."""
    p = SamplingParams(**penalties)  # type: ignore[arg-type]
    output: list[int] = []
    for _ in range(count):
        row = plain_logits(core, prompt + output)[-1].tolist()
        for token in set(prompt + output):
            row[token] *= 1 / p.repetition_penalty if row[token] > 0 else p.repetition_penalty
        for token, times in Counter(output).items():
            row[token] -= p.presence_penalty + p.frequency_penalty * times
        for token, value in p.logit_bias:
            row[token] += value
        output.append(int(np.argmax(row)))
    return output


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
def test_penalties_do_what_their_formulas_say(
    make_core: Callable[..., Core], spec: SpecConfig, penalties: dict[str, object]
) -> None:
    core = make_core(spec)
    prompt = prompts(3)[1]
    assert generate(core, [prompt], max_tokens=25, **penalties)[0] == by_hand(core, prompt, 25, penalties)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4, "min_p": 0.02}])
def test_penalties_count_along_each_path_of_a_tree(make_core: Callable[..., Core], sampling: dict[str, float]) -> None:
    asked = prompts(4)
    given = {**PENALTIES[3], **sampling}
    plain = generate(make_core(), asked, **given)
    core = make_core()
    known = {i: p + o for i, (p, o) in enumerate(zip(asked, plain, strict=True))}
    core.scheduler.use_drafter(Branching(known, np.random.default_rng(3)))
    core.scheduler.gate = SpecGate(SpecConfig("eagle3", 4, 2, 9))
    assert generate(core, asked, **given) == plain
    assert core.round.stats.accepted > 20


@pytest.mark.parametrize("settings", [{}, {"prefill_tokens": 7}, {"spec": NGRAM}])
@pytest.mark.parametrize("penalties", [{}, PENALTIES[1]], ids=str)
def test_log_probabilities_are_those_of_one_plain_forward(
    make_core: Callable[..., Core], settings: dict[str, object], penalties: dict[str, object]
) -> None:
    core = make_core(**settings)
    prompt = prompts(3)[2]
    for _ in range(2):  # the second time, the prefix cache knows the prompt
        updates = run(core, prompt, max_tokens=20, logprobs=3, prompt_logprobs=2, **penalties)
        output = [token for update in updates for token in update.token_ids]
        exact = plain_logits(core, prompt + output).log_softmax(-1)
        reported = [*updates[0].prompt_logprobs, *(entry for update in updates for entry in update.logprobs)]
        assert len(reported) == len(prompt) - 1 + 20
        for at, (entry, token) in enumerate(zip(reported, (prompt + output)[1:], strict=True)):
            assert entry.value == pytest.approx(exact[at, token].item(), abs=1e-4)
            best = exact[at].topk(2 if at < len(prompt) - 1 else 3)
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [index for index, _ in entry.top] == best.indices.tolist()
        assert not any(update.prompt_logprobs for update in updates[1:])


def test_a_prompt_can_be_scored_without_any_output(make_core: Callable[..., Core]) -> None:
    core = make_core(NGRAM)
    updates = run(core, [4, 5, 6], max_tokens=0, prompt_logprobs=0)
    assert [(u.token_ids, u.finish, len(u.prompt_logprobs)) for u in updates] == [((), "length", 2)]
    updates = run(core, [4], max_tokens=0, prompt_logprobs=0)
    assert [(u.token_ids, u.finish, u.prompt_logprobs) for u in updates] == [((), "length", ())]


def test_log_probabilities_survive_preemption(make_core: Callable[..., Core]) -> None:
    core = make_core(kv_tokens=100, prefill_tokens=6)
    asked = prompts(6)
    params = SamplingParams(max_tokens=30, logprobs=0, prompt_logprobs=0)
    for rid, prompt in enumerate(asked):
        core.scheduler.submit(Submit(rid, tuple(prompt), params))
    updates = []
    while core.scheduler.busy:
        updates += core.scheduler.step()
    assert core.scheduler.preemptions > 0
    for rid, prompt in enumerate(asked):
        mine = [u for u in updates if u.rid == rid]
        assert sum(len(u.logprobs) for u in mine) == 30
        assert [len(u.prompt_logprobs) for u in mine] == [len(prompt) - 1] + [0] * (len(mine) - 1)
        output = [token for u in mine for token in u.token_ids]
        exact = plain_logits(core, prompt + output).log_softmax(-1)
        values = [entry.value for u in mine for entry in (*u.prompt_logprobs, *u.logprobs)]
        wanted = [exact[at, token].item() for at, token in enumerate((prompt + output)[1:])]
        assert values == pytest.approx(wanted, abs=1e-4)
