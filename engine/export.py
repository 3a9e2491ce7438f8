"""A GGUF model as a Hugging Face folder, so that other engines can serve the very same weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.errors import UnsupportedModel, UsageError
from engine.model.config import ModelConfig
from engine.model.rope import Rope
from engine.model.source import ModelSource
from engine.model.weights import open_weights
from engine.text.tokenizer import load_tokenizer

LLAMA3_CONTEXT = 8192
"""Tokens that every Llama 3 was first trained with."""


def export_folder(source: ModelSource, target: Path) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights to `target`, all or nothing.

    Raises:
        UsageError: `target` holds something already, or the model is such a folder itself.
        UnsupportedModel, ModelBroken, TokenizerError: as when it is served.
    """
    if source.kind != "gguf":
        raise UsageError(f"model: {source.path} is a Hugging Face folder already")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty folder; nothing was written")
    tokenizer = load_tokenizer(source)
    weights = open_weights(source, torch.bfloat16)
    config = replace(weights.config, rope=_named(weights.config))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".export-"))
    try:
        tokenizer.save(scratch)
        ends = list(tokenizer.stop_token_ids)
        begin = tokenizer.begin_token_id
        tokens = {"eos_token_id": ends, **({} if begin is None else {"bos_token_id": begin})}
        (scratch / "config.json").write_text(
            json.dumps({**config.to_huggingface(), "dtype": "bfloat16", **tokens}, indent=2) + "\n"
        )
        (scratch / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        tensors = {name: weights.get(name).contiguous() for name in weights.names()}
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        weights.close()
        mask = _umask()
        scratch.chmod(0o777 & ~mask)
        (scratch / "model.safetensors").chmod(0o666 & ~mask)
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _named(config: ModelConfig) -> Rope:
    """The rope in a form that a config.json has: GGUF lists what llama3's scaling comes to, pair by pair."""
    rope = config.rope
    if not rope.divisors:
        return rope
    named = replace(rope, divisors=(), scaling="llama3", factor=max(rope.divisors), original_context=LLAMA3_CONTEXT)
    if not torch.allclose(rope.angles(config.head_dim), named.angles(config.head_dim), rtol=1e-4):
        raise UnsupportedModel("the file's rope frequency factors are not those of llama3's scaling")
    return named


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
