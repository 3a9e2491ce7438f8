"""Prompt lookup: what followed the last time the text ended as it does now.

The longest suffix of `ngram_max` … `ngram_min` tokens that occurred before is looked up, its latest occurrence wins,
and the tokens that followed it are the drafts (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import DRAFTERS
from engine.spec.base import (
    Asked,
    Check,
    DraftTree,
    NothingResident,
    Resident,
    Seen,
    Surroundings,
    register,
    roots_and_chains,
)


class History:
    """Tokens of one request, and for every n-gram that has a continuation where its latest one begins."""

    def __init__(self, sizes: range, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        self._sizes = sizes
        self._indexed = 0  # tokens before this one continue n-grams in the index

    def extend(self, tokens: Sequence[int]) -> None:
        """Append. The index waits for the next draft: where nobody drafts, nobody pays for it."""
        self._text.extend(tokens)

    def _index(self) -> None:
        text, after = self._text, self._after
        for end in range(self._indexed, len(text)):
            for n in self._sizes:
                if n <= end:
                    after[tuple(text[end - n : end])] = end
        self._indexed = len(text)

    def draft(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the latest match of the longest suffix."""
        self._index()
        text = self._text
        for n in self._sizes:
            begin = self._after.get(tuple(text[-n:])) if n <= len(text) else None
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
    limits = DRAFTERS["ngram"]
    observes = True
    features: tuple[int, ...] = ()
    lookahead = 0
    alarm_floor = 0.0
    check: Check | None = None
    identity = ""

    def __init__(self, surroundings: Surroundings) -> None:
        config = surroundings.config
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)
        self._histories: dict[int, History] = {}
        self.resident: Resident | None = _LookedUp(self._histories)

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""
        del row
        self._histories[rid] = History(self._sizes, tokens)

    def propose(self, asked: Asked) -> DraftTree:
        """See `Drafter.propose`."""
        steps = asked.steps.tolist()
        drafts = [self._histories[rid].draft(n) if n else [] for rid, n in zip(asked.rids, steps, strict=True)]
        return roots_and_chains(asked.roots, drafts)

    def observe(self, seen: Seen) -> None:
        """See `Drafter.observe`."""
        for rid, emitted in zip(seen.rids, seen.emitted, strict=True):
            if emitted:
                self._histories[rid].extend(emitted)

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""
        self._histories.pop(rid, None)


class _LookedUp(NothingResident):
    """Chains that are looked up on the host and only verified on the device."""

    looks_up = True

    def __init__(self, histories: dict[int, History]) -> None:
        self._histories = histories

    def look_up(self, rids: Sequence[int], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Resident.look_up`."""
        return [self._histories[rid].draft(n) if n else [] for rid, n in zip(rids, steps, strict=True)]

    def hear(self, rids: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """See `Resident.hear`."""
        for rid, tokens in zip(rids, emitted, strict=True):
            if rid in self._histories:
                self._histories[rid].extend(tokens)
