"""A smaller model with the same tokenizer drafts chains, greedily (Leviathan et al., "Speculative Decoding", 2023).

Its cache is addressed by the target's slots. Entries of accepted drafts stay as they are, since they were computed from
exactly those tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.config import DRAFTERS
from engine.errors import InvalidConfig, NothingNamed
from engine.memory.pool import KVPool
from engine.model.llama import Llama
from engine.model.shard import cut_over
from engine.model.source import resolve
from engine.model.weights import open_weights
from engine.ops.base import DeviceOps, View
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
from engine.spec.late import Entries, LateEntries


@register("draft_model")
class DraftModelDrafter:
    """Drafts with a whole model."""

    name = "draft_model"
    limits = DRAFTERS["draft_model"]
    observes = True
    features: tuple[int, ...] = ()
    lookahead = 0
    alarm_floor = 0.05
    check: Check | None = None

    def __init__(self, surroundings: Surroundings) -> None:
        name, target = surroundings.config.draft_model, surroundings.target
        if not name:
            raise NothingNamed("draft_model: none is named; give a smaller model with the target's tokenizer")
        weights = open_weights(resolve(name), target.dtype)
        vocab = weights.config.vocab
        if vocab != target.config.vocab:
            raise InvalidConfig(
                f"draft_model: '{name}' has a vocabulary of {vocab} tokens, the target {target.config.vocab}; "
                "both must share one tokenizer"
            )
        group = cut_over(target.group, weights.config.kv_heads)
        self._model = Llama(
            weights, target.ops, target.dtype, surroundings.positions, group=group, device=target.device
        )
        weights.close()
        self.identity = self._model.identity
        self._pages = surroundings.pages
        self._pool = self._model.new_pool(self._pages.total + 1, self._pages.page_size)  # as the target's
        self._late = LateEntries(self._pages, target.device)
        self._drafted = np.zeros(surroundings.requests, dtype=np.int64)  # entries that the last `propose` wrote
        device_ops = surroundings.device_ops
        self.resident: Resident | None = (
            None if device_ops is None else _ModelResident(self._model, self._pool, device_ops)
        )

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""
        self._late.begin(row)
        self._drafted[row] = 0

    def propose(self, asked: Asked) -> DraftTree:
        """See `Drafter.propose`."""
        wanting = asked.steps > 0
        if wanting.any():
            wanting[wanting] = self._late.catch_up(asked.rows[wanting], asked.lengths[wanting], self._make)
        if not wanting.any():
            return only_roots(asked.roots)
        some = asked if wanting.all() else asked.subset(np.flatnonzero(wanting))
        builder, token = ChainBuilder(self._model.ops, some), some.roots
        each, start = np.arange(len(some.rids)), np.arange(len(some.rids) + 1)
        deepest = int(some.steps.max())
        with torch.inference_mode():
            for i in range(deepest):
                at = some.lengths + i
                view = self._view(some.rows, each, token, at, at, start, each)
                token = builder.add(self._model.forward(view, self._pool))
        self._drafted[some.rows] = deepest
        if wanting.all():
            return builder.tree()
        return joined(only_roots(asked.roots), builder.tree(), wanting)

    def observe(self, seen: Seen) -> None:
        """See `Drafter.observe`. Runs the committed tokens that drafting has not run already."""
        made = Entries(seen.rows, seen.first, seen.start, seen.tokens, seen.features)
        made = self._late.keep(made, seen.speculating)
        left = made.without(np.minimum(self._drafted[made.rows], made.counts))
        self._drafted[seen.rows] = 0
        if len(left.rows):
            self._make(left)

    def _make(self, entries: Entries) -> None:
        """Run tokens for their keys and values alone."""
        nothing = np.empty(0, dtype=np.int64)
        rows, positions = entries.rows, entries.positions
        view = self._view(rows, entries.owner, entries.tokens, positions, entries.first, entries.start, nothing)
        with torch.inference_mode():
            self._model.hidden(view, self._pool)

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""

    def _view(
        self,
        rows: np.ndarray,
        owner: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        context: np.ndarray,
        start: np.ndarray,
        logit_rows: np.ndarray,
    ) -> View:
        return View(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
            positions=torch.from_numpy(positions.astype(np.int32)),
            slots=torch.from_numpy(self._pages.slots(rows[owner], positions)),
            page_table=self._pages.table,
            page_size=self._pages.page_size,
            table_row=torch.from_numpy(rows.astype(np.int32)),
            row_start=torch.from_numpy(start.astype(np.int32)),
            context=torch.from_numpy(context.astype(np.int32)),
            mask=None,
            mask_start=torch.full((len(rows),), -1, dtype=torch.int64),
            logit_rows=torch.from_numpy(logit_rows),
        )


class _ModelResident(NothingResident):
    """The same on a board: drafts are neither brought to the host nor taken from it."""

    drafts = extends = True

    def __init__(self, model: Llama, pool: KVPool, ops: DeviceOps) -> None:
        self._model, self._pool, self._ops = model, pool, ops

    def draft(self, board: Board, deepest: int) -> None:
        """See `Resident.draft`."""
        token, drafts = board.root, []
        for i in range(deepest):
            view = board.row_view(token, board.length + i, board.steps > i)
            hidden, _ = self._model.hidden(view, self._pool)
            token = self._ops.argmax(self._model.logits(hidden)).clamp(min=0)
            drafts.append(token)
        board.chain(torch.stack(drafts, dim=1), 1 + board.steps.clamp(max=deepest))

    def extend(self, board: Board) -> None:
        """See `Resident.extend`. Of what was accepted only a whole chain's last token has not been run."""
        last = board.tokens.gather(1, board.steps.unsqueeze(1)).squeeze(1)
        view = board.row_view(last, board.length + board.steps, board.accepted == board.steps + 1)
        self._model.hidden(view, self._pool)
