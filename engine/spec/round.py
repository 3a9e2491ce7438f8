"""One round, shared by every scheduler: draft → verify → accept → compact → observe.

Prefill travels in the same forward: a request's rows are the prompt tokens it still has to run, the last of which is
the root of its draft tree. A decoding request's length and bonus token stand in arrays by its row, where the previous
round has left them, so that a round can be planned before the one before it has ended.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.config import DraftShape
from engine.ipc.messages import TokenLogprob
from engine.memory.pool import KVPool, Pages
from engine.model.llama import Llama
from engine.ops.base import View, rows_of, sent
from engine.ops.rejection import keep_or_sample, probabilities
from engine.ops.sampling import KEEP_STREAM, REST_STREAM, coins
from engine.request import Request
from engine.spec.accept import Accepted, accept, ancestor_mask
from engine.spec.base import Asked, Drafter, DraftTree, Seen, only_roots
from engine.spec.logits import adjust, forbid_ends, logprobs


@dataclass(frozen=True)
class Work:
    """A request's share of a round: tokens of its prompt, or one decode step.

    Attributes:
        request: of which a round reads only what never changes while it runs (id, row, seed, sampling, end tokens).
        prompt: tokens to run, the first at position `first`; empty for a decode step.
        following: the prompt token after these; None when the round chooses the next token.
        steps: draft depth, 0 while a prompt is run.
        report: positions of this round whose rows tell the log-probability of the prompt token behind them.
    """

    request: Request
    prompt: Sequence[int] = ()
    first: int = -1
    following: int | None = None
    steps: int = 0
    report: range = range(0)


@dataclass(frozen=True)
class RoundResult:
    """By request id: tokens chosen (-1 stands for a NaN in the logits), and log-probabilities where asked for.

    `silent`: requests whose drafts say nothing about whether the drafter works.
    """

    emitted: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprob]]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    silent: frozenset[int]


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
    extend_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True)
class _Layout:
    """The rows of a forward: of each request its prompt rows, then its tree's nodes.

    B requests, E of them choosing a token ("ending"); T rows, N nodes.
    """

    rows: np.ndarray  # [B] in the page table
    context: np.ndarray  # [B]
    prompts: np.ndarray  # [B] prompt rows, a root that is a prompt's last token not counted
    ending: np.ndarray  # bool [B]
    row_start: np.ndarray  # [B + 1]
    tokens: np.ndarray  # [T]
    is_prompt: np.ndarray  # bool [T]
    nodes: np.ndarray  # [N] rows of the nodes


@dataclass(frozen=True)
class _Verified:
    """What the target says of B requests' trees of N nodes in T rows."""

    layout: _Layout
    features: Tensor  # [T, F]
    logits: Tensor  # [N, V], adjusted
    raw: dict[int, Tensor]  # by request: its logits before that, where they will be reported
    prompt_logprobs: dict[int, list[TokenLogprob]]
    chosen: np.ndarray  # int64 [N], -1 for a NaN
    accepted: Accepted
    taken: np.ndarray  # int64 [B, longest], the tokens chosen along each accepted path
    forward_s: float

    @property
    def broken(self) -> bool:
        """Whether a token that would be emitted is a NaN."""
        return bool((self.taken[self.accepted.path >= 0] < 0).any())


