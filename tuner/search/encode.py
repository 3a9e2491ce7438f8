"""Candidates as numbers: for every setting a code, and how alike two of its values are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.search.shape import UNDERSTOOD

INACTIVE = object()
"""The value of a setting that a candidate does not have."""

REACH = 0.35
"""Of the range of a number's values, over which what is learned of one carries to others."""


def _key(value: Any) -> Any:
    return (type(value).__name__, value) if isinstance(value, (bool, str)) else value


@dataclass(frozen=True)
class Encoder:
    """Codes of settings. A value that it has not been made with is like no other.

    `alike[j]` is a table of likenesses (0 to 1) between the codes of setting j; numbers are alike by rank, words are
    like themselves alone.
    """

    names: tuple[str, ...]
    codes: tuple[Mapping[Any, int], ...]
    alike: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, candidates: Sequence[Mapping[str, Any]]) -> Encoder:
        """The encoder of all these settings; what never varies is left out."""
        names = sorted({name for settings in candidates for name in settings})
        kept, codes, tables = [], [], []
        for name in names:
            values = {_key(settings[name]) if name in settings else INACTIVE for settings in candidates}
            if len(values) < 2:
                continue
            ordered = sorted(values - {INACTIVE}, key=lambda value: (isinstance(value, tuple), value))
            numbers = [value for value in ordered if not isinstance(value, tuple)]
            place = {value: i / max(1, len(numbers) - 1) for i, value in enumerate(numbers)}
            every = [*ordered, *([INACTIVE] if INACTIVE in values else [])]
            table = np.eye(len(every) + 1)
            for i, one in enumerate(every):
                for j, other in enumerate(every):
                    if one in place and other in place:
                        table[i, j] = math.exp(-0.5 * ((place[one] - place[other]) / REACH) ** 2)
            kept.append(name)
            codes.append({value: i for i, value in enumerate(every)})
            tables.append(table)
        return cls(tuple(kept), tuple(codes), tuple(tables))

    @property
    def other(self) -> tuple[int, ...]:
        """Which of the settings physics knows nothing of."""
        return tuple(j for j, name in enumerate(self.names) if name not in UNDERSTOOD)

    def encode(self, candidates: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Codes, candidates × settings."""
        found = np.empty((len(candidates), len(self.names)), int)
        for j, (name, codes) in enumerate(zip(self.names, self.codes, strict=True)):
            strange = len(codes)
            found[:, j] = [
                codes.get(_key(settings[name]) if name in settings else INACTIVE, strange) for settings in candidates
            ]
        return found
