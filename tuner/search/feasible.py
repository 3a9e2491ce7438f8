"""Which candidates are likely not to work, learned from those that did not.

What crashes is nearly always a conjunction of a few conditions (this backend with that mode, more rows than so many).
All conjunctions of up to three are held at once; a candidate that worked rules out every one that it meets. What is
left, and meets a failure, shares the blame for it: simple ones more than complicated ones, those that explain many
failures more than those that explain one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tuner.search.shape import shape_at

PRIOR = 0.05
"""The chance that a candidate like none seen does not work."""

SIMPLER = 0.25
"""A condition more makes a conjunction so much less likely."""

EXPLAINS = 3.0
"""Each failure that a conjunction explains makes it so much likelier than one that leaves it to another cause."""

MOST_EXPLAINED = 12
"""Failures beyond which one more makes no difference."""

ALONE = 0.02
"""The weight of the hypothesis that nothing but the very candidate fails."""

MOST_TRIPLES = 26
"""Conditions beyond which conjunctions of three are too many to hold."""

MOST_LIMITS = 12
"""Values of one number that are tried as limits."""

MOST_PAIRS = 120
"""The same of two."""

MOST_TAUGHT = 1500


class Feasibility:
    """The chance that each candidate works.

    Args:
        settings: all candidates, with what is fixed.
        levels: at which they are measured; a tree that fits one request may not fit a hundred.
    """

    def __init__(self, settings: Sequence[Mapping[str, Any]], levels: Sequence[int]) -> None:
        conditions: dict[tuple[Any, ...], np.ndarray] = {}
        columns = _columns(settings, levels)
        for name, values in columns.items():
            distinct = {(_is_number(value), value) for value in values}
            if len(distinct) < 2:
                continue
            numbers = sorted(value for number, value in distinct if number)
            some = numbers[:: max(1, len(numbers) // MOST_LIMITS)]
            for number, value in sorted(distinct, key=str):
                if not number or len(some) == len(numbers):
                    conditions[name, "is", value] = np.array([v == value and _is_number(v) == number for v in values])
            for value in some:
                conditions[name, "least", value] = np.array([_is_number(v) and v >= value for v in values])
                conditions[name, "most", value] = np.array([_is_number(v) and v <= value for v in values])
        unique: dict[bytes, np.ndarray] = {}
        for truth in conditions.values():
            if truth.any() and not truth.all():
                unique.setdefault(truth.tobytes(), truth)
        self.truth = np.stack(list(unique.values()), axis=1) if unique else np.zeros((len(settings), 0), bool)
        self._lengths, self._meets = self._conjunctions()

    def _conjunctions(self) -> tuple[np.ndarray, np.ndarray]:
        count = self.truth.shape[1]
        singles = list(range(count))
        meets = [self.truth]
        lengths = [np.ones(count, int)]
        pairs = list(itertools.combinations(singles, 2)) if count <= MOST_PAIRS else []
        if pairs:
            first, second = np.array(pairs).T
            meets.append(self.truth[:, first] & self.truth[:, second])
            lengths.append(np.full(len(pairs), 2))
        if count <= MOST_TRIPLES:
            triples = list(itertools.combinations(singles, 3))
            if triples:
                a, b, c = np.array(triples).T
                meets.append(self.truth[:, a] & self.truth[:, b] & self.truth[:, c])
                lengths.append(np.full(len(triples), 3))
        return np.concatenate(lengths), np.concatenate(meets, axis=1)

    def works(self, failed: Sequence[int], worked: Sequence[int]) -> np.ndarray:
        """The chance for each candidate, after those of these places failed and worked."""
        chance = np.full(len(self.truth), 1 - PRIOR) if failed else np.ones(len(self.truth))
        chance[list(worked)] = 1.0
        chance[list(failed)] = 0.0
        failed = list(failed)[-MOST_TAUGHT:]
        if not failed:
            return chance
        alive = ~self._meets[list(worked)].any(axis=0) if len(worked) else np.ones(len(self._lengths), bool)
        taught = self._meets[failed]
        alive &= taught.any(axis=0)
        taught, meets, lengths = taught[:, alive], self._meets[:, alive], self._lengths[alive]
        weight = SIMPLER**lengths * EXPLAINS ** np.minimum(taught.sum(axis=0), MOST_EXPLAINED)
        blamed = taught * weight
        total = blamed.sum(axis=1) + ALONE
        # Alike failures have alike blame: one of each is enough.
        distinct = np.unique(taught, axis=0, return_index=True)[1]
        share = blamed[distinct] / total[distinct][:, None]
        risk = (meets.astype(np.float32) @ share.T.astype(np.float32)).max(axis=1, initial=0.0)
        chance = np.minimum(chance, (1 - PRIOR) * (1 - risk))
        chance[list(worked)] = 1.0
        chance[failed] = 0.0
        return chance


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(settings: Sequence[Mapping[str, Any]], levels: Sequence[int]) -> dict[str, list[Any]]:
    names = sorted({name for one in settings for name in one})
    columns: dict[str, list[Any]] = {name: [one.get(name) for one in settings] for name in names}
    if "speculation" in columns:
        columns["rows at most"] = [max(shape_at(one, level).rows * level for level in levels) for one in settings]
    return columns
