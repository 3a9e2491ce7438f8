"""Whether a head or a draft model fits its target, as far as their `config.json` say; without loading either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    text = data.get("text_config")  # where a model also sees or hears, its language model is described apart
    return {**text, **data} if isinstance(text, dict) else data
