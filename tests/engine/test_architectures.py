"""Llama, Qwen2 and Qwen3, with every option that is supported, compute what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelBroken, UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.source import ModelSource
from engine.model.weights import open_weights
from engine.ops.base import Ops
from engine.ops.native import NativeOps
from engine.ops.reference import ReferenceOps
from tests.engine.test_model import interleave, our_logits

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "Qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 with biases and wide heads": ("Qwen3", {"attention_bias": True, "head_dim": 32}),
}


def random_model(folder: Path, family: str, **options: Any) -> Path:
    """A folder as transformers writes it. All weights are random, biases and norms included."""
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options}, initializer_range=0.3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def their_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(tokens.unsqueeze(0)).logits[0]


TOKENS = torch.randint(0, 97, (120,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("native", [False, True])
def test_float32_logits_equal_transformers(tmp_path: Path, case: str, native: bool) -> None:
    family, options = CASES[case]
    folder = random_model(tmp_path, family, **options)
    ops: Ops = NativeOps(torch.float32) if native else ReferenceOps()
    ours = our_logits(ModelSource("m", "hf", folder), ops, torch.float32, TOKENS)
    torch.testing.assert_close(ours, their_logits(folder, TOKENS), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("case", ["qwen2", "qwen3 with biases and wide heads", "llama with biases"])
def test_bfloat16_is_close_to_float32(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    source = ModelSource("m", "hf", random_model(tmp_path, family, **options))
    exact = our_logits(source, ReferenceOps(), torch.float32, TOKENS)
    ours = our_logits(source, NativeOps(torch.bfloat16), torch.bfloat16, TOKENS)
    assert (ours - exact).square().mean() < 0.02 * exact.square().mean()


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_survives_being_written_for_other_engines(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    folder = random_model(tmp_path, family, **options)
    config = ModelConfig.from_huggingface(json.loads((folder / "config.json").read_text()))
    assert ModelConfig.from_huggingface(config.to_huggingface()) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}, "mscale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = random_model(tmp_path, "Qwen2")
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=named):
        open_weights(ModelSource("m", "hf", folder), torch.float32)


def test_sharded_weights_are_read_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_model(tmp_path / "whole", "Qwen3")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 1
    whole, sharded = (
        our_logits(ModelSource("m", "hf", where), ReferenceOps(), torch.float32, TOKENS)
        for where in (folder, tmp_path / "sharded")
    )
    assert torch.equal(whole, sharded)
    shards[1].unlink()
    with pytest.raises(ModelBroken, match=shards[1].name):
        open_weights(ModelSource("m", "hf", tmp_path / "sharded"), torch.float32)
    save_file({"other": torch.zeros(1)}, shards[1])
    with pytest.raises(ModelBroken, match=r"tensor 'model\..*' is missing"):
        our_logits(ModelSource("m", "hf", tmp_path / "sharded"), ReferenceOps(), torch.float32, TOKENS)
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelBroken, match="index"):
        open_weights(ModelSource("m", "hf", tmp_path / "sharded"), torch.float32)


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def packed(values: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """`values` in a GGUF type. The package cannot make K-quants, so those are random blocks with small scales."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
        scale = np.array([0.002, 0.003], dtype=np.float16).view(np.uint8)
        if kind == gguf.GGMLQuantizationType.Q6_K:
            blocks[:, -2:] = scale[:2]
        else:
            blocks[:, :4] = scale
        return blocks.reshape(values.shape[0], -1)


def write_gguf(
    folder: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """The model in `folder` as GGUF, matrices as `kind`; the values that the file then holds, by Hugging Face name."""
    config = json.loads((folder / "config.json").read_text())
    arch, rope = config["model_type"], config["rope_parameters"]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    more(writer)
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 256))
    if rope["rope_type"] == "llama3":
        found = ModelConfig.from_huggingface(config)
        plain = rope["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
        scaled = found.rope.angles(16).numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    rng = np.random.default_rng(0)
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        (stem, _, suffix), values = name.rpartition("."), tensor.numpy()
        heads = 0
        if stem in TOP:
            target = TOP[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{PARTS[part]}"
            if arch == "llama" and part.endswith(("q_proj", "k_proj")):
                heads = config["num_attention_heads"] if "q_proj" in part else config["num_key_value_heads"]
        if kind is not None and values.ndim == 2:
            data = packed(values, kind, rng)
            writer.add_tensor(f"{target}.{suffix}", data, raw_dtype=kind)
            values = gguf.dequantize(data, kind)
            rows = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2) if heads else values
            held[name] = torch.from_numpy(rows.reshape(values.shape).copy())
            continue
        held[name] = tensor
        if heads:
            values = interleave(values.reshape(len(values), -1), heads).reshape(values.shape)
        writer.add_tensor(f"{target}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


GGUF_CASES = [
    case for case in CASES if case not in ("qwen2 yarn", "llama with biases", "qwen3 with biases and wide heads")
]


@pytest.mark.parametrize("case", [*GGUF_CASES, "llama with biases"])
def test_a_gguf_file_computes_what_the_folder_does(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    folder = random_model(tmp_path / "hf", family, **options)
    write_gguf(folder, tmp_path / "m.gguf")
    ours = our_logits(ModelSource("m", "gguf", tmp_path / "m.gguf"), ReferenceOps(), torch.float32, TOKENS)
    torch.testing.assert_close(ours, their_logits(folder, TOKENS), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_every_quantisation_is_what_the_gguf_package_says(tmp_path: Path, name: str, family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    folder = random_model(tmp_path / "hf", family, **sizes)
    held = write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType[name])
    weights = open_weights(ModelSource("m", "gguf", tmp_path / "m.gguf"), torch.float32)
    for key, values in held.items():
        assert torch.equal(weights.take(key, tuple(values.shape), torch.float32), values), key


def test_a_quantisation_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "hf", "Llama", hidden_size=256, intermediate_size=256, head_dim=64)
    write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType.TQ1_0)
    with pytest.raises(UnsupportedModel, match="TQ1_0"):
        open_weights(ModelSource("m", "gguf", tmp_path / "m.gguf"), torch.float32)
