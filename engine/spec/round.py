"""One round, shared by every scheduler: draft → verify → accept → compact → publish.

Prefill travels in the same forward: a request's rows are the prompt tokens it still has to run, the last of which is
the root of its draft tree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.memory.pool import KVPool, Pages
from engine.model.llama import Llama
from engine.ops.base import View
from engine.ops.sampling import choose, coins
from engine.request import Request
from engine.spec.accept import accept, ancestor_mask
from engine.spec.base import Drafter, DraftTree
from engine.spec.logits import adjust, logprobs


@dataclass(frozen=True)
class Work:
    """A request's share of a round: run `take` of its pending tokens and, if those are all, draft `steps` deep."""

    request: Request
    take: int
    steps: int

    @property
    def completes(self) -> bool:
        """Whether the round chooses a token for this request."""
        return self.take == self.request.pending


@dataclass
class RoundStats:
    """Totals since the start. Times in seconds; `accepted_at[d]` counts rounds with exactly d accepted drafts."""

    rounds: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    prompt: int = 0
    rows: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    draft_s: float = 0.0
    forward_s: float = 0.0
    other_s: float = 0.0


class SpecRound:
    """Runs rounds for one model and one drafter."""

    def __init__(self, model: Llama, pool: KVPool, pages: Pages, drafter: Drafter) -> None:
        self._model, self._pool, self._pages, self._drafter = model, pool, pages, drafter
        self.stats = RoundStats()

    def run(self, work: Sequence[Work]) -> dict[int, list[int]]:
        """Tokens chosen for each completing request, by rid; -1 stands for a NaN in its logits. Sets `cached`."""
        began = time.perf_counter()
        ending = [w for w in work if w.completes]
        tree = self._drafter.propose(
            [w.request.rid for w in ending], [w.request.tokens[-1] for w in ending], [w.steps for w in ending]
        )
        drafted = time.perf_counter()
        view = self._view(work, tree)
        planned = time.perf_counter()
        with torch.inference_mode():
            logits = self._model.forward(view, self._pool)
            forwarded = time.perf_counter()
            nodes = len(tree.tokens)
            emitted = self._accept(ending, tree, logits[:nodes])
            _report_prompts(work, logits[nodes:])
        for w in work:
            w.request.cached += w.take if not w.completes else w.take - 1 + len(emitted[w.request.rid])
        stats = self.stats
        stats.rounds += 1
        stats.rows += len(view.tokens)
        stats.draft_s += drafted - began
        stats.forward_s += forwarded - planned
        stats.other_s += planned - drafted + time.perf_counter() - forwarded
        return emitted

    def _view(self, work: Sequence[Work], tree: DraftTree) -> View:
        tokens: list[np.ndarray] = []
        depths: list[np.ndarray] = []
        logit_rows: list[np.ndarray] = []
        prompt_rows: list[np.ndarray] = []
        lengths, node, row = np.empty(len(work), dtype=np.int64), 0, 0
        mask_start = np.full(len(work), -1, dtype=np.int64)
        mask, offsets = (None, None) if tree.chain else ancestor_mask(tree)
        for i, w in enumerate(work):
            request = w.request
            first, last = request.cached, request.cached + w.take - w.completes
            n = last - first
            if n:
                tokens.append(np.array(request.tokens[first:last], dtype=np.int64))
                depths.append(np.arange(n))
                self.stats.prompt += n
                if request.unreported:
                    at = _reported(w)
                    prompt_rows.append(row - first + np.arange(at.start, at.stop))
            if w.completes:
                nodes = slice(tree.start[node], tree.start[node + 1])
                tokens.append(tree.tokens[nodes])
                depths.append(n + tree.depth[nodes])
                count = nodes.stop - nodes.start
                logit_rows.append(np.arange(row + n, row + n + count))
                if offsets is not None:
                    # A tree hangs under a decoding request only, so its rows are exactly the tree's.
                    mask_start[i] = offsets[node] if count > 1 else -1
                node += 1
                n += count
            lengths[i] = n
            row += n
        row_start = np.concatenate(([0], np.cumsum(lengths)))
        context = np.array([w.request.cached for w in work], dtype=np.int64)
        rows = np.array([w.request.row for w in work], dtype=np.int64)
        every = np.repeat(np.arange(len(work)), lengths)
        logical = context[every] + np.arange(row) - row_start[every]
        return View(
            tokens=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy((context[every] + np.concatenate(depths)).astype(np.int32)),
            slots=torch.from_numpy(self._pages.slots(rows[every], logical)),
            page_table=self._pages.table,
            page_size=self._pages.page_size,
            table_row=torch.from_numpy(rows.astype(np.int32)),
            row_start=torch.from_numpy(row_start.astype(np.int32)),
            context=torch.from_numpy(context.astype(np.int32)),
            mask=None if mask is None else torch.from_numpy(mask),
            mask_start=torch.from_numpy(mask_start),
            # First the trees' nodes, then the prompt positions whose log-probabilities are wanted.
            logit_rows=torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *logit_rows, *prompt_rows])),
        )

    def _accept(self, ending: Sequence[Work], tree: DraftTree, logits: Tensor) -> dict[int, list[int]]:
        if not ending:
            return {}
        sizes = np.diff(tree.start)

        def per_node(values: Sequence[float], dtype: type) -> np.ndarray:
            return np.repeat(np.array(values, dtype=dtype), sizes)

        sampling = [w.request.sampling for w in ending]
        raw = self._adjust(ending, tree, logits)
        temperature = per_node([s.temperature for s in sampling], np.float64)
        if temperature.any():
            position = per_node([len(w.request.tokens) for w in ending], np.uint64) + tree.depth.astype(np.uint64)
            chosen = choose(
                self._model.ops,
                logits,
                temperature,
                per_node([s.top_k for s in sampling], np.int64),
                per_node([s.top_p for s in sampling], np.float64),
                coins(per_node([w.request.seed for w in ending], np.uint64), position),
                per_node([s.min_p for s in sampling], np.float64),
            )
        else:
            chosen = self._model.ops.argmax(logits).numpy()
        accepted = accept(tree, chosen)
        if not tree.chain:
            self._compact(ending, tree, accepted.path)
        lengths = accepted.length.tolist()
        self._count(ending, sizes, lengths)
        taken = chosen[np.maximum(accepted.path, 0)].tolist()
        emitted = {w.request.rid: taken[b][: lengths[b]] for b, w in enumerate(ending)}
        for b, w in enumerate(ending):
            top = w.request.sampling.logprobs
            if top is not None:
                path = torch.from_numpy(accepted.path[b, : lengths[b]])
                rows = logits[path] if b not in raw else raw[b][path - int(tree.start[b])]
                w.request.logprobs = logprobs(rows, emitted[w.request.rid], top)
        return emitted

    def _adjust(self, ending: Sequence[Work], tree: DraftTree, logits: Tensor) -> dict[int, Tensor]:
        """Apply penalties and biases in place; the rows as they were, by request, where they will be reported."""
        raw = {}
        for b, w in enumerate(ending):
            sampling = w.request.sampling
            if sampling.changes_logits:
                first, last = int(tree.start[b]), int(tree.start[b + 1])
                if sampling.logprobs is not None:
                    raw[b] = logits[first:last].clone()
                adjust(logits[first:last], tree.tokens[first:last], tree.parent[first:last] - first, w.request)
        return raw

    def _compact(self, ending: Sequence[Work], tree: DraftTree, path: np.ndarray) -> None:
        """Bring the accepted nodes' keys and values to the front, so that what follows may assume a chain."""
        request, depth = np.nonzero(path >= 0)
        local = path[request, depth] - tree.start[request]
        moved = local != depth
        request, depth, local = request[moved], depth[moved], local[moved]
        if not len(request):
            return
        rows = np.array([w.request.row for w in ending], dtype=np.int64)[request]
        base = np.array([w.request.cached + w.take - 1 for w in ending], dtype=np.int64)[request]
        source, target = self._pages.slots(rows, base + local), self._pages.slots(rows, base + depth)
        self._pool.move(torch.from_numpy(source), torch.from_numpy(target))

    def _count(self, ending: Sequence[Work], sizes: np.ndarray, lengths: Sequence[int]) -> None:
        stats = self.stats
        for w, size, length in zip(ending, sizes.tolist(), lengths, strict=True):
            if w.steps:
                stats.verify_steps += 1
                stats.drafted += size - 1
                stats.accepted += length - 1
                stats.accepted_at[length - 1] += 1


def _reported(work: Work) -> range:
    """Positions of this round whose rows tell the log-probability of the prompt token behind them."""
    request = work.request
    last = request.cached + work.take - work.completes
    return range(request.unreported.start - 1, min(last, request.unreported.stop - 1))


def _report_prompts(work: Sequence[Work], logits: Tensor) -> None:
    """Hand the rows of `logits` behind the trees' to the requests that asked for them."""
    row = 0
    for w in work:
        request = w.request
        top = request.sampling.prompt_logprobs
        if top is None or not request.unreported:
            continue
        at = _reported(w)
        ids = request.tokens[at.start + 1 : at.stop + 1]
        request.prompt_logprobs += logprobs(logits[row : row + len(at)], ids, top)
        row += len(at)
