"""Prompt lookup: what followed the last time the text ended as it does now.

The longest suffix of `ngram_max` … `ngram_min` tokens that occurred before is looked up, its latest occurrence wins,
and the tokens that followed it are the drafts (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpecConfig
from engine.spec.base import DraftLimits, DraftTree, register, roots_and_chains


class _History:
    """Tokens of one request, and for every n-gram that has a continuation where its latest one begins."""

    def __init__(self, sizes: range, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}
        self._sizes = sizes
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append. An n-gram enters the index only when the token after it is known."""
        text, after = self.tokens, self.after
        for token in tokens:
            end = len(text)
            for n in self._sizes:
                if n <= end:
                    after[tuple(text[end - n : end])] = end
            text.append(token)

    def draft(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the latest match of the longest suffix."""
        text = self.tokens
        for n in self._sizes:
            begin = self.after.get(tuple(text[-n:])) if n <= len(text) else None
            if begin is not None:
                draft = text[begin : begin + count]
                # A match that overlaps the end is a loop: it goes on as it went.
                while len(draft) < count:
                    draft.extend(draft[: count - len(draft)])
                return draft
        return []


@register("ngram")
class NgramDrafter:
    """Chains from each request's own text. Costs microseconds of one core and no model."""

    name = "ngram"
    limits = DraftLimits(max_depth=8, max_topk=1)

    def __init__(self, config: SpecConfig) -> None:
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)
        self._histories: dict[int, _History] = {}

    def add(self, rid: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""
        self._histories[rid] = _History(self._sizes, tokens)

    def extend(self, rid: int, tokens: Sequence[int]) -> None:
        """See `Drafter.extend`."""
        self._histories[rid].extend(tokens)

    def propose(self, rids: Sequence[int], roots: Sequence[int], num_steps: Sequence[int]) -> DraftTree:
        """See `Drafter.propose`."""
        drafts = [
            self._histories[rid].draft(steps) if steps else [] for rid, steps in zip(rids, num_steps, strict=True)
        ]
        return roots_and_chains(roots, drafts)

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""
        self._histories.pop(rid, None)
