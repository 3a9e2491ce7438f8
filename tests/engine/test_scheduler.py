"""More requests than fit wait or start again, and nobody's output shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from engine.build import Core
from engine.config import EngineConfig, SpecConfig
from engine.errors import InvalidConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.spec.gate import HOLD_ROUNDS, SpecGate
from engine.worker import warm_up
from tests.engine.conftest import generate
from tests.engine.test_spec import prompts

NGRAM = SpecConfig("ngram", 3, 1, 4, ngram_min=1, ngram_max=3)


@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
@pytest.mark.parametrize("kv_tokens", [96, 200, 600])
def test_32_streams_whose_pages_exceed_the_pool_wait_and_are_unchanged(
    make_core: Callable[..., Core], spec: SpecConfig, kv_tokens: int
) -> None:
    asked = prompts(32)
    core = make_core(spec, kv_tokens=kv_tokens)
    squeezed = generate(core, asked)
    assert core.scheduler.preemptions > 0
    assert squeezed == generate(make_core(max_running_requests=32), asked)


def test_sampled_output_survives_preemption(make_core: Callable[..., Core]) -> None:
    core = make_core(kv_tokens=100)
    sampled = generate(core, prompts(8), temperature=1.0, seed=3)
    assert core.scheduler.preemptions > 0
    assert sampled == generate(make_core(), prompts(8), temperature=1.0, seed=3)


def test_a_request_larger_than_the_pool_is_refused_at_once_with_the_figures(make_core: Callable[..., Core]) -> None:
    core = make_core(kv_tokens=40)
    refused = core.scheduler.submit(Submit(1, tuple(range(1, 30)), SamplingParams(max_tokens=20)))
    assert refused is not None
    assert refused.finish == "error"
    assert "49 tokens" in refused.error
    assert "40" in refused.error
    assert not core.scheduler.busy


def test_stop_tokens_end_a_request_unless_it_ignores_them(make_core: Callable[..., Core]) -> None:
    prompt = prompts(1)
    whole = generate(make_core(), prompt)[0]
    stop = whole[6]
    first = whole.index(stop)
    for spec in (SpecConfig(), NGRAM):
        assert generate(make_core(spec), prompt, stop_token_ids=(stop,))[0] == whole[: first + 1]
        assert generate(make_core(spec), prompt, stop_token_ids=(stop,), ignore_eos=True)[0] == whole


@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
def test_aborting_anywhere_frees_everything_and_disturbs_nobody(
    make_core: Callable[..., Core], spec: SpecConfig
) -> None:
    asked = prompts(6)
    expected = generate(make_core(spec), asked)
    core = make_core(spec, max_running_requests=4)
    outputs: dict[int, list[int]] = {i: [] for i in range(6)}
    for rid, prompt in enumerate(asked):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=40)))
    rounds = 0
    while core.scheduler.busy:
        for update in core.scheduler.step():
            outputs[update.rid].extend(update.token_ids)
        rounds += 1
        if rounds == 3:
            for rid in (0, 5, 77):
                core.scheduler.abort(rid)
    core.scheduler.check()
    assert [outputs[i] for i in range(1, 5)] == expected[1:5]
    assert outputs[5] == []


def depths(gate: SpecGate, sizes: Iterable[int]) -> list[int]:
    return [gate.shape(size).num_steps for size in sizes]


def test_the_threshold_turns_speculation_off_above_it_at_once_and_on_again_when_it_holds() -> None:
    gate = SpecGate(SpecConfig("ngram", 3, 1, 4, disable_batch_threshold=2))
    assert depths(gate, [1, 2, 3, 10]) == [3, 3, 0, 0]
    assert depths(gate, [2] * HOLD_ROUNDS) == [0] * (HOLD_ROUNDS - 1) + [3]
    assert gate.transitions == 2
    flapping = [size for _ in range(50) for size in (2, 2, 2, 3)]
    assert sum(depths(gate, flapping)[3:]) == 0, "a batch that hovers at the threshold does not flap"
    assert gate.transitions == 3


def test_a_schedule_gives_the_depth_from_each_number_of_requests_on() -> None:
    config = SpecConfig("eagle3", 5, 1, 6, steps_by_batch=((1, 0), (8, 5), (16, 2), (64, 0)))
    for size, depth in {1: 0, 7: 0, 8: 5, 15: 5, 16: 2, 63: 2, 64: 0, 500: 0}.items():
        assert SpecGate(config).shape(size).num_steps == depth
    assert SpecGate(config).shape(16).num_draft_tokens == 3


def test_the_adaptive_policy_follows_acceptance() -> None:
    gate = SpecGate(SpecConfig("eagle3", 5, 1, 6, policy="adaptive"))
    for _ in range(60):
        gate.observe(gate.shape(2).num_steps, 10, 2)  # hardly any draft is right
    assert gate.shape(2).num_steps == 1
    for _ in range(100):
        steps = gate.shape(2).num_steps
        gate.observe(steps, 2, 2 * steps)  # all are
    assert gate.shape(2).num_steps == 5
    assert gate.shape(40).num_steps <= 1
    for _ in range(60):
        gate.observe(gate.shape(40).num_steps, 40, 4)
    assert gate.shape(40).num_steps == 0
    looks = [gate.shape(40).num_steps for _ in range(400)]
    assert 0 < sum(looks) < 400, "it looks again now and then"


def test_nan_fails_that_request_and_no_other(make_core: Callable[..., Core]) -> None:
    core = make_core()
    good = generate(core, [[1, 2, 3]])[0]
    poisoned = 96
    core.model._embedding[poisoned] = float("nan")
    core.scheduler.submit(Submit(1, (poisoned, 5), SamplingParams(max_tokens=40)))
    core.scheduler.submit(Submit(2, (1, 2, 3), SamplingParams(max_tokens=40)))
    updates = [update for _ in range(60) for update in core.scheduler.step()]
    assert [u.error for u in updates if u.rid == 1] == ["the model produced NaN for this request"]
    tokens = [t for u in updates if u.rid == 2 for t in u.token_ids]
    assert tokens == good[: len(tokens)]
    assert len(tokens) > 3


def test_warm_up_makes_real_tokens_and_leaves_no_trace(make_core: Callable[..., Core]) -> None:
    core = make_core(NGRAM)
    warm_up(core)
    counters = core.counters()
    assert counters["engine_generated_tokens_total"] == 0
    assert counters["engine_kv_pages_free"] == counters["engine_kv_pages"]


def test_effective_settings_are_read_from_the_objects(make_core: Callable[..., Core]) -> None:
    core = make_core(NGRAM, kv_tokens=101)
    info = core.info()
    assert info["effective"]["num_steps"] == 3
    assert info["effective"]["kv_tokens"] == 104
    told = {d["setting"]: (d["requested"], d["effective"]) for d in info["differences"]}
    assert told["kv_tokens"] == (101, 104)
    core.scheduler.gate = SpecGate(SpecConfig())
    assert core.info()["effective"]["num_steps"] == 0


def test_all_problems_are_named_at_once(make_core: Callable[..., Core]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        make_core(SpecConfig("ngram", 9, 2, 3, disable_batch_threshold=0), page_size=0)
    for name in ("num_steps", "topk", "disable_batch_threshold", "page_size"):
        assert name in str(caught.value)
    with pytest.raises(InvalidConfig, match="context_length"):
        make_core(context_length=100_000)
    with pytest.raises(InvalidConfig, match=r"kv_tokens.*GiB"):
        make_core(kv_tokens=2**39)
    for name in ("page_size", "threads", "max_running_requests"):
        with pytest.raises(InvalidConfig, match=name):
            make_core(**{name: 10**9})
    assert EngineConfig(api_key="secret").public()["api_key"] == "set"
    assert torch.get_num_threads() >= 1


def test_256_streams_at_once_are_served_as_each_would_be_alone(make_core: Callable[..., Core]) -> None:
    asked = prompts(256, longest=12)
    core = make_core(NGRAM, max_running_requests=256, kv_tokens=8192)
    together = generate(core, asked, max_tokens=8)
    alone = make_core()
    assert [together[i] for i in (0, 100, 255)] == [generate(alone, [asked[i]], max_tokens=8)[0] for i in (0, 100, 255)]


@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
def test_a_long_prompt_holds_up_decoding_by_no_more_than_a_chunk(
    make_core: Callable[..., Core], spec: SpecConfig
) -> None:
    core = make_core(spec, prefill_tokens=16)
    for rid in range(3):
        core.scheduler.submit(Submit(rid, (rid + 1, 2, 3), SamplingParams(max_tokens=60)))
    core.scheduler.step()
    core.scheduler.submit(Submit(9, tuple(i % 90 + 1 for i in range(150)), SamplingParams(max_tokens=1)))
    for _ in range(150 // 16):
        rows = core.round.stats.rows
        emitted = {update.rid for update in core.scheduler.step()}
        assert emitted == {0, 1, 2}, "everyone who decodes gets a token every round"
        assert core.round.stats.rows - rows <= 16 + 3 * (1 + spec.num_steps)
    assert 9 in {update.rid for update in core.scheduler.step()}


def test_under_overload_the_oldest_goes_on_and_nobody_is_overtaken(make_core: Callable[..., Core]) -> None:
    """New requests without end, in a pool that holds two: equal requests end in order of arrival."""
    core = make_core(kv_tokens=100, max_running_requests=8, prefix_cache=False)
    ended: list[int] = []
    arrived = 0
    while len(ended) < 30:
        for _ in range(2 if arrived < 200 else 0):
            core.scheduler.submit(Submit(arrived, (arrived % 90 + 1, 2, 3), SamplingParams(max_tokens=30)))
            arrived += 1
        ended += [update.rid for update in core.scheduler.step() if update.finish]
    assert core.scheduler.preemptions > 0
    assert ended == list(range(30))
