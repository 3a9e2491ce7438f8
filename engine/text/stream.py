"""Token ids in, text out: as soon as it is certain, and never beyond a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


class TextStream:
    """The text of one growing output. Its first space is its own: the output goes on from a prompt.

    Held back: bytes that do not yet make a character, and text that may turn out to begin a stop string. The text
    ends before the first stop string to be completed (of several completed by the same character, the longest), so
    the result does not depend on how the tokens were grouped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Empty strings in `stop` are not allowed. One that is completed by the first `min_tokens` tokens is none."""
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""
        self.stopped = False
        self.tokens = 0
        """Tokens taken so far, the one that completed a stop string included and none after it."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens; "" once `stopped`."""
        if not self._stop:
            self.tokens += len(token_ids)
            return self._text(b"".join(map(self._token_bytes, token_ids)))
        out = ""
        for token_id in token_ids:  # one by one: the count has to end where the text does
            if self.stopped:
                break
            self.tokens += 1
            out += self._until_stop(self._text(self._token_bytes(token_id)))
        return out

    def finish(self) -> str:
        """The text still held back, when no more tokens come. An unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        out = self._until_stop(self._text(b"", final=True)) if self._stop else self._text(b"", final=True)
        rest, self._held = self._held, ""
        return out + rest

    def _text(self, data: bytes, final: bool = False) -> str:
        return self._decoder.decode(data, final)

    def _until_stop(self, text: str) -> str:
        """Adds `text` to what is held, and lets go of what no stop string can begin in any more."""
        if not text:
            return ""
        before, held = len(self._held), self._held + text
        # What is held may be a stop string that came too early, and begin a longer one.
        found = [(held.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop]
        ends = [(at + len(stop), at) for at, stop in found if at >= 0]
        if ends and self.tokens > self._min_tokens:
            self.stopped = True
            self._held = ""
            return held[: min(ends)[1]]
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
