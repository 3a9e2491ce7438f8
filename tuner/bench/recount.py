"""Output tokens counted a second time, by the server's tokenizer and not by its decode loop.

The text of an answer is sent back as a prompt, and the prompt's length read from `usage`. The two counts come from
different parts of a server, so one that counts chunks, or drafts, or everything twice is found out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.bench.client import Exchange, Target, exchange_once
from tuner.bench.requests import post
from tuner.bench.trace import Trace
from tuner.foreign import count, parse

ANSWERS = 2
"""Answers of a block that are counted again, the longest of its window."""

TIMEOUT_S = 30.0
_PATH = "/v1/completions"
_SHORT, _LONGER = "a", "a b c d e f g h"


@dataclass(frozen=True)
class Recount:
    """Tokens of the same answers: as the server told them with each, and as its tokenizer makes of their texts."""

    told: int
    recounted: int

    @property
    def apart(self) -> float:
        """|recounted - told| / told, beyond two tokens an answer: an end token, a space in front."""
        return max(0.0, abs(self.recounted - self.told) - 2 * ANSWERS) / max(1, self.told)


async def recount(target: Target, model: str, traces: Sequence[Trace], api_key: str | None) -> Recount | None:
    """Of some of these answers; None where the server does not tell how long a prompt is."""
    whole = [t for t in traces if t.ok and t.tokens and t.text]
    chosen = sorted(whole, key=lambda t: -len(t.text))[:ANSWERS]
    if not chosen:
        return None
    short = await _length(target, model, _SHORT, api_key)
    longer = await _length(target, model, _LONGER, api_key)
    if short is None or longer is None or longer <= short:
        return None
    found = 0
    for trace in chosen:
        length = await _length(target, model, trace.text, api_key)
        if length is None:
            return None
        found += length - (short - 1)  # without what the server puts before every prompt
    return Recount(sum(t.tokens or 0 for t in chosen), found)


async def _length(target: Target, model: str, text: str, api_key: str | None) -> int | None:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    data = post(target, _PATH, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), api_key)
    exchange = await exchange_once(target, data, Exchange(-3, "recount", 1), TIMEOUT_S)
    if not exchange.answered:
        return None
    try:
        answer = parse(exchange.body())
        usage = answer.get("usage") if isinstance(answer, dict) else None
        return count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    except ValueError:
        return None
