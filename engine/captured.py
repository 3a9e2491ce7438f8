"""Forwards of the target that are replayed from graphs: decode and verify steps of whole batches.

A graph reads and writes the same memory each time. So a batch is copied into buffers of its bucket's size, each request
is given the same number of rows, and there are requests that do not exist: what is filled up writes to a page that
belongs to nobody. No row's mask is wider than its request's rows that exist, so that nothing is read that was not
written: a key under a mask weighs nothing, yet nothing times a NaN is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.graphs import GraphSet
from engine.memory.pool import KVPool
from engine.model.llama import Llama
from engine.ops.base import View, rows_of

PHASE = "verify"


@dataclass
class _Buffers:
    view: View
    hidden: Tensor | None = None
    features: Tensor | None = None


class Captured:
    """The target with batches of at most `rows` rows a request from graphs, and everything else eagerly."""

    def __init__(
        self, model: Llama, pool: KVPool, page_table: Tensor, page_size: int, rows: int, layers: tuple[int, ...]
    ) -> None:
        """`pool`: its last page is nobody's. `page_table`: as views have it. `layers`: whose outputs are wanted."""
        self._model, self._pool, self._rows, self._layers = model, pool, rows, layers
        requests, pages = page_table.shape
        nobody = torch.full((1, pages), pool.pages - 1, dtype=torch.int32)
        self._table = torch.cat((torch.zeros_like(page_table), nobody)).to(model.device)
        self._page_size, self._no_request = page_size, requests
        self._no_slot = (pool.pages - 1) * page_size
        self._buffers: dict[int, _Buffers] = {}
        self.graphs: GraphSet | None = None

    def work(self, phase: str, bucket: int) -> Callable[[], None]:
        """For a capturer: the forward of a batch of this size."""
        assert phase == PHASE, phase
        buffers = self._buffers.setdefault(bucket, _Buffers(self._empty(bucket)))

        def run() -> None:
            with torch.inference_mode():
                buffers.hidden, buffers.features = self._model.hidden(buffers.view, self._pool, self._layers)

        return run

    def hidden(self, view: View, pool: KVPool, layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """See `Llama.hidden`. What it gives is overwritten by the next call."""
        rows = view.row_start.diff().numpy()
        fits = layers == self._layers and view.mask_width is None and int(rows.max()) <= self._rows
        found = self.graphs.find(PHASE, len(rows), fits) if self.graphs is not None else None
        if found is None:
            return self._model.hidden(view, pool, layers)
        graph, bucket = found
        buffers = self._buffers[bucket]
        owner = np.repeat(np.arange(len(rows)), rows)
        at = owner * self._rows + np.arange(len(owner)) - view.row_start.numpy()[owner]
        self._fill(buffers.view, view, rows, at)
        graph.replay()
        assert buffers.hidden is not None
        assert buffers.features is not None
        if len(at) == len(rows) * self._rows:
            return buffers.hidden[: len(at)], buffers.features[: len(at)]
        return rows_of(buffers.hidden, at), rows_of(buffers.features, at)

    def _empty(self, bucket: int) -> View:
        n, device = self._rows, self._model.device

        def filled(size: int, value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return View(
            tokens=filled(bucket * n, 0, torch.int64),
            positions=filled(bucket * n, 0, torch.int32),
            slots=filled(bucket * n, self._no_slot, torch.int64),
            page_table=self._table,
            page_size=self._page_size,
            table_row=filled(bucket, self._no_request, torch.int32),
            row_start=torch.arange(0, bucket * n + 1, n, dtype=torch.int32, device=device),
            context=filled(bucket, 0, torch.int32),
            mask=filled(bucket * n * n, 1, torch.uint8) if n > 1 else None,
            mask_width=filled(bucket, 1, torch.int32) if n > 1 else None,
            mask_start=torch.arange(0, bucket * n * n, n * n, device=device)
            if n > 1
            else filled(bucket, -1, torch.int64),
            logit_rows=filled(0, 0, torch.int64),
        )

    def _fill(self, to: View, view: View, rows: np.ndarray, at: np.ndarray) -> None:
        """Bring a batch to the buffers: request b's rows first among its `self._rows`, the others without effect."""
        self._table[:-1].copy_(view.page_table, non_blocking=True)
        for name, where, nothing in (
            ("tokens", at, 0),
            ("positions", at, 0),
            ("slots", at, self._no_slot),
            ("table_row", np.arange(len(rows)), self._no_request),
            ("context", np.arange(len(rows)), 0),
        ):
            target, given = getattr(to, name), getattr(view, name).numpy()
            whole = np.full(len(target), nothing, dtype=given.dtype)
            whole[where] = given
            _send(target, whole)
        if to.mask is not None:
            masks, widths = self._masks(view, rows, len(to.table_row))
            _send(to.mask, masks.reshape(-1))
            assert to.mask_width is not None
            _send(to.mask_width, widths)

    def _masks(self, view: View, rows: np.ndarray, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Who sees whom: masks, uint8 [bucket, rows * rows], each [rows, width] and then nothing; widths, int32.

        A row that does not exist sees the first of its request, as does the one of a request that does not exist.
        """
        n = self._rows
        widths = np.ones(bucket, dtype=np.int32)
        widths[: len(rows)] = rows
        masks = np.zeros((bucket, n * n), dtype=np.uint8)
        for b, width in enumerate(widths.tolist()):
            mask = masks[b, : n * width].reshape(n, width)
            mask[:, 0] = 1
            mask[:width] = np.tri(width, dtype=np.uint8)
        if view.mask is not None:
            given, starts = view.mask.numpy(), view.mask_start.numpy()
            for b in np.flatnonzero(starts >= 0).tolist():
                size = int(rows[b]) ** 2
                masks[b, :size] = given[starts[b] : starts[b] + size]
        return masks, widths


def _send(target: Tensor, values: np.ndarray) -> None:
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