class SpecRound:
    """Runs rounds for one model and one drafter."""

    def __init__(self, model: Llama, pool: KVPool, pages: Pages, drafter: Drafter) -> None:
        self._model, self._pool, self._pages, self.drafter = model, pool, pages, drafter
        self._length = np.zeros(pages.rows, dtype=np.int64)
        self._bonus = np.zeros(pages.rows, dtype=np.int64)
        self.rejection = False
        self.stats = RoundStats()

    def launch(self, work: Sequence[Work], shape: DraftShape) -> Callable[[], RoundResult]:
        """Run it, or have it run; what it gives waits for the outcome, and may be called from another thread."""
        result = self.run(work, shape)
        return lambda: result

    def run(self, work: Sequence[Work], shape: DraftShape) -> RoundResult:
        """Run it. With penalties, `request.tokens` must hold all that earlier rounds emitted."""
        began = time.perf_counter()
        with torch.inference_mode():
            asked, known = self._ask(work, shape)
            tree = self.drafter.propose(asked)
            drafted = time.perf_counter()
            verified = self._verify(work, known, asked, tree)
            if len(tree.tokens) > len(asked.rids) and verified.broken:
                # A draft may have spoilt what was computed beside it: nothing times NaN is NaN. By itself it counts.
                tree = only_roots(asked.roots)
                verified = self._verify(work, known, asked, tree)
            accepted, taken = verified.accepted, verified.taken
            if not tree.chain:
                self._compact(asked, tree, accepted.path)
            lengths = accepted.length.tolist()
            emitted = [line[:n] for line, n in zip(taken.tolist(), lengths, strict=True)]
            told = _report(work, tree, accepted, emitted, verified.logits, verified.raw)
            self._length[asked.rows] = asked.lengths + accepted.length
            self._bonus[asked.rows] = np.maximum(taken[np.arange(len(lengths)), accepted.length - 1], 0)
            observing = time.perf_counter()
            if self.drafter.observes:
                self.drafter.observe(self._seen(work, verified, emitted, shape))
        ended = time.perf_counter()
        stats = self.stats
        stats.rounds += 1
        stats.rows += len(verified.layout.tokens)
        stats.prompt += sum(len(w.prompt) for w in work)
        stats.draft_s += drafted - began
        stats.forward_s += verified.forward_s
        stats.extend_s += ended - observing
        stats.other_s += observing - drafted - verified.forward_s
        self._count(asked.steps, np.diff(tree.start), accepted.length)
        silent = () if tree.silent is None else np.flatnonzero(tree.silent).tolist()
        return RoundResult(
            dict(zip(asked.rids, emitted, strict=True)),
            told,
            verified.prompt_logprobs,
            frozenset(asked.rids[i] for i in silent),
        )

    def _verify(self, work: Sequence[Work], known: _Layout, asked: Asked, tree: DraftTree) -> _Verified:
        """Run the rows through the target and walk the trees along the tokens that it chooses."""
        layout = self._lay_out(known, work, tree)
        view = self._view(work, layout, asked, tree)
        began = time.perf_counter()
        hidden, features = self._model.hidden(view, self._pool, self.drafter.features)
        logits = self._model.logits(rows_of(hidden, view.logit_rows))
        forward_s = time.perf_counter() - began
        if not _greedy(work):
            logits = logits.cpu()  # what else may be asked of them is written for the host
        prompt_logprobs = _report_prompts(work, logits[len(tree.tokens) :])
        logits = logits[: len(tree.tokens)]
        raw = _adjust(work, tree, asked.lengths, logits)
        chosen = self._agreed(work, tree, asked.lengths, logits)
        accepted = accept(tree, chosen)
        taken = chosen[np.maximum(accepted.path, 0)]
        return _Verified(layout, features, logits, raw, prompt_logprobs, chosen, accepted, taken, forward_s)

    def _ask(self, work: Sequence[Work], shape: DraftShape) -> tuple[Asked, _Layout]:
        """Who wants drafts, and the part of the layout that is known without them."""
        count = len(work)
        rows = np.fromiter((w.request.row for w in work), dtype=np.int64, count=count)
        ending = np.fromiter((w.following is None for w in work), dtype=bool, count=count)
        sizes = np.fromiter((len(w.prompt) for w in work), dtype=np.int64, count=count)
        first = np.fromiter((w.first for w in work), dtype=np.int64, count=count)
        decoding = sizes == 0
        context = np.where(decoding, self._length[rows], first)
        prompts = np.where(ending & ~decoding, sizes - 1, sizes)
        roots = self._bonus[rows]
        for i in np.flatnonzero(ending & ~decoding).tolist():
            roots[i] = work[i].prompt[-1]
        steps = np.fromiter((w.steps for w in work), dtype=np.int64, count=count)
        rids = [w.request.rid for w in work if w.following is None]
        requests = [w.request for w in work if w.following is None]
        hot = [r.sampling.temperature if self.rejection and r.sampling.top_k != 1 else 0.0 for r in requests]
        asked = Asked(
            rids,
            rows[ending],
            (context + prompts)[ending],
            roots[ending],
            steps[ending],
            shape,
            np.array(hot, dtype=np.float64),
            np.array([r.seed for r in requests], dtype=np.uint64),
        )
        nothing = np.empty(0, dtype=np.int64)
        return asked, _Layout(rows, context, prompts, ending, nothing, nothing, nothing, nothing)

    def _lay_out(self, known: _Layout, work: Sequence[Work], tree: DraftTree) -> _Layout:
        nodes = np.zeros(len(work), dtype=np.int64)
        nodes[known.ending] = np.diff(tree.start)
        total = known.prompts + nodes
        row_start = np.concatenate(([0], np.cumsum(total)))
        every = np.repeat(np.arange(len(work)), total)
        is_prompt = np.arange(row_start[-1]) - row_start[every] < known.prompts[every]
        tokens = np.empty(row_start[-1], dtype=np.int64)
        parts = [w.prompt[:n] for w, n in zip(work, known.prompts.tolist(), strict=True) if n]
        if parts:
            tokens[is_prompt] = np.concatenate([np.array(part, dtype=np.int64) for part in parts])
        tokens[~is_prompt] = tree.tokens
        return _Layout(
            known.rows,
            known.context,
            known.prompts,
            known.ending,
            row_start,
            tokens,
            is_prompt,
            np.flatnonzero(~is_prompt),
        )

    def _view(self, work: Sequence[Work], layout: _Layout, asked: Asked, tree: DraftTree) -> View:
        requests = len(layout.rows)
        every = np.repeat(np.arange(requests), np.diff(layout.row_start))
        local = np.arange(len(layout.tokens)) - layout.row_start[every]
        logical = layout.context[every] + local
        positions = logical.copy()
        positions[layout.nodes] = np.repeat(asked.lengths, np.diff(tree.start)) + tree.depth
        mask, mask_start = None, np.full(requests, -1, dtype=np.int64)
        if not tree.chain:
            # A tree hangs under a decoding request only, so its rows are exactly the tree's.
            mask, offsets = ancestor_mask(tree)
            mask_start[layout.ending] = np.where(np.diff(tree.start) > 1, offsets, -1)
        return View(
            tokens=torch.from_numpy(layout.tokens),
            positions=torch.from_numpy(positions.astype(np.int32)),
            slots=torch.from_numpy(self._pages.slots(layout.rows[every], logical)),
            page_table=self._pages.table,
            page_size=self._pages.page_size,
            table_row=torch.from_numpy(layout.rows.astype(np.int32)),
            row_start=torch.from_numpy(layout.row_start.astype(np.int32)),
            context=torch.from_numpy(layout.context.astype(np.int32)),
            mask=None if mask is None else torch.from_numpy(mask),
            mask_start=torch.from_numpy(mask_start),
            # First the trees' nodes, then the prompt positions whose log-probabilities are wanted.
            logit_rows=torch.from_numpy(np.concatenate((layout.nodes, *_reported(work, layout)))),
        )

    def _agreed(self, work: Sequence[Work], tree: DraftTree, lengths: np.ndarray, logits: Tensor) -> np.ndarray:
        """The target's token at every node as rank 0 chooses it, int64 [N]; every rank must have the same tree."""
        group = self._model.group
        mine = np.empty(len(tree.tokens), dtype=np.int64)
        if group.rank == 0:
            mine = self._choose(work, tree, lengths, logits)
        if group.ranks == 1:
            return mine
        drafted = zlib.crc32(tree.tokens.tobytes() + tree.parent.tobytes())
        return group.agree(mine, np.array([self.stats.rounds, drafted]))

    def _choose(self, work: Sequence[Work], tree: DraftTree, lengths: np.ndarray, logits: Tensor) -> np.ndarray:
        """The target's token at every node, int64 [N]."""
        ending = [w.request for w in work if w.following is None]
        if not any(request.sampling.temperature for request in ending):
            return self._model.ops.argmax(logits).cpu().numpy()
        sizes = np.diff(tree.start)

        def per_node(values: Sequence[float], dtype: type) -> np.ndarray:
            return np.repeat(np.array(values, dtype=dtype), sizes)

        sampling = [request.sampling for request in ending]
        position = (np.repeat(lengths + 1, sizes) + tree.depth).astype(np.uint64)
        seeds = per_node([request.seed for request in ending], np.uint64)
        temperature = per_node([s.temperature for s in sampling], np.float64)
        top_k = per_node([s.top_k for s in sampling], np.int64)
        top_p = per_node([s.top_p for s in sampling], np.float64)
        min_p = per_node([s.min_p for s in sampling], np.float64)
        coin = coins(seeds, position)
        chosen = self._model.ops.choose(logits, temperature, top_k, top_p, coin, min_p)
        for proposal in tree.proposals:
            above = tree.parent[proposal.nodes]
            sound = chosen[above] >= 0
            above, nodes = above[sound], proposal.nodes[sound]
            p = probabilities(
                logits[torch.from_numpy(above)], temperature[above], top_k[above], top_p[above], min_p[above]
            )
            keep, rest = (coins(seeds[above] ^ stream, position[above]) for stream in (KEEP_STREAM, REST_STREAM))
            q = proposal.q[torch.from_numpy(sound)]
            chosen[above] = keep_or_sample(p, q, proposal.hot, tree.tokens[nodes], keep, rest)
        return chosen

    def _compact(self, asked: Asked, tree: DraftTree, path: np.ndarray) -> None:
        """Bring the accepted nodes' keys and values to the front, so that what follows may assume a chain."""
        request, depth = np.nonzero(path >= 0)
        local = path[request, depth] - tree.start[request]
        moved = local != depth
        request, depth, local = request[moved], depth[moved], local[moved]
        if not len(request):
            return
        rows, base = asked.rows[request], asked.lengths[request]
        source, target = self._pages.slots(rows, base + local), self._pages.slots(rows, base + depth)
        self._pool.move(*(sent(slots, self._model.device) for slots in (source, target)))

    def _seen(
        self, work: Sequence[Work], verified: _Verified, emitted: Sequence[Sequence[int]], shape: DraftShape
    ) -> Seen:
        """The committed rows of every request: its prompt's, then its accepted path's."""
        layout, accepted, chosen, features = verified.layout, verified.accepted, verified.chosen, verified.features
        counts = layout.prompts.copy()
        counts[layout.ending] += accepted.length
        start = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(work)), counts)
        from_prompt = np.arange(start[-1]) - start[owner] < layout.prompts[owner]
        path = accepted.path[accepted.path >= 0]
        index = np.empty(start[-1], dtype=np.int64)
        index[from_prompt] = np.flatnonzero(layout.is_prompt)
        index[~from_prompt] = layout.nodes[path]
        following = layout.tokens[np.minimum(index + 1, len(layout.tokens) - 1)]
        following[~from_prompt] = np.maximum(chosen[path], 0)
        for i in np.flatnonzero(~layout.ending).tolist():
            token = work[i].following
            assert token is not None
            following[start[i + 1] - 1] = token
        # Where nothing is left out, indexing would only copy.
        in_order = not self.drafter.features or bool(np.array_equal(index, np.arange(len(features))))
        lines = iter(emitted)
        return Seen(
            rids=[w.request.rid for w in work],
            rows=layout.rows,
            first=layout.context,
            start=start,
            tokens=layout.tokens[index],
            following=following,
            features=features if in_order else rows_of(features, index),
            emitted=[next(lines) if w.following is None else () for w in work],
            speculating=shape.num_steps > 0,
        )

    def _count(self, steps: np.ndarray, sizes: np.ndarray, lengths: np.ndarray) -> None:
        if not steps.any():
            return
        stats, speculated = self.stats, steps > 0
        accepted = lengths[speculated] - 1
        stats.verify_steps += len(accepted)
        stats.drafted += int(sizes[speculated].sum()) - len(accepted)
        stats.accepted += int(accepted.sum())
        stats.accepted_at.update(accepted.tolist())


