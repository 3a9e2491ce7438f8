"""Entries of a drafter's own cache that are put off while speculation is off.

A cache that is kept up costs a share of every step, mostly for requests that end before anybody drafts for them. What
an entry is made of is kept instead, in its slot's place, and the entry is made when drafts are wanted. Since it belongs
to the slot, a page that requests share is late for all of them and made up for all of them. It never takes more than
one place for each slot of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.memory.pool import Pages
from engine.ops.base import rows_of

AT_ONCE = 1024
"""Late entries made in one round, at most; a request with some left is not drafted for in that round."""


@dataclass(frozen=True)
class Entries:
    """Of C requests, T entries at consecutive positions.

    Attributes:
        rows: int64 [C], rows in the page table.
        first: int64 [C], position of each request's first entry here.
        start: int64 [C + 1], where each request's entries begin in what follows.
        tokens: int64 [T], what the drafter embeds.
        features: [T, F], of the target; F is 0 for a drafter that reads none.
    """

    rows: np.ndarray
    first: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    features: Tensor

    @cached_property
    def counts(self) -> np.ndarray:
        """Entries of each request, int64 [C]."""
        return np.diff(self.start)

    @cached_property
    def owner(self) -> np.ndarray:
        """Each entry's request, int64 [T]."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @cached_property
    def positions(self) -> np.ndarray:
        """Of each entry, int64 [T]."""
        owner = self.owner
        return self.first[owner] + np.arange(len(owner)) - self.start[owner]

    def without(self, known: np.ndarray) -> Entries:
        """Without the first `known` [C] entries of each request, and without requests that have no others."""
        counts = self.counts - known
        some = np.flatnonzero(counts)
        start = np.concatenate(([0], np.cumsum(counts[some])))
        at = np.repeat(self.start[:-1][some] + known[some] - start[:-1], counts[some]) + np.arange(start[-1])
        return Entries(self.rows[some], (self.first + known)[some], start, self.tokens[at], rows_of(self.features, at))


class LateEntries:
    """Which slots' entries are late, and what they are to be made of."""

    def __init__(self, pages: Pages, device: torch.device) -> None:
        """`device`: of the drafter. Nothing is put off on a GPU, whose memory is the pool's."""
        self._pages, self._waits = pages, device.type == "cpu"
        slots = (pages.total + 1) * pages.page_size  # with the page that is nobody's
        self._late = np.zeros(slots, dtype=bool)
        self._tokens = np.zeros(slots, dtype=np.int64)
        # [slots] of all bytes of an entry's features, once some are late; memory is touched where they are. Copied by
        # numpy, since torch wakes its OpenMP threads for a few rows (see `rows_of`).
        self._features: np.ndarray | None = None
        self._like = torch.empty(0, 0)  # features, for their type and width
        self._made = np.zeros(pages.rows, dtype=np.int64)  # of each row so many positions certainly have entries

    def begin(self, row: int) -> None:
        """Another request has this row. What pages it shares may be late."""
        self._made[row] = 0

    def keep(self, entries: Entries, speculating: bool) -> Entries:
        """Put off the entries of a round that does not speculate, and of requests that have late ones before them.

        Returns those that are to be made now.
        """
        rows, begin, owner = entries.rows, entries.first, entries.owner
        speculating |= not self._waits
        now = np.full(len(rows), speculating)
        if speculating:
            for i in np.flatnonzero(self._made[rows] < begin).tolist():
                self._next_run(int(rows[i]), int(begin[i]))
            now = self._made[rows] >= begin
        self._made[rows] = np.where(now, begin + entries.counts, np.minimum(self._made[rows], begin))
        slots = self._pages.slots(rows[owner], entries.positions)
        put = ~now[owner]
        self._late[slots] = put
        if now.all():
            return entries
        at = np.flatnonzero(put)
        self._tokens[slots[at]] = entries.tokens[at]
        if entries.features.shape[1]:
            features = _whole_rows(entries.features)
            if self._features is None:
                self._features = np.empty(len(self._late), dtype=features.dtype)
            self._features[slots[at]] = features if put.all() else features[at]
        self._like = entries.features.new_empty(0, entries.features.shape[1])
        return entries.without(np.where(now, 0, entries.counts))

    def catch_up(self, rows: np.ndarray, lengths: np.ndarray, make: Callable[[Entries], None]) -> np.ndarray:
        """Have late entries of these rows [B] made, at most `AT_ONCE`; bool [B]: which have none left.

        Args:
            rows: in the page table.
            lengths: int64 [B], positions that are to have entries.
            make: is given them, for each row in order of position.
        """
        left = AT_ONCE
        while left:
            runs = []
            for i in np.flatnonzero(self._made[rows] < lengths).tolist():
                begin, end = self._next_run(int(rows[i]), int(lengths[i]))
                end = min(end, begin + left)
                if begin < end:
                    runs.append((int(rows[i]), begin, end))
                    left -= end - begin
            if not runs:
                break
            make(self._taken(np.array(runs)))
        return self._made[rows] >= lengths

    def _next_run(self, row: int, length: int) -> tuple[int, int]:
        """The first late positions of this row before `length`, from and to; (length, length): there are none."""
        made = int(self._made[row])
        at = np.arange(made, length)
        late = self._late[self._pages.slots(np.full(len(at), row), at)]
        begin = made + int(late.argmax()) if late.any() else length
        self._made[row] = begin
        on_time = np.flatnonzero(~late[begin - made :])
        return begin, begin + int(on_time[0]) if len(on_time) else length

    def _taken(self, runs: np.ndarray) -> Entries:
        """What these runs [n, 3] (row, from, to) are to be made of; they are late no more."""
        rows, begin, end = runs.T
        start = np.concatenate(([0], np.cumsum(end - begin)))
        owner = np.repeat(np.arange(len(rows)), end - begin)
        slots = self._pages.slots(rows[owner], np.arange(start[-1]) - start[owner] + begin[owner])
        self._late[slots] = False
        self._made[rows] = end
        like = self._like
        features = like.new_empty(len(slots), 0) if self._features is None else _rows_like(like, self._features[slots])
        return Entries(rows, begin, start, self._tokens[slots], features)


def _whole_rows(x: Tensor) -> np.ndarray:
    """The memory of x [n, F] as n elements of all bytes of a row."""
    rows = x.contiguous().view(torch.uint8).numpy()
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def _rows_like(like: Tensor, rows: np.ndarray) -> Tensor:
    """The inverse of `_whole_rows`, in the type of `like` [0, F]."""
    return torch.from_numpy(rows.view(np.uint8)).view(like.dtype).view(len(rows), like.shape[1])
