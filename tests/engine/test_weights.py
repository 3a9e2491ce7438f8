"""int8 and int4 weights in a whole model: the file's own values, and the same greedy output with speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.build import Core
from engine.config import SpecConfig
from engine.memory.pool import KVPool
from engine.model.blocks import grouped
from engine.model.llama import Llama
from engine.model.source import ModelSource
from engine.model.weights import open_weights
from engine.ops.base import Stack, causal_view
from engine.ops.native import NativeOps
from tests.engine.conftest import generate, tiny_llama
from tests.engine.test_model import write_gguf

Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize(("kind", "ours"), [(Q.Q4_0, "int4"), (Q.Q4_1, "int4"), (Q.Q8_0, "int8")])
def test_the_blocks_of_a_gguf_file_keep_their_values(kind: Q, ours: str) -> None:
    raw = gguf.quantize(np.random.default_rng(3).normal(size=(7, 96)).astype(np.float32), kind)
    weight = grouped(kind.name, torch.from_numpy(raw))
    assert weight is not None
    assert weight.kind == ours
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(gguf.dequantize(raw, kind)), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Q6_K", "BF16"])
def test_other_quantisations_are_not_taken_for_blocks(kind: str) -> None:
    assert grouped(kind, torch.zeros(2, 210, dtype=torch.uint8)) is None


def test_a_file_s_whole_numbers_are_those_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_TUNER_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    write_gguf(tiny_llama(tmp_path / "hf", **sizes), tmp_path / "model.gguf", quantised=True)
    source = ModelSource("g", "gguf", tmp_path / "model.gguf")
    for _ in range(2):  # read, then from the cache
        weights = open_weights(source, torch.float32, whole_numbers=True)
        for name, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "mlp.down_proj": (64, 96),
        }.items():
            numbers = weights.take_grouped(f"model.layers.1.{name}.weight", shape, "int8")
            assert numbers is not None
            exact = weights.take(f"model.layers.1.{name}.weight", shape, torch.float32)
            torch.testing.assert_close(numbers.dequantize(), exact, atol=1e-7, rtol=1e-6)
        assert weights.take_grouped("model.layers.1.mlp.down_proj.weight", (64, 96), "int4") is None
    assert len(list((tmp_path / "cache" / "converted").glob("*.blocks.safetensors"))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_greedy_output_is_the_same_with_speculation_and_in_any_batch(
    make_core: Callable[..., Core], weights: str, dtype: str
) -> None:
    prompts = [[1 + (i * 7 + j) % 13 for j in range(5 + i)] for i in range(5)]
    plain = make_core(weights=weights, dtype=dtype)
    together = generate(plain, prompts)
    assert [generate(plain, [prompt])[0] for prompt in prompts] == together
    spec = SpecConfig(speculation="ngram", num_steps=4, num_draft_tokens=5, ngram_min=1)
    speculating = make_core(spec, weights=weights, dtype=dtype)
    assert generate(speculating, prompts) == together
    assert speculating.round.stats.accepted > 0
    info = speculating.info()
    assert info["effective"]["weights"] == weights
    assert weights in info["paths"]["kernel.linear"]["detail"]


def test_logits_stay_near_those_of_the_unrounded_weights(make_core: Callable[..., Core]) -> None:
    tokens, found = torch.arange(60) % 97, {}
    for weights in ("auto", "int8", "int4"):
        core = make_core(weights=weights)
        c = core.model.config
        pool = KVPool(c.layers, 16, 8, c.kv_heads, c.head_dim, torch.float32)
        with torch.inference_mode():
            found[weights] = core.model.forward(causal_view(tokens, torch.arange(16, dtype=torch.int32)[None], 8), pool)
    spread = found["auto"].std()
    assert (found["int8"] - found["auto"]).std() < 0.1 * spread
    assert (found["int4"] - found["auto"]).std() < 0.6 * spread


class OneByOne(NativeOps):
    """Without the call that runs all layers."""

    def fuse(self, stack: Stack) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_all_layers_in_one_call_are_the_layers_one_by_one(tiny_model: Path, weights: str, dtype: torch.dtype) -> None:
    found = []
    for ops in (NativeOps(dtype), OneByOne(dtype)):
        model = Llama(open_weights(ModelSource("tiny", "hf", tiny_model), dtype), ops, dtype, 128, weights)
        c = model.config
        pool = KVPool(c.layers, 16, 8, c.kv_heads, c.head_dim, dtype)
        for part in pool.tensors:
            part.zero_()
        pages = torch.arange(16, dtype=torch.int32).flip(0)[None]
        with torch.inference_mode():
            hidden, features = model.hidden(causal_view(torch.arange(50) % 97, pages, 8), pool, (2, 0))
        found.append((hidden, features, *pool.tensors))
    assert (
        NativeOps(dtype).fuse(Stack(model._layers, model.final_norm, model._rope, 1e-5, 6, 2, 8, model.group))
        is not None
    )
    for fused, single in zip(*found, strict=True):
        assert torch.equal(fused, single)
