"""EAGLE-3: a small head drafts from what the target has computed, in chains (topk 1) or trees.

Its cache has one layer, in the target's slots. Drafting writes entries behind the committed ones from the head's own
hidden states; after each verify step they are written again from the target's true features. The hidden state of the
last committed position is what the next round begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import DRAFTERS, MOST_TOPK
from engine.errors import ModelBroken, NothingNamed
from engine.memory.pool import KVPool
from engine.model.eagle3 import Eagle3Head
from engine.model.head_file import fingerprint, load_head
from engine.ops.base import DeviceOps, View, rows_of, sent
from engine.spec.base import (
    Asked,
    ChainBuilder,
    Check,
    DraftTree,
    NothingResident,
    Resident,
    Seen,
    Surroundings,
    joined,
    only_roots,
    register,
)
from engine.spec.board import Board
from engine.spec.device_tree import DeviceCandidates
from engine.spec.late import Entries, LateEntries
from engine.spec.tree import Candidates


@register("eagle3")
class Eagle3Drafter:
    """Drafts with one head. Draft attention in trees follows each node's true ancestors."""

    name = "eagle3"
    limits = DRAFTERS["eagle3"]
    observes = True
    alarm_floor = 0.05
    lookahead = 1  # an entry holds the embedding of the token after it

    def __init__(self, surroundings: Surroundings) -> None:
        target, self._pages = surroundings.target, surroundings.pages
        self.file = find_head(surroundings)
        loaded = load_head(self.file, target, surroundings.target_name)
        if loaded.shape.draft_vocab < MOST_TOPK:
            raise ModelBroken(
                f"draft_head: '{self.file}' drafts {loaded.shape.draft_vocab} tokens; at least {MOST_TOPK} are needed"
            )
        self.about, self.identity = loaded.about, loaded.identity()
        told = loaded.about.get("check")
        self.check: Check | None = Check(told["prompt"], told["accept_length"]) if told else None
        self._head = Eagle3Head(
            loaded.shape,
            loaded.weights,
            loaded.hot,
            target.embedding,
            target.ops,
            target.dtype,
            surroundings.positions,
            target.group,
        )
        self.features: tuple[int, ...] = loaded.shape.layers
        self._ops = target.ops
        # As the target's, both have a place that is nobody's, for rounds that stay on a device.
        self._pool = self._head.new_pool(self._pages.total + 1, self._pages.page_size)
        self._late = LateEntries(self._pages, target.device)
        sizes = (surroundings.requests + 1, loaded.shape.hidden)
        self._hidden = torch.zeros(sizes, dtype=target.dtype, device=target.device)
        device_ops = surroundings.device_ops
        self.resident: Resident | None = (
            None if device_ops is None else _Eagle3Resident(self._head, self._pool, self._hidden, device_ops)
        )

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`. What else it needs comes with the first `observe`."""
        self._late.begin(row)

    def propose(self, asked: Asked) -> DraftTree:
        """See `Drafter.propose`."""
        wanting = asked.steps > 0
        if wanting.any():
            wanting[wanting] = self._late.catch_up(asked.rows[wanting], asked.lengths[wanting], self._make)
        if not wanting.any():
            return only_roots(asked.roots)
        some = asked if wanting.all() else asked.subset(np.flatnonzero(wanting))
        with torch.inference_mode():
            tree = self._chains(some) if asked.shape.topk == 1 else self._trees(some)
        if wanting.all():
            return tree
        return joined(only_roots(asked.roots), tree, wanting)

    def observe(self, seen: Seen) -> None:
        """See `Drafter.observe`."""
        made = Entries(seen.rows, seen.first, seen.start, seen.following, seen.features)
        made = self._late.keep(made, seen.speculating)
        if len(made.rows):
            self._make(made)

    def _make(self, entries: Entries) -> None:
        """Write entries from true features; the last of each request is what its next drafts begin with."""
        rows, positions = entries.rows, entries.positions
        view = self._view(rows, entries.owner, entries.tokens, positions, entries.first, entries.start)
        with torch.inference_mode():
            hidden = self._head.extend(entries.features, view, self._pool)
            self._hidden.index_copy_(0, sent(rows, hidden.device), rows_of(hidden, entries.start[1:] - 1))

    def release(self, rid: int) -> None:
        """See `Drafter.release`. A row's state is overwritten by its next owner."""

    def _chains(self, asked: Asked) -> DraftTree:
        rows, lengths, deepest = asked.rows, asked.lengths, int(asked.steps.max())
        count = len(rows)
        each, start = np.arange(count), np.arange(count + 1)
        x, builder = rows_of(self._hidden, rows), ChainBuilder(self._ops, asked, self._head.hot)
        drafts = builder.add(self._head.logits(x))
        for i in range(1, deepest):
            at = lengths + i - 1
            x = self._head.step(x, self._view(rows, each, drafts, at, at, start), self._pool)
            drafts = builder.add(self._head.logits(x))
        return builder.tree()

    def _trees(self, asked: Asked) -> DraftTree:
        rows, lengths, topk = asked.rows, asked.lengths, asked.shape.topk
        count, deepest = len(rows), int(asked.steps.max())
        x = rows_of(self._hidden, rows)
        scores, tokens = self._best(x, topk)
        candidates = Candidates(topk, scores, tokens)
        beams, parent = tokens, np.broadcast_to(np.arange(topk), tokens.shape)
        x = x.repeat_interleave(topk, 0)
        owner = np.repeat(np.arange(count), topk)
        start = np.arange(count + 1) * topk
        seen = np.zeros((count, topk, topk * max(1, deepest - 1)), dtype=np.uint8)
        for i in range(1, deepest):
            seen[:, np.arange(topk), (i - 1) * topk + np.arange(topk)] = 1
            width = i * topk
            offsets = np.arange(count) * topk * width
            view = self._view(
                rows,
                owner,
                beams.reshape(-1),
                np.repeat(lengths + i - 1, topk),
                lengths,
                start,
                slots=lengths[owner] + (i - 1) * topk + np.tile(np.arange(topk), count),
                mask=(seen[:, :, :width].reshape(-1), offsets, np.full(count, width)),
            )
            x = self._head.step(x, view, self._pool)
            scores, tokens = self._best(x, topk)
            parent, beams = candidates.grow(scores.reshape(count, topk, topk), tokens.reshape(count, topk, topk))
            seen = np.take_along_axis(seen, parent[:, :, None], axis=1)
            x = rows_of(x, (start[:-1, None] + parent).reshape(-1))
        return candidates.select(asked.roots, asked.shape.num_draft_tokens, asked.steps)

    def _best(self, x: Tensor, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and target ids of the K likeliest tokens of each row, best first."""
        scores, index = self._ops.likeliest(self._head.logits(x), topk)
        return scores, self._head.hot[torch.from_numpy(index)].numpy()

    def _view(
        self,
        rows: np.ndarray,
        owner: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        context: np.ndarray,
        start: np.ndarray,
        slots: np.ndarray | None = None,
        mask: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> View:
        """`slots`: logical positions to write, where they are not `positions`; `mask`: matrices, offsets, widths."""
        where = positions if slots is None else slots
        return View(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
            positions=torch.from_numpy(positions.astype(np.int32)),
            slots=torch.from_numpy(self._pages.slots(rows[owner], where)),
            page_table=self._pages.table,
            page_size=self._pages.page_size,
            table_row=torch.from_numpy(rows.astype(np.int32)),
            row_start=torch.from_numpy(start.astype(np.int32)),
            context=torch.from_numpy(context.astype(np.int32)),
            mask=None if mask is None else torch.from_numpy(np.ascontiguousarray(mask[0])),
            mask_start=torch.from_numpy(np.full(len(rows), -1, dtype=np.int64) if mask is None else mask[1]),
            logit_rows=torch.empty(0, dtype=torch.int64),
            mask_width=None if mask is None else torch.from_numpy(mask[2].astype(np.int32)),
        )


class _Eagle3Resident(NothingResident):
    """The same on a board: drafts are neither brought to the host nor taken from it."""

    drafts = extends = True

    def __init__(self, head: Eagle3Head, pool: KVPool, hidden: Tensor, ops: DeviceOps) -> None:
        self._head, self._pool, self._hidden, self._ops = head, pool, hidden, ops
        self._hot = head.hot.to(hidden.device)

    def draft(self, board: Board, deepest: int) -> None:
        """See `Resident.draft`."""
        x = self._hidden.index_select(0, board.row)
        if board.shape.topk == 1:
            self._chains(x, board, deepest)
        else:
            self._trees(x, board, deepest)

    def extend(self, board: Board) -> None:
        """See `Resident.extend`."""
        features = board.features.index_select(0, board.nodes())
        hidden = self._head.extend(features, board.committed_view(), self._pool)
        self._hidden.index_copy_(0, board.row, hidden.index_select(0, board.last()))

    def _chains(self, x: Tensor, board: Board, deepest: int) -> None:
        drafts: list[Tensor] = []
        for i in range(deepest):
            if i:
                view = board.row_view(drafts[-1], board.length + (i - 1), board.steps > i)
                x = self._head.step(x, view, self._pool)
            ids = self._ops.argmax(self._head.logits(x)).clamp(min=0)
            drafts.append(self._hot.index_select(0, ids))
        board.chain(torch.stack(drafts, dim=1), 1 + board.steps.clamp(max=deepest))

    def _trees(self, x: Tensor, board: Board, deepest: int) -> None:
        r, k, device = board.requests, board.shape.topk, x.device
        each, firsts = torch.arange(k, device=device), torch.arange(r, device=device).unsqueeze(1) * k
        scores, beams = self._best(x, k)
        candidates = DeviceCandidates(k, scores, beams)
        x = x.repeat_interleave(k, 0)
        seen = torch.zeros(r, k, k * max(1, deepest - 1), dtype=torch.bool, device=device)
        for i in range(1, deepest):
            seen[:, :, (i - 1) * k : i * k] |= each == each.unsqueeze(1)
            behind = board.length.unsqueeze(1) + (i - 1) * k + each
            view = board.view(
                beams,
                (board.length + (i - 1)).unsqueeze(1).expand(r, k),
                board.slots(behind, (board.steps > i).unsqueeze(1)),
                board.length,
                seen[:, :, : i * k],
                torch.full_like(board.length, i * k),
            )
            x = self._head.step(x, view, self._pool)
            scores, tokens = self._best(x, k)
            parent, beams = candidates.grow(scores.view(r, k, k), tokens.view(r, k, k))
            seen = seen.gather(1, parent.unsqueeze(2).expand_as(seen))
            x = x.index_select(0, (firsts + parent).reshape(-1))
        candidates.select(board)

    def _best(self, x: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        scores, index = self._ops.best(self._head.logits(x), topk)
        return scores, self._hot[index]


def find_head(surroundings: Surroundings) -> Path:
    """The head that is named, or the one that ships for this target.

    Raises:
        NothingNamed: neither.
    """
    named = surroundings.config.draft_head
    if named:
        return Path(named).expanduser()
    shipped = shipped_head(fingerprint(surroundings.target))
    if shipped is None:
        raise NothingNamed(
            f"draft_head: no head ships for '{surroundings.target_name}'; name a file, which `engine train-head` makes"
        )
    return shipped


def shipped_head(target_fingerprint: str) -> Path | None:
    """The head in this package that was trained for the target with this fingerprint."""
    file = Path(str(resources.files("engine.heads"))) / f"{target_fingerprint}.safetensors"
    return file if file.is_file() else None
