"""A batch on a device: tensors of fixed size and place that every part of a round reads and writes there.

The host says once, at the start of a round, who is in the batch; what each part leaves, the next one finds. So a part
can be replayed from a CUDA graph, and nothing has to be known on the host before the round's outcome.

R requests, some of which may not exist; N rows each, the nodes of a tree of which the first `size` exist; S draft
depth; D = S + 1 rows at most that are accepted. What does not exist is stored to a page that is nobody's, and sees
nothing that may not have been written: a key under a mask weighs nothing, yet nothing times a NaN is a NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.config import DraftShape
from engine.ops.base import View, sent

NO_TOKEN = -2
"""The draft of a node that does not exist: no target chooses it, not even one that has only NaN (-1)."""
TOLD = 4
"""Columns of `Board.told` before tokens: committed length, rows accepted, nodes, whether ranks have other drafts."""


class Standing:
    """What a request's next round begins with, by its row in the page table; the last row is nobody's."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.length, self.bonus = (torch.zeros(rows + 1, dtype=torch.int64, device=device) for _ in range(2))
        self.nobody = rows


class Board:
    """See this module.

    Attributes:
        shape: of the drafts.
        requests, rows: R and N.
        row: int64 [R], rows in the page table.
        length, root: int64 [R], committed tokens, and the bonus token that stands behind them.
        steps: int64 [R], draft depth allowed.
        seed: int64 [R], the bits of each request's seed.
        looked_up: int64 [R, S], drafts that the host found; `found`: int64 [R], how many.
        table: int32 [R, pages], the requests' pages.
        tokens, parent, depth: int64 [R, N], of the tree's nodes; `parent` counts from the request's root, whose is -1.
        size: int64 [R].
        hidden, features: of the target for every node, [R N, H] and [R N, F].
        accepted: int64 [R], rows committed by this round, 0 for a request that does not exist.
        path: int64 [R, D], the accepted nodes, from the root; 0 behind them.
        following: int64 [R, D], the token behind each.
        told: int64 [R, `TOLD` + D], what the host is to know: the columns of `TOLD`, and the tokens emitted.
    """

    def __init__(self, requests: int, shape: DraftShape, pages: int, page_size: int, nowhere: int, nobody: int) -> None:
        """`pages` of a request at most; `nowhere`: a slot of nobody's page; `nobody`: a row of no request."""
        self.shape, self.requests, self.rows = shape, requests, shape.num_draft_tokens
        self.page_size, self._nowhere, self._nobody = page_size, nowhere, nobody
        self._pages = pages

    def on(self, device: torch.device) -> Board:
        """Take its memory there, holding a batch of nobody."""
        r, n, s, d = self.requests, self.rows, self.shape.num_steps, self.shape.num_steps + 1
        sizes = {"row": r, "known": r, "length": r, "root": r, "steps": r, "seed": r, "found": r, "looked_up": r * s}
        self._inbox = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        self._places: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name], at = slice(at, at + size), at + size
        self.row, self._known, self._length, self._root, self.steps, self.seed, self.found, looked_up = (
            self._inbox[place] for place in self._places.values()
        )
        self.looked_up = looked_up.view(r, s)
        self.table = torch.full((r, self._pages), self._nowhere // self.page_size, dtype=torch.int32, device=device)

        def whole(*size: int, value: int = 0) -> Tensor:
            return torch.full(size, value, dtype=torch.int64, device=device)

        self.length, self.root, self.size, self.accepted = whole(r), whole(r), whole(r, value=1), whole(r)
        self.row.fill_(self._nobody)
        self.tokens, self.parent, self.depth = whole(r, n), whole(r, n), whole(r, n)
        self.path, self.following, self.told = whole(r, d), whole(r, d), whole(r, TOLD + d)
        self._at = torch.arange(max(n, d), device=device)
        self._each = torch.arange(r + 1, device=device)
        self.hidden = self.features = torch.empty(0, device=device)
        return self

    def fill(self, given: Mapping[str, np.ndarray], table: np.ndarray, standing: Standing) -> None:
        """Bring a batch: arrays by name, of as many requests as exist, and their rows of the page table.

        `known`: whose `length` and `root` are given; the others' are where the round before has left them.
        """
        count = len(table)
        inbox = np.zeros(len(self._inbox), dtype=np.int64)
        for name, place in self._places.items():
            part = inbox[place].reshape(self.requests, -1)
            if name == "row":
                part[:] = self._nobody
            if name == "known":
                part[:] = 1
            part[:count] = given[name].reshape(count, -1)
        self._inbox.copy_(sent(inbox, self._inbox.device))
        whole = np.full((self.requests, self._pages), self._nowhere // self.page_size, dtype=np.int32)
        whole[:count] = table
        self.table.copy_(sent(whole, self.table.device))
        known = self._known > 0
        self.length.copy_(torch.where(known, self._length, standing.length.index_select(0, self.row)))
        self.root.copy_(torch.where(known, self._root, standing.bonus.index_select(0, self.row)))

    def rehearse(self, length: int) -> None:
        """Requests of this length that are nobody's: what kernels are chosen by, before there are others."""
        self.length.fill_(length)

    def chain(self, drafts: Tensor, size: Tensor) -> None:
        """The tree is each root and the first `size` - 1 of its drafts, int64 [R, S]."""
        at = self._at[: self.rows]
        size = size.clamp(max=self.rows)
        self.size.copy_(size)
        tokens = torch.full_like(self.tokens, NO_TOKEN)
        tokens[:, 0] = self.root
        tokens[:, 1 : 1 + drafts.shape[1]] = drafts[:, : self.rows - 1]
        exists = at < size.unsqueeze(1)
        self.tokens.copy_(torch.where(exists, tokens, NO_TOKEN))
        self.parent.copy_(torch.where(exists, at - 1, 0))
        self.depth.copy_(at.expand_as(self.depth))

    def prefer_found(self) -> None:
        """Where the host has found drafts, they replace the tree."""
        has = (self.found > 0).unsqueeze(1)
        tokens, parent, depth, size = (t.clone() for t in (self.tokens, self.parent, self.depth, self.size))
        self.chain(self.looked_up, 1 + self.found)
        for kept, other in ((self.tokens, tokens), (self.parent, parent), (self.depth, depth)):
            kept.copy_(torch.where(has, kept, other))
        self.size.copy_(torch.where(has.squeeze(1), self.size, size))

    def accept(self, length: Tensor, path: Tensor, chosen: Tensor, differ: Tensor, standing: Standing) -> None:
        """Take in what was accepted, and leave behind what the next round begins with.

        Args:
            length, path: int64 [R] and [R, D], of `DeviceOps.accept`, nodes counted among all R N.
            chosen: int64 [R N], the target's token at each node.
            differ: bool [R], whether ranks have other drafts.
            standing: what is left behind.
        """
        first = self._each[: self.requests, None] * self.rows
        exists = self.row != self._nobody
        emitted = torch.where(path >= 0, chosen[path.clamp(min=0)], 0)
        self.accepted.copy_(torch.where(exists, length, 0))
        self.path.copy_(torch.where(path >= 0, path - first, 0))
        self.following.copy_(emitted.clamp(min=0))
        committed = self.length + length
        standing.length.index_copy_(0, self.row, committed)
        standing.bonus.index_copy_(0, self.row, self.following.gather(1, length.unsqueeze(1) - 1).squeeze(1))
        self.told.copy_(torch.cat((torch.stack((committed, length, self.size, differ.long()), dim=1), emitted), dim=1))

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The trees as `DeviceOps.accept` wants them: tokens and parents, int64 [R N], and starts, int64 [R + 1]."""
        start = self._each * self.rows
        parent = torch.where(self.parent < 0, -1, self.parent + start[:-1].unsqueeze(1))
        return self.tokens.reshape(-1), parent.reshape(-1), start

    def slots(self, at: Tensor, exists: Tensor) -> Tensor:
        """Of logical positions, int64 [R, n], of each request: int64 [R, n]; nowhere for what does not exist."""
        pages = self.table.gather(1, (at // self.page_size).clamp(max=self._pages - 1)).long()
        return torch.where(exists, pages * self.page_size + at % self.page_size, self._nowhere)

    def view(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, context: Tensor, mask: Tensor | None, width: Tensor
    ) -> View:
        """n rows of every request.

        Args:
            tokens, positions, slots: int64 [R, n].
            context: int64 [R].
            mask: bool [R, n, m], whom each row sees of the m places behind the context; None: rows see what is before
                them.
            width: int64 [R], how many of the m places may be looked at.
        """
        r, n = tokens.shape
        matrix, start = None, torch.full_like(context, -1)
        if mask is not None:
            m = mask.shape[2]
            # A request's matrix stands with `width` columns; who has fewer than m has the rest of its place empty.
            at = torch.arange(n * m, device=tokens.device).expand(r, -1)
            wide = width.unsqueeze(1)
            source = (at // wide * m + at % wide).clamp(max=n * m - 1)
            matrix = mask.reshape(r, -1).gather(1, source).to(torch.uint8).reshape(-1)
            start = self._each[:r] * (n * m)
        return View(
            tokens=tokens.clamp(min=0).reshape(-1),
            positions=positions.reshape(-1).int(),
            slots=slots.reshape(-1),
            page_table=self.table,
            page_size=self.page_size,
            table_row=self._each[:r].int(),
            row_start=(self._each * n).int(),
            context=context.int(),
            mask=matrix,
            mask_start=start,
            logit_rows=self._each[:0],
            mask_width=None if mask is None else width.int(),
        )

    def row_view(self, tokens: Tensor, at: Tensor, exists: Tensor) -> View:
        """One row of every request: tokens and logical positions, int64 [R]; exists, bool [R]."""
        slots = self.slots(at.unsqueeze(1), exists.unsqueeze(1))
        return self.view(tokens.unsqueeze(1), at.unsqueeze(1), slots, at, None, self.size)

    def tree_view(self) -> View:
        """The nodes, for the target."""
        at = self._at[: self.rows]
        slots = self.slots(self.length.unsqueeze(1) + at, at < self.size.unsqueeze(1))
        positions = self.length.unsqueeze(1) + self.depth
        mask = None if self.rows == 1 else self._ancestors()
        return self.view(self.tokens, positions, slots, self.length, mask, self.size)

    def committed_view(self) -> View:
        """The accepted rows, and in place of the others rows that see the first alone."""
        at, size = self._at[: self.path.shape[1]], self.accepted.clamp(min=1)
        where = self.length.unsqueeze(1) + at
        exists = at < self.accepted.unsqueeze(1)
        mask = None
        if len(at) > 1:
            below = (at <= at.unsqueeze(1)).expand(self.requests, -1, -1)
            mask = torch.where(exists.unsqueeze(2), below, at == 0)
        return self.view(self.following, where, self.slots(where, exists), self.length, mask, size)

    def moves(self) -> tuple[Tensor, Tensor]:
        """Slots to copy from and to, int64 [R D], so that the accepted nodes stand in a row behind the committed."""
        at = self._at[: self.path.shape[1]]
        exists = at < self.accepted.unsqueeze(1)
        base = self.length.unsqueeze(1)
        return self.slots(base + self.path, exists).reshape(-1), self.slots(base + at, exists).reshape(-1)

    def nodes(self) -> Tensor:
        """The accepted nodes among all R N, int64 [R D]."""
        return (self._each[: self.requests, None] * self.rows + self.path).reshape(-1)

    def last(self) -> Tensor:
        """Each request's last accepted row among all R D, int64 [R]."""
        return self._each[: self.requests] * self.path.shape[1] + (self.accepted - 1).clamp(min=0)

    def _ancestors(self) -> Tensor:
        """Who sees whom among the nodes, bool [R, N, N]; a node that does not exist sees the root."""
        n = self.rows
        seen = torch.zeros(self.requests, n, n + 1, dtype=torch.bool, device=self.tokens.device)
        node = self._at[:n].expand(self.requests, n)
        for _ in range(self.shape.num_steps + 1):  # itself, its parent, its grandparent, …
            seen.scatter_(2, torch.where(node < 0, n, node).unsqueeze(2), True)
            node = torch.where(node < 0, node, self.parent.gather(1, node.clamp(min=0)))
        return seen[:, :, :n]
