"""A model cut over ranks computes what it computes whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig, default_draft_tokens
from engine.errors import InvalidConfig, RanksDisagree
from engine.model.shard import Sizes, shards
from engine.reconfigure import reconfigure
from tests.engine.conftest import VOCAB, generate, tiny_head, tiny_llama
from tests.engine.threads_as_ranks import ThreadCrew, on_ranks

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [5, 6, 5, 6, 5, 6, 5], list(range(30, 60)), [9]]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's heads: 9 of queries and 3 of keys and values, which two ranks cannot share evenly."""
    folder = tmp_path_factory.mktemp("uneven")
    return tiny_llama(folder, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=160)


@pytest.fixture(scope="module")
def uneven_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("small"),
        seed=1,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=3,
    )


@pytest.fixture(scope="module")
def uneven_head(uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_head(build(settings(uneven)), tmp_path_factory.mktemp("head") / "head.safetensors")


def settings(model: Path, spec: SpecConfig | None = None, **more: object) -> EngineConfig:
    defaults: dict[str, object] = {"model": str(model), "dtype": "float32", "page_size": 4, "threads": 1}
    return EngineConfig(**{**defaults, **more}, spec=spec or SpecConfig())


def on(config: EngineConfig, work: Callable[[Core], object], name: str = "shm") -> list[object]:
    """`work` on every rank of an engine with these settings."""
    if config.tp == 1:
        return [work(build(config))]
    return on_ranks(config.tp, lambda crew: work(build(config, crew)), name)


def outputs(core: Core) -> list[list[int]]:
    greedy = generate(core, PROMPTS)
    return greedy + generate(core, PROMPTS, temperature=0.9, seed=7, top_p=0.9, max_tokens=20)


sizes = st.builds(
    Sizes,
    hidden=st.sampled_from([48, 576, 4096]),
    q_heads=st.just(0),
    kv_heads=st.integers(1, 12),
    head_dim=st.sampled_from([8, 64, 128]),
    intermediate=st.integers(64, 20_000),
    vocab=st.integers(500, 200_000),
)


@given(sizes, st.integers(1, 4), st.integers(1, 12))
def test_every_head_column_and_token_has_exactly_one_rank(part: Sizes, each: int, ranks: int) -> None:
    whole = Sizes(part.hidden, part.kv_heads * each, part.kv_heads, part.head_dim, part.intermediate, part.vocab)
    if ranks > whole.kv_heads:
        with pytest.raises(InvalidConfig, match=f"valid: 1 to {whole.kv_heads}"):
            shards(whole, ranks)
        return
    found = shards(whole, ranks)
    for name, total in (("q_heads", whole.q_heads), ("kv_heads", whole.kv_heads), ("inner", whole.intermediate)):
        assert [i for shard in found for i in getattr(shard, name)] == list(range(total))
    assert [shard.vocab.start for shard in found[1:]] == [shard.vocab.stop for shard in found[:-1]]
    assert sum(found[0].widths) == whole.vocab
    for shard in found:
        assert [head // each for head in shard.q_heads[::each]] == list(shard.kv_heads)


def test_smollm2_over_two_ranks_weighs_the_same_on_both() -> None:
    first, second = shards(Sizes(576, 9, 3, 64, 1536, 49152), 2)
    assert (len(first.kv_heads), len(second.kv_heads)) == (2, 1)
    weights = [len(s.kv_heads) * 576 * 64 * 8 + len(s.inner) * 3 * 576 for s in (first, second)]
    assert 0.97 < weights[0] / weights[1] < 1.03
    assert all(len(s.inner) % 32 == 0 for s in (first, second))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("spec_version", ["v1", "v2"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3", "eagle3 tree", "hybrid"])
def test_output_is_that_of_one_rank(
    uneven: Path, uneven_small: Path, uneven_head: Path, drafter: str, spec_version: str, tp: int
) -> None:
    name, _, tree = drafter.partition(" ")
    steps, topk = (0 if name == "none" else 3), (2 if tree else 1)
    rows = 1 if name == "none" else default_draft_tokens(steps, topk)
    spec = SpecConfig(
        name, steps, topk, rows, spec_version=spec_version, draft_head=str(uneven_head), draft_model=str(uneven_small)
    )
    whole = on(settings(uneven, SpecConfig(spec_version=spec_version)), outputs)[0]
    for told in on(settings(uneven, spec, tp=tp), outputs):
        assert told == whole


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_are_those_of_one_rank(uneven: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernels: str) -> None:
    if kernels == "reference":
        import engine.build
        from engine.ops.native import NativeUnavailable

        def refuse(dtype: torch.dtype) -> None:
            raise NativeUnavailable("for a test")

        monkeypatch.setattr(engine.build, "NativeOps", refuse)
    reports: dict[str, object] = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 12, "presence_penalty": 0.5}

    def work(core: Core) -> object:
        from engine.ipc.messages import SamplingParams, Submit

        core.scheduler.submit(Submit(1, tuple(PROMPTS[2]), SamplingParams(**reports)))  # type: ignore[arg-type]
        values = []
        while core.scheduler.busy:
            for update in core.scheduler.step():
                values += [entry.value for entry in (*update.prompt_logprobs, *update.logprobs)]
        return torch.tensor(values)

    whole = on(settings(uneven), work)[0]
    assert len(whole) == len(PROMPTS[2]) - 1 + 12  # type: ignore[arg-type]
    for told in on(settings(uneven, tp=2), work, name):
        torch.testing.assert_close(told, whole, rtol=1e-4, atol=1e-4)


def test_a_draft_with_too_few_heads_runs_whole_on_every_rank(uneven: Path, small_model: Path) -> None:
    spec = SpecConfig("draft_model", 3, 1, 4, draft_model=str(small_model))  # 2 KV heads
    whole = on(settings(uneven), outputs)[0]
    for told in on(settings(uneven, spec, tp=3), outputs):
        assert told == whole


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_whole_number_weights_are_cut_too(uneven: Path, weights: str) -> None:
    for told in on(settings(uneven, dtype="bfloat16", weights=weights, tp=2), lambda core: generate(core, PROMPTS)):
        assert [len(line) for line in told] == [40] * len(PROMPTS)  # type: ignore[union-attr]


def test_preemption_and_prefix_hits_happen_alike_on_all_ranks(uneven: Path) -> None:
    spec = SpecConfig("ngram", 3, 1, 4, spec_version="v2")
    tight = {"kv_tokens": 64, "max_running_requests": 4, "prefill_tokens": 8}
    whole = on(settings(uneven), lambda core: generate(core, PROMPTS[:2] * 3))[0]

    def work(core: Core) -> object:
        made = generate(core, PROMPTS[:2] * 3)
        return made, core.scheduler.preemptions, core.prefix.hit_tokens

    first, second = on(settings(uneven, spec, tp=2, **tight), work)
    assert first == second
    assert first[0] == whole  # type: ignore[index]
    assert first[1] > 0  # type: ignore[index]


def test_settings_change_on_all_ranks(uneven: Path, uneven_head: Path) -> None:
    whole = on(settings(uneven), outputs)[0]

    def work(core: Core) -> object:
        before = outputs(core)
        for change in ({"speculation": "eagle3", "num_steps": 2}, {"spec_version": "v2"}, {"topk": 2}):
            reconfigure(core, change)
            assert outputs(core) == before
        with pytest.raises(InvalidConfig, match="draft_model"):
            reconfigure(core, {"speculation": "draft_model"})
        return before

    for told in on(settings(uneven, SpecConfig("ngram", 3, 1, 4, draft_head=str(uneven_head)), tp=2), work):
        assert told == whole


def test_more_ranks_than_kv_heads_are_refused_with_what_would_do(tiny_model: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"3 ranks, but the model has 2 KV heads.*valid: 1 to 2"):
        on(settings(tiny_model, tp=3), outputs)


def test_ranks_that_loaded_different_models_refuse_to_start(uneven: Path, tmp_path: Path) -> None:
    other = tiny_llama(
        tmp_path, seed=5, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=160
    )

    def work(crew: ThreadCrew) -> Core:
        return build(settings(other if crew.group.rank else uneven, tp=2), crew)

    with pytest.raises(RanksDisagree, match="rank 1 disagrees with rank 0 about the model"):
        on_ranks(2, work)


def test_ranks_that_loaded_different_heads_refuse_to_start_and_to_switch(
    uneven: Path, uneven_head: Path, tmp_path: Path
) -> None:
    other = tiny_head(build(settings(uneven)), tmp_path / "head.safetensors", seed=5)

    def config(rank: int, *shape: object) -> EngineConfig:
        return settings(uneven, SpecConfig(*shape, draft_head=str(other if rank else uneven_head)), tp=2)

    with pytest.raises(RanksDisagree, match="rank 1 disagrees with rank 0 about the draft head or model"):
        on_ranks(2, lambda crew: build(config(crew.group.rank, "eagle3", 3, 1, 4), crew))

    def switch(crew: ThreadCrew) -> None:
        reconfigure(build(config(crew.group.rank, "ngram", 3, 1, 4), crew), {"speculation": "eagle3"})

    with pytest.raises(RanksDisagree, match="rank 1 has read another draft head or model"):
        on_ranks(2, switch)


def test_every_rank_is_told_of_and_the_exchange_too(uneven: Path) -> None:
    def work(core: Core) -> object:
        generate(core, PROMPTS)
        return core.info(), core.counters()

    for info, counters in on(settings(uneven, tp=2), work):  # type: ignore[misc]
        assert info["effective"]["tp"] == 2
        assert info["effective"]["allreduce"] == "shm"
        assert info["parallel"]["reason"] == "for a test"
        assert [rank["kv_heads"] for rank in info["parallel"]["ranks"]] == [2, 1]
        assert sum(rank["vocab_rows"] for rank in info["parallel"]["ranks"]) == VOCAB
        sums = counters['engine_collective_calls_total{backend="shm",op="all_reduce"}']
        assert sums == 2 * 3 * counters["engine_rounds_total"]  # two a layer
        assert counters['engine_collective_seconds_total{backend="shm",op="all_reduce"}'] > 0
