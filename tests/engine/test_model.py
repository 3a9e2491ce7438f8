"""The model computes what transformers computes on the same weights, from both file formats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelBroken, UnsupportedModel
from engine.memory.pool import KVPool
from engine.model.llama import Llama
from engine.model.source import ModelSource
from engine.model.weights import open_weights
from engine.ops.base import Ops, causal_view
from engine.ops.native import NativeOps
from engine.ops.reference import ReferenceOps
from tests.engine.conftest import tiny_llama


def our_logits(source: ModelSource, ops: Ops, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    model = Llama(open_weights(source, dtype), ops, dtype, 256)
    config = model.config
    pool = KVPool(config.layers, 16, 8, config.kv_heads, config.head_dim, dtype)
    pages = torch.randperm(16, dtype=torch.int32).unsqueeze(0)
    with torch.inference_mode():
        return model.forward(causal_view(tokens, pages, 8), pool)


def their_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return model(tokens.unsqueeze(0)).logits[0].float()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("tied", "sizes"),
    [
        (False, {}),
        (True, {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 54}),
        (False, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 1}),
    ],
)
def test_float32_logits_equal_transformers(tmp_path: Path, native: bool, tied: bool, sizes: dict[str, int]) -> None:
    folder = tiny_llama(tmp_path, tied=tied, **sizes)
    tokens = torch.randint(0, 97, (61,))
    ops = NativeOps(torch.float32) if native else ReferenceOps()
    ours = our_logits(ModelSource("tiny", "hf", folder), ops, torch.float32, tokens)
    torch.testing.assert_close(ours, their_logits(folder, tokens, torch.float32), atol=2e-4, rtol=2e-4)


def test_bfloat16_logits_are_as_close_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    tokens = torch.randint(0, 97, (61,))
    exact = their_logits(folder, tokens, torch.float32)
    ours = our_logits(ModelSource("tiny", "hf", folder), NativeOps(torch.bfloat16), torch.bfloat16, tokens)
    theirs = their_logits(folder, tokens, torch.bfloat16)
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, so that its rotary embedding turns neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(folder: Path, file: Path, architecture: str = "llama", quantised: bool = False) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(97)
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, values = name.removesuffix(".weight"), tensor.numpy()
        if stem in top:
            target = top[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{names[part]}"
            if part.endswith(("q_proj", "k_proj")):
                values = interleave(values, 4 if "q_proj" in part else 2)
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{target}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{target}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_sizes() -> dict[str, int]:
    return {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def test_a_gguf_file_yields_the_logits_of_the_folder_it_was_made_from(
    tmp_path: Path, gguf_sizes: dict[str, int]
) -> None:
    folder = tiny_llama(tmp_path / "hf", **gguf_sizes)
    write_gguf(folder, tmp_path / "model.gguf")
    tokens = torch.randint(0, 97, (40,))
    ours = our_logits(ModelSource("g", "gguf", tmp_path / "model.gguf"), ReferenceOps(), torch.float32, tokens)
    torch.testing.assert_close(ours, their_logits(folder, tokens, torch.float32), atol=2e-4, rtol=2e-4)


def test_the_cached_conversion_equals_a_fresh_one(
    tmp_path: Path, gguf_sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_TUNER_CACHE", str(tmp_path / "cache"))
    write_gguf(tiny_llama(tmp_path / "hf", **gguf_sizes), tmp_path / "model.gguf", quantised=True)
    source = ModelSource("g", "gguf", tmp_path / "model.gguf")
    tokens = torch.randint(0, 97, (20,))
    made, cached = (our_logits(source, NativeOps(torch.bfloat16), torch.bfloat16, tokens) for _ in range(2))
    assert torch.equal(made, cached)
    exact = our_logits(source, ReferenceOps(), torch.float32, tokens)
    torch.testing.assert_close(made, exact, atol=0.5, rtol=0.1)
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 1


def test_another_architecture_is_refused_by_name(tmp_path: Path, gguf_sizes: dict[str, int]) -> None:
    write_gguf(tiny_llama(tmp_path / "hf", **gguf_sizes), tmp_path / "model.gguf", architecture="falcon")
    with pytest.raises(UnsupportedModel, match="falcon"):
        open_weights(ModelSource("g", "gguf", tmp_path / "model.gguf"), torch.float32)


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000])
def test_a_truncated_file_is_said_to_be_broken(tmp_path: Path, gguf_sizes: dict[str, int], keep: int) -> None:
    write_gguf(tiny_llama(tmp_path / "hf", **gguf_sizes), tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:keep])
    with pytest.raises(ModelBroken, match=r"short\.gguf"):
        open_weights(ModelSource("g", "gguf", tmp_path / "short.gguf"), torch.float32)


def test_a_missing_tensor_and_a_missing_file_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    source = ModelSource("tiny", "hf", folder)
    with pytest.raises(ModelBroken, match=r"layers\.1\.mlp\.up_proj"):
        Llama(open_weights(source, torch.float32), ReferenceOps(), torch.float32, 64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        open_weights(source, torch.float32)
