"""Tensors of a model by Hugging Face name, from safetensors or GGUF.

A GGUF file takes seconds to parse and dequantise, so its bfloat16 form is kept in the user's cache, keyed by the
file's path, size and time. float32 is always dequantised anew: rounding to bfloat16 first would change it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.cache import cache_dir
from engine.errors import ModelBroken, UnsupportedModel
from engine.model.blocks import Blocks, cached_blocks, grouped
from engine.model.config import ModelConfig
from engine.model.source import ModelSource
from engine.ops.grouped import GroupedWeight

# What parsing bytes that are not what they should be can end in.
_PARSING = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_SAMPLE = 256
"""Values of each tensor that tell models apart."""
_CONVERSION = 2  # raise when the meaning of cached conversions changes
_GGUF_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Weights:
    """A model's shape and its tensors, taken one at a time so that peak memory stays near one copy."""

    def __init__(self, config: ModelConfig, files: list[Path] | None = None, tensors: dict[str, Tensor] | None = None):
        self.config = config
        self.blocks: Blocks | None = None
        self._tensors = dict(tensors or {})
        self._stack = ExitStack()
        self._by_name: dict[str, Any] = {}
        self._seen = hashlib.sha256(repr(config.to_dict()).encode())
        for file in files or []:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelBroken(f"{file}: not a readable safetensors file: {error}") from error
            self._by_name.update(dict.fromkeys(handle.keys(), handle))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Tensor `name` as `dtype`.

        Raises:
            ModelBroken: it is missing, or has another shape.
        """
        if name in self._tensors:
            tensor = self._tensors.pop(name)
        elif name in self._by_name:
            tensor = self._by_name[name].get_tensor(name)
        else:
            raise ModelBroken(f"tensor '{name}' is missing from the model")
        if tuple(tensor.shape) != shape:
            raise ModelBroken(f"tensor '{name}' has shape {tuple(tensor.shape)}, expected {shape}")
        self._note(name, tensor)
        return tensor.to(dtype)

    def take_grouped(self, name: str, shape: tuple[int, ...], kind: str) -> GroupedWeight | None:
        """Tensor `name` as the whole numbers the file holds; None where it does not hold it in this kind."""
        weight = self.blocks.get(name) if self.blocks is not None else None
        if weight is None or weight.kind != kind or weight.shape != shape:
            return None
        self._note(name, weight.numbers)
        return weight

    def identity(self) -> str:
        """Of the model's shape and of what was taken so far: two processes that took the same have the same."""
        return self._seen.hexdigest()[:32]

    def _note(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].float()
        self._seen.update(f"{name}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())

    def names(self) -> list[str]:
        """Of all tensors not taken yet."""
        return sorted({*self._tensors, *self._by_name})

    def get(self, name: str) -> Tensor:
        """Tensor `name` as it is kept."""
        return self._tensors[name] if name in self._tensors else self._by_name[name].get_tensor(name)

    def close(self) -> None:
        """Release the files."""
        self._stack.close()


def open_weights(source: ModelSource, dtype: torch.dtype, whole_numbers: bool = False) -> Weights:
    """Weights of a resolved model; `whole_numbers`: also for `Weights.take_grouped`, where the file has such.

    Raises:
        UnsupportedModel: an architecture or quantisation this engine does not compute.
        ModelBroken: a file is missing, truncated or not what its name says.
    """
    if source.kind == "hf":
        return _open_folder(Path(source.path))
    path = Path(source.path)
    try:
        if dtype != torch.bfloat16:
            config, tensors = _read_gguf(path, dtype)
            weights = Weights(config, tensors=tensors)
        else:
            weights = _open_converted(path)
        if whole_numbers:
            weights.blocks = cached_blocks(path, lambda: _read_blocks(path, weights.config))
    except ModelBroken as error:
        raise ModelBroken(f"{path}: {error}") from error
    except _PARSING as error:
        raise ModelBroken(f"{path}: not a readable GGUF file: {error!r}") from error
    return weights


def _open_folder(folder: Path) -> Weights:
    try:
        data = json.loads((folder / "config.json").read_text())
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        config = ModelConfig.from_huggingface(data)
    except (OSError, ValueError, TypeError, AttributeError, ModelBroken) as error:
        raise ModelBroken(f"{folder / 'config.json'}: {error}") from error
    except KeyError as error:
        raise ModelBroken(f"{folder / 'config.json'}: {error} is missing") from error
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise ValueError(f"'{outside[0]}' is no name of a file beside it")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelBroken(f"{index}: not a readable index of shards: {error!r}") from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelBroken(f"{folder}: missing {', '.join(missing)}")
    return Weights(config, files=[folder / name for name in names])


def _open_converted(path: Path) -> Weights:
    stat = path.stat()
    identity = f"{_CONVERSION}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    file = cache_dir() / "converted" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.safetensors"
    if not file.exists():
        config, tensors = _read_gguf(path, torch.bfloat16)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / "model.safetensors"
            save_file(tensors, made, metadata={"config": json.dumps(config.to_dict())})
            made.replace(file)  # atomic: several engines may convert at once
    with safe_open(file, framework="pt") as handle:
        config = ModelConfig.from_dict(json.loads(handle.metadata()["config"]))
    return Weights(config, files=[file])


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor]]:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    # Strings of the vocabulary are not needed here and take seconds to decode.
    fields = {
        name: field.data if name == "tokenizer.ggml.tokens" else field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.") or name == "tokenizer.ggml.tokens"
    }
    try:
        config = ModelConfig.from_gguf(fields, {tensor.name for tensor in reader.tensors})
    except KeyError as error:
        raise ModelBroken(f"metadata key {error} is missing") from error
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in _GGUF_TYPES:
            raise UnsupportedModel(
                f"{path}: quantisation {tensor.tensor_type.name} is not supported; supported: {', '.join(_GGUF_TYPES)}"
            )
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.view(*reversed([int(n) for n in tensor.shape]))
        if tensor.name == "rope_freqs.weight":
            config = replace(config, rope=replace(config.rope, divisors=tuple(values.tolist())))
            continue
        for name in _huggingface_name(tensor.name):
            if config.architecture == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                values = _halves(values, config.q_heads if "q_proj" in name else config.kv_heads)
            tensors[name] = values.to(dtype)
    return config, tensors


def _read_blocks(path: Path, config: ModelConfig) -> dict[str, GroupedWeight]:
    from gguf import GGUFReader

    found = {}
    for tensor in GGUFReader(path).tensors:
        weight = (
            grouped(tensor.tensor_type.name, torch.from_numpy(tensor.data.copy())) if tensor.data.ndim == 2 else None
        )
        for name in _huggingface_name(tensor.name):
            interleaved = config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
            if weight is not None and interleaved:
                order = torch.arange(weight.shape[0]).unsqueeze(1)
                weight = weight.rows(_halves(order, config.q_heads if "q_proj" in name else config.kv_heads).flatten())
            if weight is not None:
                found[name] = weight
    return found


def _huggingface_name(name: str) -> Iterator[str]:
    if name in _GGUF_TOP:
        yield _GGUF_TOP[name]
    elif name.startswith("blk."):
        _, layer, part, suffix = name.split(".", 3)
        if part in _GGUF_LAYER:
            yield f"model.layers.{layer}.{_GGUF_LAYER[part]}.{suffix}"


def _halves(weight: Tensor, heads: int) -> Tensor:
    """From the interleaved rotary layout [h, D/2, 2] of Llama's GGUF to halves [h, 2, D/2] along the rows."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