def _greedy(work: Sequence[Work]) -> bool:
    """Whether all that is wanted of the logits is where they are largest."""
    sampling = [w.request.sampling for w in work if w.following is None]
    plain = all(
        s.temperature == 0 and not s.changes_logits and not s.min_tokens and s.logprobs is None for s in sampling
    )
    return plain and not any(w.report for w in work)


def _reported(work: Sequence[Work], layout: _Layout) -> list[np.ndarray]:
    """Rows of the forward that tell prompt log-probabilities, request by request."""
    starts = layout.row_start.tolist()
    return [
        np.arange(w.report.start, w.report.stop) - w.first + start
        for w, start in zip(work, starts[:-1], strict=True)
        if w.report
    ]


def _report_prompts(work: Sequence[Work], logits: Tensor) -> dict[int, list[TokenLogprob]]:
    """From the rows of `_reported`."""
    row, found = 0, {}
    for w in work:
        top = w.request.sampling.prompt_logprobs
        if w.report and top is not None:
            n = len(w.report)
            ids = w.request.tokens[w.report.start + 1 : w.report.stop + 1]
            found[w.request.rid] = logprobs(logits[row : row + n], ids, top)
            row += n
    return found


def _adjust(work: Sequence[Work], tree: DraftTree, lengths: np.ndarray, logits: Tensor) -> dict[int, Tensor]:
    """Apply penalties, biases and the least length in place; the rows as they were, by request, where they will be
    reported. `lengths` [B]: where the roots stand."""
    raw = {}
    for b, request in enumerate(w.request for w in work if w.following is None):
        said = int(lengths[b]) + 1 - request.prompt_len
        short = said < request.sampling.min_tokens and bool(request.stop_ids)
        if not (short or request.sampling.changes_logits):
            continue
        nodes = slice(int(tree.start[b]), int(tree.start[b + 1]))
        if request.sampling.logprobs is not None:
            raw[request.rid] = logits[nodes].clone()
        if request.sampling.changes_logits:
            adjust(logits[nodes], tree.tokens[nodes], tree.parent[nodes] - nodes.start, request)
        if short:
            forbid_ends(logits[nodes], tree.depth[nodes], request, said)
    return raw


def _report(
    work: Sequence[Work],
    tree: DraftTree,
    accepted: Accepted,
    emitted: Sequence[Sequence[int]],
    logits: Tensor,
    raw: dict[int, Tensor],
) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of what was emitted, for the requests that asked for them."""
    found = {}
    for b, request in enumerate(w.request for w in work if w.following is None):
        top = request.sampling.logprobs
        if top is not None:
            path = torch.from_numpy(accepted.path[b, : len(emitted[b])])
            rows = raw[request.rid][path - int(tree.start[b])] if request.rid in raw else logits[path]
            found[request.rid] = logprobs(rows, emitted[b], top)
    return found
