"""A draft head as one safetensors file: weights, vocabulary map, and in its header where it comes from.

The output layer is by far the largest part and is kept as int8 with one scale a row, everything else as bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ModelBroken
from engine.model.eagle3 import HeadShape
from engine.model.llama import Llama

_FORMAT = "spec-tuner eagle3 head, version 1"


_SAMPLE = 4096


@dataclass(frozen=True)
class HeadFile:
    """What a file holds. `hot` int64 [Vd]: target ids of the draft ids; `about`: target, training log, licence."""

    shape: HeadShape
    weights: dict[str, Tensor]
    hot: Tensor
    about: dict[str, Any]

    def identity(self) -> str:
        """Of a sample of every tensor: two processes that read the same file have the same."""
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.weights, "hot": self.hot}.items()):
            sample = tensor.flatten()[:: max(1, tensor.numel() // _SAMPLE)].float()
            digest.update(f"{name}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:32]


def fingerprint(target: Llama) -> str:
    """Tells targets apart, and is the same for one model whatever its file format and data type."""
    digest = hashlib.sha256()
    for tensor in (target.final_norm, target.embedding[:256]):
        digest.update(tensor.cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def save_head(file: Path, shape: HeadShape, weights: Mapping[str, Tensor], hot: Tensor, about: dict[str, Any]) -> None:
    """Write, replacing atomically. `about` needs "target" (its name) and "target_fingerprint"."""
    tensors = {name: w.detach().bfloat16().contiguous() for name, w in weights.items() if name != "lm_head"}
    rows = weights["lm_head"].detach().float()
    scale = rows.abs().amax(-1).clamp_min(1e-12) / 127
    tensors["lm_head.int8"] = (rows / scale.unsqueeze(-1)).round().to(torch.int8)
    tensors["lm_head.scale"] = scale
    tensors["hot_ids"] = hot.to(torch.int32)
    made = file.with_suffix(".new")
    header = {"format": _FORMAT, "shape": json.dumps(shape.to_dict()), "about": json.dumps(about)}
    save_file(tensors, made, metadata=header)
    made.replace(file)


def load_head(file: Path, target: Llama, target_name: str) -> HeadFile:
    """A head for this target.

    Raises:
        ModelBroken: no such file, not a head, or one that was made for another target; the message says which.
    """
    head = read_head(file)
    _check(file, head, target, target_name)
    return head


def read_head(file: Path) -> HeadFile:
    """A head, whatever its target.

    Raises:
        ModelBroken: no such file, or not a head.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            if header.get("format") != _FORMAT:
                raise ModelBroken(f"draft_head: '{file}' is not a draft head ({_FORMAT!r} is not in its header)")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise ModelBroken(f"draft_head: cannot read '{file}': {error}") from error
    try:
        shape, about = HeadShape.from_dict(json.loads(header["shape"])), json.loads(header["about"])
        _sound(shape, about)
        weights = {name: tensors[name] for name in shape.parameters() if name != "lm_head"}
        weights["lm_head"] = tensors["lm_head.int8"].float() * tensors["lm_head.scale"].unsqueeze(-1)
        hot = tensors["hot_ids"].long()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelBroken(f"draft_head: '{file}' is damaged: {type(error).__name__}: {error}") from error
    for name, size in shape.parameters().items():
        if tuple(weights[name].shape) != size:
            raise ModelBroken(f"draft_head: '{file}': {name} is {list(weights[name].shape)}, not {list(size)}")
        if not weights[name].isfinite().all():
            raise ModelBroken(f"draft_head: '{file}': {name} holds what is no number")
    if hot.shape != (shape.draft_vocab,):
        raise ModelBroken(f"draft_head: '{file}' maps {list(hot.shape)} draft tokens, not {shape.draft_vocab}")
    if len(hot.unique()) != len(hot):
        raise ModelBroken(f"draft_head: '{file}' maps two draft tokens to the same token")
    return HeadFile(shape, weights, hot, about)


def _sound(shape: HeadShape, about: Any) -> None:
    """Raises ValueError for a header that no head has, whatever its target."""
    sizes = ("hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "draft_vocab")
    whole = [getattr(shape, name) for name in sizes]
    if any(type(value) is not int or value < 1 for value in whole) or any(type(n) is not int for n in shape.layers):
        raise ValueError(f"sizes are no whole numbers: {shape}")
    if shape.q_heads % shape.kv_heads or shape.head_dim % 2:
        raise ValueError(f"sizes do not fit each other: {shape}")
    if len(shape.layers) != 3 or not isinstance(shape.rope_theta, int | float) or shape.rope_theta <= 0:
        raise ValueError(f"three layers and a rope_theta above 0 are wanted: {shape}")
    if not isinstance(about, dict):
        raise ValueError("'about' is no object")
    check = about.get("check")
    if check is None:
        return
    prompt, reached = check["prompt"], check["accept_length"]
    if not prompt or any(type(token) is not int for token in prompt) or not isinstance(reached, int | float):
        raise ValueError("'check' is no prompt with the length that is accepted there")


def _check(file: Path, head: HeadFile, target: Llama, target_name: str) -> None:
    shape, about, hot = head.shape, head.about, head.hot
    if shape.hidden != target.config.hidden:
        raise ModelBroken(
            f"draft_head: '{file}' is for a hidden size of {shape.hidden}; '{target_name}' has {target.config.hidden}"
        )
    if not all(0 <= layer < target.config.layers for layer in shape.layers):
        raise ModelBroken(
            f"draft_head: '{file}' reads layers {list(shape.layers)}; '{target_name}' has 0 to "
            f"{target.config.layers - 1}"
        )
    prompt = (about.get("check") or {}).get("prompt", [])
    ids = [int(hot.min()), int(hot.max()), *prompt]
    if min(ids) < 0 or max(ids) >= target.config.vocab:
        raise ModelBroken(f"draft_head: '{file}' names token ids that the target ({target.config.vocab}) does not have")
    if about.get("target_fingerprint") != fingerprint(target):
        raise ModelBroken(
            f"draft_head: '{file}' was trained for '{about.get('target', '?')}', and '{target_name}' has other "
            "weights: nothing it drafts would be accepted. Train one with `engine train-head`"
        )
