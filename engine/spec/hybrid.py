"""Two drafters in turn: the second drafts for the requests in which the first finds nothing.

By default prompt lookup first, which costs nothing and is right where text repeats itself, then the EAGLE-3 head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.config import DRAFTERS
from engine.spec.base import Asked, Drafter, DraftTree, Resident, Seen, Surroundings, joined, make_drafter, register
from engine.spec.board import Board
from engine.spec.eagle3 import Eagle3Drafter


@register("hybrid")
class HybridDrafter:
    """Composes any two others; both see everything that is committed."""

    name = "hybrid"
    limits = DRAFTERS["hybrid"]
    observes = True

    def __init__(self, surroundings: Surroundings) -> None:
        first, second = surroundings.config.hybrid
        self._first: Drafter = make_drafter(first, surroundings)
        self._second: Drafter = make_drafter(second, surroundings)
        self.features = tuple(dict.fromkeys((*self._first.features, *self._second.features)))
        floors = (self._first.alarm_floor, self._second.alarm_floor)
        self.alarm_floor = min((floor for floor in floors if floor), default=0.0)
        self.check = self._second.check
        self.identity = f"{self._first.identity},{self._second.identity}"
        self.lookahead = max(self._first.lookahead, self._second.lookahead)
        # Its entries for drafts are written again from the target's; a model's own would be of drafts that gave way.
        whole = isinstance(self._second, Eagle3Drafter) and self._second.resident is not None
        self.resident: Resident | None = (
            _Both(self._first.resident, self._second.resident, not self._first.alarm_floor)
            if whole and self._first.resident is not None and self._second.resident and self._first.resident.looks_up
            else None
        )

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""
        self._first.add(rid, row, tokens)
        self._second.add(rid, row, tokens)

    def propose(self, asked: Asked) -> DraftTree:
        """See `Drafter.propose`."""
        tree = self._first.propose(asked)
        empty = (np.diff(tree.start) == 1) & (asked.steps > 0)
        silent = np.where(empty, not self._second.alarm_floor, not self._first.alarm_floor)
        if not empty.any():
            return replace(tree, silent=silent)
        left = asked.subset(np.flatnonzero(empty))
        most = asked.shape.second_steps
        left = replace(left, steps=np.minimum(left.steps, most), shape=left.shape.limited(most))
        return replace(joined(tree, self._second.propose(left), empty), silent=silent)

    def observe(self, seen: Seen) -> None:
        """See `Drafter.observe`."""
        for drafter in (self._first, self._second):
            drafter.observe(self._share(seen, drafter))

    def _share(self, seen: Seen, drafter: Drafter) -> Seen:
        """With the features of this drafter's layers only."""
        if drafter.features == self.features:
            return seen
        width = seen.features.shape[1] // len(self.features)
        parts = [seen.features[:, width * i : width * (i + 1)] for i in map(self.features.index, drafter.features)]
        return replace(seen, features=torch.cat(parts, dim=1) if parts else seen.features[:, :0])

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""
        self._first.release(rid)
        self._second.release(rid)


class _Both:
    """What is looked up on the host, and a head's drafts for the requests in which nothing is found."""

    drafts = extends = looks_up = True

    def __init__(self, first: Resident, second: Resident, found_is_silent: bool) -> None:
        self._first, self._second, self.found_is_silent = first, second, found_is_silent

    def draft(self, board: Board, deepest: int) -> None:
        """See `Resident.draft`. The second drafts for all: who needs it is not known when a graph is captured."""
        self._second.draft(board, min(deepest, board.shape.second_steps))
        board.prefer_found()

    def extend(self, board: Board) -> None:
        """See `Resident.extend`."""
        self._second.extend(board)

    def look_up(self, rids: Sequence[int], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Resident.look_up`."""
        return self._first.look_up(rids, steps)

    def hear(self, rids: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """See `Resident.hear`."""
        self._first.hear(rids, emitted)
