"""Rounds of decoding requests that stay on the device: only what was emitted comes back, in one copy.

Everything of a round is queued there before its outcome is known to anybody, and a request's next round begins with
what the one before has left there; so another round can be queued behind it. The host waits once a round, for the copy
of what was emitted. Prompts, and requests that want something of their logits, are the host's (`engine.spec.round`), in
a forward of their own behind the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import DraftShape
from engine.device import Device
from engine.errors import RanksDisagree
from engine.memory.pool import KVPool, Pages
from engine.model.llama import Llama
from engine.ops import sampling
from engine.ops.base import DeviceOps, sent
from engine.spec.base import Drafter, Resident
from engine.spec.board import TOLD, Board
from engine.spec.phases import ACCEPT, DRAFT, EXTEND, VERIFY, Phases, phases_of
from engine.spec.round import RoundResult, SpecRound, Work


@dataclass
class _Flight:
    """A round whose outcome is on its way. `result` is filled in when it has come.

    `marks`: where it began, had drafted, verified, accepted, and taken in what was accepted.
    """

    work: Sequence[Work]
    rows: np.ndarray
    steps: np.ndarray
    fetch: Callable[[], np.ndarray]
    marks: Sequence[Any]
    silent: frozenset[int]
    result: RoundResult | None = None


class DeviceRound(SpecRound):
    """Runs rounds for one model on a device, and one drafter."""

    def __init__(
        self, model: Llama, ops: DeviceOps, pool: KVPool, pages: Pages, drafter: Drafter, phases: Phases, device: Device
    ) -> None:
        super().__init__(model, pool, pages, drafter)
        self._ops, self._phases, self._device = ops, phases, device
        self._flying: deque[_Flight] = deque()
        self._taken_in: tuple[Any, Any] | None = None  # marks of a settled round that the device may not have passed

    def launch(self, work: Sequence[Work], shape: DraftShape) -> Callable[[], RoundResult]:
        """See `SpecRound.launch`. Several rounds may be on their way; they are settled in their order."""
        resident = self.drafter.resident
        stays = [resident is not None and self._stays(w, shape, resident) for w in work]
        device = [w for w, here in zip(work, stays, strict=True) if here]
        host = [w for w, here in zip(work, stays, strict=True) if not here]
        flight = None
        if resident is not None and device:
            if resident.looks_up and shape.num_steps:
                self._settle(None)  # what is looked up is looked up behind the newest tokens
            with torch.inference_mode():
                flight = self._queue(device, shape, resident)
        told = RoundResult({}, {}, {}, frozenset())
        if host:
            if any(w.request.row in known.rows for known in self._flying for w in host):
                self._settle(None)
            told = self.run(host, shape)
        if flight is None:
            return lambda: told
        self._flying.append(flight)
        return partial(self._outcome, flight, told)

    def _outcome(self, flight: _Flight, host: RoundResult) -> RoundResult:
        self._settle(flight)
        assert flight.result is not None
        told = flight.result
        return RoundResult(host.emitted | told.emitted, host.logprobs, host.prompt_logprobs, host.silent | told.silent)

    def _stays(self, w: Work, shape: DraftShape, resident: Resident) -> bool:
        """Whether nothing of it is the host's."""
        asked = w.request.sampling
        said = len(w.request.tokens) - w.request.prompt_len
        short = said < asked.min_tokens and bool(w.request.stop_ids)
        if w.prompt or short or asked.changes_logits or asked.logprobs is not None:
            return False
        # Sampled drafts are kept or replaced by the host.
        return not (self.rejection and shape.num_steps and resident.drafts and asked.temperature > 0)

    def _queue(self, work: Sequence[Work], shape: DraftShape, resident: Resident) -> _Flight:
        marks = [self._device.mark()]
        drafter, count = self.drafter, len(work)
        parts = phases_of(drafter, shape)
        board = self._phases.board(drafter, count, shape)
        rows = np.fromiter((w.request.row for w in work), dtype=np.int64, count=count)
        steps = np.fromiter((w.steps for w in work), dtype=np.int64, count=count)
        flying = np.concatenate([flight.rows for flight in self._flying]) if self._flying else rows[:0]
        given: dict[str, np.ndarray] = {
            "row": rows,
            "known": ~np.isin(rows, flying),
            "length": self._length[rows],
            "root": self._bonus[rows],
            "steps": steps,
            "seed": np.array([w.request.seed for w in work], dtype=np.uint64).view(np.int64),
            "found": np.zeros(count, dtype=np.int64),
            "looked_up": np.zeros((count, shape.num_steps), dtype=np.int64),
        }
        if resident.looks_up:
            for i, drafts in enumerate(resident.look_up([w.request.rid for w in work], steps.tolist())):
                given["found"][i] = len(drafts)
                given["looked_up"][i, : len(drafts)] = drafts
            if shape.second_steps < shape.num_steps:
                given["steps"] = np.where(given["found"] > 0, steps, np.minimum(steps, shape.second_steps))
        board.fill(given, self._pages.table.numpy()[rows], self._phases.standing)
        if DRAFT in parts:
            self._phases.run(DRAFT, drafter, board)
        else:
            board.chain(board.looked_up, 1 + board.found)
        marks.append(self._device.mark())
        self._phases.run(VERIFY, drafter, board)
        marks.append(self._device.mark())
        if any(w.request.sampling.temperature for w in work):
            logits = self._model.logits(board.hidden)
            self._phases.settle(board, self._sampled(work, board, logits))
        else:
            self._phases.run(ACCEPT, drafter, board)
        fetch = self._device.later(board.told[:count].clone())  # the next round may write there before it is copied
        marks.append(self._device.mark())
        if EXTEND in parts:
            self._phases.run(EXTEND, drafter, board)
        marks.append(self._device.mark())
        self.stats.rounds += 1
        self.stats.rows += count * board.rows
        found = np.flatnonzero(given["found"]).tolist() if resident.found_is_silent else ()
        return _Flight(work, rows, steps, fetch, marks, frozenset(work[i].request.rid for i in found))

    def _sampled(self, work: Sequence[Work], board: Board, logits: Tensor) -> Tensor:
        """The target's token at every node, int64 [R N], by the coins of the requests that want them."""
        chosen = self._ops.argmax(logits)
        asked = [w.request.sampling for w in work]
        hot = np.array([s.temperature > 0 and s.top_k != 1 for s in asked])
        cut = np.array([0 < s.top_k < logits.shape[1] or s.top_p < 1.0 for s in asked])
        n, device = board.rows, logits.device
        positions = (board.length.unsqueeze(1) + 1 + board.depth).reshape(-1)
        coin = sampling.coins_of(board.seed.repeat_interleave(n), positions)
        for kind in (hot & ~cut, hot & cut):  # each by itself: a row is chosen alike whatever else is in the batch
            which = np.flatnonzero(kind)
            if not len(which):
                continue
            nodes = (which[:, None] * n + np.arange(n)).reshape(-1)

            def per_node(name: str, dtype: type, which: np.ndarray = which) -> Tensor:
                return sent(np.repeat(np.array([getattr(asked[i], name) for i in which], dtype=dtype), n), device)

            at = sent(nodes, device)
            mine, flips = logits.index_select(0, at), coin.index_select(0, at)
            heat = per_node("temperature", np.float64)
            if any(asked[i].min_p for i in which):
                mine = sampling.without_unlikely(mine, heat, per_node("min_p", np.float64))
            if cut[which].any():
                limits = (per_node("top_k", np.int64), per_node("top_p", np.float64))
                picked = sampling.sample_cut(mine, heat, *limits, flips)
            else:
                picked = self._ops.sample(mine, heat, flips)
            sound = chosen.index_select(0, at) >= 0
            chosen = chosen.index_copy(0, at, torch.where(sound, picked, -1))
        return chosen

    def _settle(self, last: _Flight | None) -> None:
        """Wait for rounds on their way, in their order, up to this one, or for all."""
        spoilt: set[int] = set()
        while self._flying and (spoilt or last is None or last.result is None):
            flight = self._flying.popleft()
            told = flight.fetch()
            self._time(flight.marks)
            if told[:, 3].any():
                raise RanksDisagree(
                    f"rank {self._model.group.rank} has other draft tokens than rank 0: they do not compute the same "
                    "any more"
                )
            rows, sizes, accepted = flight.rows.tolist(), told[:, 2], told[:, 1].copy()
            emitted = [line[TOLD : TOLD + n] for line, n in zip(told.tolist(), accepted.tolist(), strict=True)]
            broken = [-1 in line and size > 1 for line, size in zip(emitted, sizes.tolist(), strict=True)]
            again = np.array([bad or row in spoilt for bad, row in zip(broken, rows, strict=True)])
            accepted[again] = 1
            self._count(flight.steps, sizes, accepted)
            sound = np.flatnonzero(~again)
            self._length[flight.rows[sound]] = told[sound, 0]
            self._bonus[flight.rows[sound]] = [max(emitted[i][-1], 0) for i in sound.tolist()]
            rids = [w.request.rid for w in flight.work]
            if self.drafter.resident is not None:
                self.drafter.resident.hear([rids[i] for i in sound], [emitted[i] for i in sound])
            found = dict(zip(rids, emitted, strict=True))
            if again.any():
                # A draft has spoilt what was computed beside it (see `SpecRound.run`), and what was queued behind that.
                spoilt |= set(flight.rows[again].tolist())
                work = [replace(w, steps=0) for w, bad in zip(flight.work, again.tolist(), strict=True) if bad]
                found |= self.run(work, DraftShape()).emitted
            flight.result = RoundResult(found, {}, {}, flight.silent)

    def _time(self, marks: Sequence[Any]) -> None:
        """Of a round whose outcome has come. The last mark is read with the next round's."""
        seconds, stats = self._device.seconds, self.stats
        began, drafted, verified, accepted, ended = marks
        stats.draft_s += seconds(began, drafted)
        stats.forward_s += seconds(drafted, verified)
        if self._taken_in is not None:
            stats.extend_s += seconds(*self._taken_in)
        self._taken_in = (accepted, ended)
