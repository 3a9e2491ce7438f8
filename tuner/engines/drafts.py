"""What the files of a model say: whether it can be one, and whether a head or draft model fits it. Loads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def broken(model: str) -> str | None:
    """Why no engine could load a model of this machine: a folder without an architecture, a .gguf that is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        config = _config(model)
        if config is None:
            return f"{path / 'config.json'} cannot be read, or holds no JSON object"
        named = config.get("architectures") or config.get("model_type")
        return None if named else f"{path / 'config.json'} names no architecture (architectures or model_type)"
    if path.suffix != ".gguf" or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        return f"'{model}' cannot be read: {error.strerror}"
    return None if begins == b"GGUF" else f"'{model}' is no GGUF file: it begins with {begins!r}"


MODEL_FACTS = frozenset({"model.attention", "draft.attention"})
_LANGUAGE = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where a model that also sees or hears describes its language model."""

_known: dict[str, str] = {}


def attention(model: str) -> str | None:
    """Its kind: mla (latent) or mha (heads, grouped or not).

    None where no config.json is here or among what the hub's cache holds, or it tells of no attention.
    """
    if model not in _known:
        config = _config(model) or _cached(model)
        if config is None or "num_attention_heads" not in config:
            return None  # asked again: a download may be under way
        rank = config.get("kv_lora_rank")
        _known[model] = "mla" if isinstance(rank, int) and rank > 0 else "mha"
    return _known[model]


def _cached(model: str) -> dict[str, Any] | None:
    if "/" not in model or Path(model).expanduser().exists():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # no hub here, or an id that it does not take
        return None
    return _config(str(Path(found).parent)) if isinstance(found, str) else None


def misfit(target: str, draft: str, drafter: str) -> str | None:
    """Why a draft cannot work with a target; None when nothing speaks against it, or one of them is not a folder here.

    Args:
        target: the model, as in a space.
        draft: its head or draft model.
        drafter: `eagle3`, whose head reads the target's hidden states, or `draft_model`, which shares its vocabulary.
    """
    if Path(draft).expanduser().is_dir() and _config(draft) is None:
        return f"the folder '{draft}' has no config.json that can be read"
    ours, theirs = _config(target), _config(draft)
    if ours is None or theirs is None:
        return None
    vocabulary, other = ours.get("vocab_size"), theirs.get("vocab_size")
    if drafter == "draft_model" and None not in (vocabulary, other) and vocabulary != other:
        return f"'{draft}' has a vocabulary of {other} tokens, and the model one of {vocabulary}: they must be the same"
    if drafter != "eagle3":
        return None
    wanted = ours.get("hidden_size")
    has = theirs.get("target_hidden_size", theirs.get("hidden_size"))
    if None not in (wanted, has) and wanted != has:
        return f"'{draft}' is a head for hidden states of {has} numbers, and the model has {wanted}"
    proposes = theirs.get("draft_vocab_size", other)
    if isinstance(proposes, int) and isinstance(vocabulary, int) and proposes > vocabulary:
        return f"'{draft}' proposes {proposes} tokens, and the model has {vocabulary}"
    return None


def _config(folder: str) -> dict[str, Any] | None:
    try:
        data = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict):
        return None
    for name in (*_LANGUAGE, *_LANGUAGE):  # one may lie within another
        if isinstance(within := data.get(name), dict):
            data = {**within, **data}
    return data
