"""The shape of a model, read from a GGUF header or a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements, `max_context` in tokens; `tied` means that the output layer is the embedding."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    rms_eps: float
    max_context: int
    tied: bool

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_huggingface(cls, data: Mapping[str, Any]) -> ModelConfig:
        """From a parsed config.json.

        Raises:
            UnsupportedModel: another architecture, or a feature of it that this engine does not compute.
        """
        kind = data.get("model_type", "?")
        if kind != "llama":
            raise UnsupportedModel(f"model_type '{kind}' is not supported; supported: llama")
        # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling stood at the top.
        rope = data.get("rope_parameters") or {
            "rope_theta": data.get("rope_theta", 10000.0),
            **(data.get("rope_scaling") or {}),
        }
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            raise UnsupportedModel(f"rope scaling '{scaling}' is not supported; supported: default (none)")
        for flag in ("attention_bias", "mlp_bias"):
            if data.get(flag):
                raise UnsupportedModel(f"{flag} is not supported")
        if data.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act '{data['hidden_act']}' is not supported; supported: silu")
        heads = data["num_attention_heads"]
        return cls(
            architecture=kind,
            layers=data["num_hidden_layers"],
            hidden=data["hidden_size"],
            intermediate=data["intermediate_size"],
            q_heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // heads,
            vocab=data["vocab_size"],
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rms_eps=data.get("rms_norm_eps", 1e-6),
            max_context=data.get("max_position_embeddings", 2048),
            tied=data.get("tie_word_embeddings", False),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tied: bool) -> ModelConfig:
        """From GGUF metadata by key.

        Raises:
            UnsupportedModel: as `from_huggingface`.
        """
        arch = fields.get("general.architecture", "?")
        if arch != "llama":
            raise UnsupportedModel(f"GGUF architecture '{arch}' is not supported; supported: llama")
        scaling = fields.get(f"{arch}.rope.scaling.type", "none")
        if scaling != "none":
            raise UnsupportedModel(f"rope scaling '{scaling}' is not supported; supported: none")
        heads, hidden = fields[f"{arch}.attention.head_count"], fields[f"{arch}.embedding_length"]
        return cls(
            architecture=arch,
            layers=fields[f"{arch}.block_count"],
            hidden=hidden,
            intermediate=fields[f"{arch}.feed_forward_length"],
            q_heads=heads,
            kv_heads=fields.get(f"{arch}.attention.head_count_kv", heads),
            head_dim=fields.get(f"{arch}.attention.key_length", hidden // heads),
            vocab=fields.get(f"{arch}.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
            rope_theta=float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
            rms_eps=float(fields[f"{arch}.attention.layer_norm_rms_epsilon"]),
            max_context=fields[f"{arch}.context_length"],
            tied=tied,
        )
