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
        slots = pages.total * pages.page_size
        self._late = np.zeros(slots, dtype=bool)
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._features: Tensor | None = None  # [slots, F], once there are late ones; touched where they are
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
        self._tokens[slots[put]] = entries.tokens[put]
        if self._features is None:
            shape, like = (len(self._late), entries.features.shape[1]), entries.features
            self._features = torch.empty(shape, dtype=like.dtype, device=like.device)
        at = torch.from_numpy(slots[put]).to(self._features.device)
        self._features.index_copy_(0, at, rows_of(entries.features, np.flatnonzero(put)))
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
        assert self._features is not None
        return Entries(rows, begin, start, self._tokens[slots], rows_of(self._features, slots))
