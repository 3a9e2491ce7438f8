"""Log-probabilities the way OpenAI's two endpoints spell them, choice by choice.

There is one entry for each token that `usage` counts, end tokens and tokens of a stop string included. Tokens that are
no whole characters are written as `bytes:\\xe2…` in completions, whose format has no other place for them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from engine.ipc.messages import TokenLogprob
from engine.text.tokenizer import Tokenizer

Entry = tuple[int, TokenLogprob | None]
"""A token and what is known of it: nothing, for the first of a prompt."""


class CompletionLogprobs:
    """The `logprobs` objects of one choice of `/v1/completions`; `text_offset` goes on from one to the next."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One object for these tokens."""
        offsets, tops = [], []
        for token, known in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.literal_bytes(token)))
            tops.append(None if known is None else self._best(token, known))
        return {
            "tokens": [_label(self._tokenizer, token) for token, _ in entries],
            "token_logprobs": [None if known is None else known.value for _, known in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _best(self, token: int, known: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one always."""
        best = {_label(self._tokenizer, other): value for other, value in known.top[: self._top]}
        return {**best, _label(self._tokenizer, token): known.value}


class ChatLogprobs:
    """The `logprobs` objects of one choice of `/v1/chat/completions`."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top

    def render(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One object for these tokens."""
        content = []
        for token, known in entries:
            assert known is not None, "a chat's prompt is not echoed"
            best = [self._one(other, value) for other, value in known.top[: self._top]]
            content.append({**self._one(token, known.value), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        spelled = self._tokenizer.literal_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": value, "bytes": list(spelled)}


def _label(tokenizer: Tokenizer, token: int) -> str:
    spelled = tokenizer.literal_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
