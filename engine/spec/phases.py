"""The parts of a round on a device: drafting, the target's forward, acceptance, and what the drafter learns from it.

Each is one call that reads and writes a board, so that each can run eagerly or from a CUDA graph, by batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import DraftShape
from engine.graphs import Bucket, GraphSet, buckets
from engine.memory.pool import KVPool, Pages
from engine.model.llama import Llama
from engine.ops.base import DeviceOps
from engine.spec.base import Drafter
from engine.spec.board import Board, Standing

_REHEARSED = 1024
"""Tokens of context for which kernels are tuned."""

DRAFT, VERIFY, ACCEPT, EXTEND = "draft", "verify", "accept", "extend"


class Kind(NamedTuple):
    """What a board's shapes depend on besides the number of requests."""

    drafter: str
    shape: DraftShape

    def __str__(self) -> str:
        return f"{self.drafter}, {self.shape.num_steps} steps, {self.shape.num_draft_tokens} rows"


class Phases:
    """Boards of one model, and what runs on them."""

    def __init__(self, model: Llama, ops: DeviceOps, pool: KVPool, pages: Pages, context_length: int) -> None:
        """`pool`: its last page is nobody's."""
        self._model, self._ops, self._pool, self._pages = model, ops, pool, pages
        self._rehearsed = min(_REHEARSED, context_length)
        self.standing = Standing(pages.rows, model.device)
        self._boards: dict[Bucket, Board] = {}
        self._drafters: dict[str, Drafter] = {}
        self.graphs = GraphSet("off", None)

    def wanted(self, drafter: Drafter, shapes: Sequence[DraftShape], most: int) -> dict[str, list[Bucket]]:
        """What to capture for rounds of at most `most` requests with drafts of these shapes."""
        self._drafters[drafter.name] = drafter
        found: dict[str, list[Bucket]] = {}
        for shape in shapes:
            made = [Bucket(requests, Kind(drafter.name, shape)) for requests in buckets(most)]
            for phase in phases_of(drafter, shape):
                found.setdefault(phase, []).extend(made)
        return found

    def work(self, phase: str, bucket: Bucket) -> Callable[[], None]:
        """For a capturer."""
        kind = bucket.kind
        assert isinstance(kind, Kind)
        if bucket not in self._boards:
            with torch.inference_mode():
                self._boards[bucket] = self._board(bucket.requests, kind.shape)
                self._boards[bucket].rehearse(self._rehearsed)
        board, drafter = self._boards[bucket], self._drafters[kind.drafter]

        def run() -> None:
            with torch.inference_mode():
                self._run(phase, drafter, board)

        return run

    def forget(self) -> None:
        """Let go of the boards that were captured."""
        self._boards = {}

    def board(self, drafter: Drafter, requests: int, shape: DraftShape) -> Board:
        """A board for such a round: that of its graphs, where there are some."""
        kind = Kind(drafter.name, shape)
        size = self.graphs.size(requests, kind)
        return self._board(requests, shape) if size is None else self._boards[Bucket(size, kind)]

    def run(self, phase: str, drafter: Drafter, board: Board) -> None:
        """Run it on this board, from its graph or eagerly."""
        graph = self.graphs.find(phase, Bucket(board.requests, Kind(drafter.name, board.shape)))
        if graph is None:
            self._run(phase, drafter, board)
        else:
            graph.replay()

    def settle(self, board: Board, chosen: Tensor) -> None:
        """Accept drafts, given this rank's choice at every node, int64 [R N]; rank 0's counts."""
        tokens, parent, start = board.flat()
        group, differ = self._model.group, torch.zeros_like(tokens, dtype=torch.bool)
        if group.ranks > 1:
            mine = torch.stack((chosen, tokens, parent))
            theirs = group.share(mine.clone())
            chosen, differ = theirs[0], (theirs[1:] != mine[1:]).any(dim=0)
        length, path = self._ops.accept(tokens, parent, start, chosen, board.shape.num_steps, board.rows)
        board.accept(length, path, chosen, differ.view(board.requests, -1).any(dim=1), self.standing)
        if board.shape.topk > 1:
            self._pool.move(*board.moves())

    def _run(self, phase: str, drafter: Drafter, board: Board) -> None:
        resident = drafter.resident
        assert resident is not None
        if phase == DRAFT:
            resident.draft(board, board.shape.num_steps)
        elif phase == VERIFY:
            board.hidden, board.features = self._model.hidden(board.tree_view(), self._pool, drafter.features)
        elif phase == ACCEPT:
            self.settle(board, self._ops.argmax(self._model.logits(board.hidden)))
        else:
            resident.extend(board)

    def _board(self, requests: int, shape: DraftShape) -> Board:
        nowhere = (self._pool.pages - 1) * self._pool.page_size
        width = self._pages.table.shape[1]
        board = Board(requests, shape, width, self._pool.page_size, nowhere, self.standing.nobody)
        return board.on(self._model.device)


def phases_of(drafter: Drafter, shape: DraftShape) -> tuple[str, ...]:
    """Which parts a round of this shape has on a device; none: it has no such rounds."""
    resident = drafter.resident
    if resident is None:
        return ()
    draft = (DRAFT,) if resident.drafts and shape.num_steps else ()
    extend = (EXTEND,) if resident.extends else ()
    return (*draft, VERIFY, ACCEPT, *extend)
