"""The table of docs/engines.md: what each neutral setting is called on each engine, and how an engine lacks it."""

from __future__ import annotations

from tuner.engines.base import get_engine
from tuner.engines.neutral import NEUTRAL
from tuner.engines.served import ServedEngine

KINDS = ("bundled", "sglang", "vllm", "llama_server")


def table() -> str:
    """One row per neutral setting, in Markdown."""
    head = [f"| setting | means | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    return "\n".join([*head, *(_row(name) for name in NEUTRAL)])


def _row(name: str) -> str:
    cells = [_cell(kind, name) for kind in KINDS]
    return f"| `{name}` | {NEUTRAL[name].doc} | {' | '.join(cells)} |"


def _cell(kind: str, name: str) -> str:
    engine = get_engine(kind)
    if name not in engine.settings:
        return "–"
    if not isinstance(engine, ServedEngine):
        return f"`--{name.replace('_', '-')}`"
    said = engine.spelled[name]
    return f"`{said}`" if said.startswith("--") and " " not in said else said
