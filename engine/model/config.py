"""The shape of a model, read from a GGUF header or a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import ModelBroken, UnsupportedModel
from engine.model.rope import Rope

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Sizes, with the names that config.json has for them.
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "max_context": "max_position_embeddings",
}
_LARGEST = 2**31


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements, `max_context` in tokens.

    `tied` means that the output layer is the embedding, `qk_norm` that each head's query and key are normalised before
    they are rotated. The biases are those of the attention's input and output and of the MLP.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope: Rope
    rms_eps: float
    max_context: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """Raises ModelBroken for figures that no model can have."""
        for name, known_as in _SIZES.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _LARGEST:
                raise ModelBroken(f"{known_as} is {value!r}, which is no size")
        if self.q_heads % self.kv_heads:
            raise ModelBroken(
                f"num_attention_heads ({self.q_heads}) is not a multiple of num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelBroken(f"head_dim is {self.head_dim}, which cannot be rotated in pairs")
        if not 0 < self.rms_eps < 1 or not self.rope.theta > 1 or not self.rope.factor > 0:
            raise ModelBroken("rms_norm_eps, rope_theta or the rope's factor is out of range")

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` wrote."""
        rope = {**data["rope"], "divisors": tuple(data["rope"]["divisors"])}
        return cls(**{**data, "rope": Rope(**rope)})

    @classmethod
    def from_huggingface(cls, data: Mapping[str, Any]) -> ModelConfig:
        """From a parsed config.json.

        Raises:
            UnsupportedModel: another architecture, or a feature of it that this engine does not compute.
        """
        kind = data.get("model_type", "?")
        if kind not in ARCHITECTURES:
            raise UnsupportedModel(f"model_type '{kind}' is not supported; supported: {', '.join(ARCHITECTURES)}")
        if data.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act '{data['hidden_act']}' is not supported; supported: silu")
        if data.get("use_sliding_window") or "sliding_attention" in (data.get("layer_types") or ()):
            raise UnsupportedModel("sliding window attention is not supported")
        if data.get("quantization_config"):
            method = data["quantization_config"].get("quant_method", "?")
            raise UnsupportedModel(f"weights quantised by '{method}' are not supported in safetensors; use a GGUF file")
        heads = data["num_attention_heads"]
        bias = bool(data.get("attention_bias"))
        return cls(
            architecture=kind,
            layers=data["num_hidden_layers"],
            hidden=data["hidden_size"],
            intermediate=data["intermediate_size"],
            q_heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or (128 if kind == "qwen3" else data["hidden_size"] // heads),
            vocab=data["vocab_size"],
            rope=Rope.from_huggingface(data),
            rms_eps=data.get("rms_norm_eps", 1e-6),
            max_context=data.get("max_position_embeddings", 2048 if kind == "llama" else 32768),
            tied=data.get("tie_word_embeddings", False),
            qkv_bias=bias or kind == "qwen2",
            out_bias=bias and kind != "qwen2",
            mlp_bias=bool(data.get("mlp_bias")) and kind == "llama",
            qk_norm=kind == "qwen3",
        )

    def to_huggingface(self) -> dict[str, Any]:
        """A config.json that `from_huggingface` and transformers read alike, without token ids."""
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        rope = self.rope.to_huggingface()
        out: dict[str, Any] = {
            "architectures": [names[self.architecture]],
            "model_type": self.architecture,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_context,
            "tie_word_embeddings": self.tied,
            "rope_parameters": rope,
            # As written before transformers 5, which other readers still look for.
            "rope_theta": self.rope.theta,
            "rope_scaling": None
            if self.rope.scaling == "default"
            else {k: v for k, v in rope.items() if k != "rope_theta"},
        }
        if self.architecture != "qwen2":
            out["attention_bias"] = self.qkv_bias
        if self.architecture == "llama":
            out["mlp_bias"] = self.mlp_bias
        return out

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], names: Set[str]) -> ModelConfig:
        """From GGUF metadata by key, and the names of the file's tensors.

        Raises:
            UnsupportedModel: as `from_huggingface`.
        """
        arch = fields.get("general.architecture", "?")
        if arch not in ARCHITECTURES:
            raise UnsupportedModel(
                f"GGUF architecture '{arch}' is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        scaling = fields.get(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear", "yarn"):
            raise UnsupportedModel(f"rope scaling '{scaling}' is not supported; supported: none, linear, yarn")
        heads, hidden = fields[f"{arch}.attention.head_count"], fields[f"{arch}.embedding_length"]
        context = fields[f"{arch}.context_length"]
        return cls(
            architecture=arch,
            layers=fields[f"{arch}.block_count"],
            hidden=hidden,
            intermediate=fields[f"{arch}.feed_forward_length"],
            q_heads=heads,
            kv_heads=fields.get(f"{arch}.attention.head_count_kv", heads),
            head_dim=fields.get(f"{arch}.attention.key_length", hidden // heads),
            vocab=fields.get(f"{arch}.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
            rope=Rope(
                theta=float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
                scaling="default" if scaling == "none" else scaling,
                factor=float(fields.get(f"{arch}.rope.scaling.factor", 1.0)),
                original_context=int(fields.get(f"{arch}.rope.scaling.original_context_length", context)),
            ),
            rms_eps=float(fields[f"{arch}.attention.layer_norm_rms_epsilon"]),
            max_context=context,
            tied="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            out_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_up.bias" in names,
            qk_norm=arch == "qwen3",
        )
