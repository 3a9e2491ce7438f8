"""Where the engine keeps what can be made again: downloaded models, compiled kernels, converted weights."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$SPEC_TUNER_CACHE`, else `$XDG_CACHE_HOME/spec-tuner`, else `~/.cache/spec-tuner`. Not created here."""
    chosen = os.environ.get("SPEC_TUNER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spec-tuner"
