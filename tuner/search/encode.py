"""Candidates as numbers: for every setting a code, and how alike two of its values are."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.search.shape import UNDERSTOOD

INACTIVE = object()
"""The value of a setting that a candidate does not have."""

REACH = 0.35
"""Of the range of a number's values, over which what is learned of one carries to others."""


MOST_NUMBERS = 48
"""Values of a number that are told apart; of more, as many spread evenly over them."""


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows of whole numbers: where those that differ are first, in some order; and which of them each row is."""
    first, which = np.zeros(min(1, len(rows)), np.int64), np.zeros(len(rows), np.int64)
    for column in rows.T if len(rows) else ():
        width = int(column.max() - column.min()) + 1
        first, which = np.unique(which * width + column - column.min(), return_index=True, return_inverse=True)[1:]
    return first, which


@dataclass(frozen=True)
class _Coding:
    """The codes of one setting: its numbers by the nearest of `grid`, then its words, then inactive, then strange."""

    grid: tuple[float, ...]
    words: Mapping[Any, int]

    @classmethod
    def of(cls, values: Collection[Any]) -> _Coding:
        numbers = sorted({float(value) for value in values if _is_number(value)})
        if len(numbers) > MOST_NUMBERS:
            step = (len(numbers) - 1) / (MOST_NUMBERS - 1)
            numbers = [numbers[round(i * step)] for i in range(MOST_NUMBERS)]
        words = sorted({value for value in values if not _is_number(value) and value is not INACTIVE}, key=str)
        return cls(tuple(numbers), {word: len(numbers) + i for i, word in enumerate([*words, INACTIVE])})

    def code(self, value: Any) -> int:
        if _is_number(value) and self.grid:
            place = bisect.bisect_left(self.grid, value)
            near = [i for i in (place - 1, place) if 0 <= i < len(self.grid)]
            return min(near, key=lambda i: abs(self.grid[i] - value))
        return self.words.get(value, len(self.grid) + len(self.words))

    def alike(self) -> np.ndarray:
        table = np.eye(len(self.grid) + len(self.words) + 1)
        place = np.linspace(0, 1, len(self.grid))
        table[: len(self.grid), : len(self.grid)] = np.exp(-0.5 * ((place[:, None] - place[None, :]) / REACH) ** 2)
        return table


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Encoder:
    """Codes of settings. A word that it has not been made with is like no other.

    `alike[j]` is a table of likenesses (0 to 1) between the codes of setting j; numbers are alike by rank, words are
    like themselves alone.
    """

    names: tuple[str, ...]
    codings: tuple[_Coding, ...]
    alike: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, candidates: Sequence[Mapping[str, Any]]) -> Encoder:
        """The encoder of all these settings; what never varies is left out."""
        found: dict[str, _Coding] = {}
        for name in sorted({name for settings in candidates for name in settings}):
            values = {(type(v) is bool, v) for v in (settings.get(name, INACTIVE) for settings in candidates)}
            if len(values) > 1:
                found[name] = _Coding.of([value for _, value in values])
        return cls(tuple(found), tuple(found.values()), tuple(coding.alike() for coding in found.values()))

    @property
    def other(self) -> tuple[int, ...]:
        """Which of the settings physics knows nothing of."""
        return tuple(j for j, name in enumerate(self.names) if name not in UNDERSTOOD)

    def encode(self, candidates: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Codes, candidates × settings."""
        found = np.empty((len(candidates), len(self.names)), int)
        for j, (name, coding) in enumerate(zip(self.names, self.codings, strict=True)):
            known: dict[Any, int] = {}
            for i, settings in enumerate(candidates):
                value = settings.get(name, INACTIVE)
                key = (type(value), value)
                if key not in known:
                    known[key] = coding.code(value)
                found[i, j] = known[key]
        return found
