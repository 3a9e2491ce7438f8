"""A draft head as a Hugging Face folder in the layout of vLLM and SGLang (`LlamaForCausalLMEagle3`).

Checked against vLLM 0.32 (model_executor/models/llama_eagle3.py): the norm of each feature chunk is its `fc_norm`, and
`eagle_aux_hidden_state_layer_ids` counts a layer's output as the next layer's input, one above ours. SGLang 0.5.23
reads `eagle_config` and counts as we do; that it knows `fc_norm` has not been seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import UsageError
from engine.model.config import ModelConfig
from engine.model.eagle3 import EPS, HeadShape
from engine.model.head_file import HeadFile


def export_head(head: HeadFile, target: ModelConfig, folder: Path) -> None:
    """Write config.json and model.safetensors; nothing is left behind where that fails.

    Raises:
        UsageError: the folder exists and is not empty, or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"'{folder}' is not empty; name a new folder")
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(head, target.vocab), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_config(head.shape, target), indent=2) + "\n")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if existed:
            folder.mkdir(parents=True, exist_ok=True)
        raise UsageError(f"cannot write '{folder}': {error}") from error


def _config(shape: HeadShape, target: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": EPS,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layers],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.layers)},
    }


def _tensors(head: HeadFile, vocab: int) -> dict[str, Tensor]:
    shape, w = head.shape, head.weights
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate, up = w["gate_up"].split(shape.intermediate)
    known = torch.zeros(vocab, dtype=torch.bool)
    known[head.hot] = True
    parts = dict(zip("qkv", w["qkv"].split((q, kv, kv)), strict=True))
    values = {
        **{f"fc_norm.{i}.weight": chunk for i, chunk in enumerate(w["chunk_norm"].chunk(3))},
        "fc.weight": w["fc"],
        "midlayer.input_layernorm.weight": w["input_norm"],
        "midlayer.hidden_norm.weight": w["hidden_norm"],
        "midlayer.post_attention_layernorm.weight": w["mlp_norm"],
        **{f"midlayer.self_attn.{name}_proj.weight": part for name, part in parts.items()},
        "midlayer.self_attn.o_proj.weight": w["out"],
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": w["down"],
        "norm.weight": w["final_norm"],
        "lm_head.weight": w["lm_head"],
    }
    tensors = {name: value.to(torch.bfloat16).contiguous().clone() for name, value in values.items()}
    tensors["d2t"] = head.hot - torch.arange(len(head.hot))
    tensors["t2d"] = known
    return tensors
