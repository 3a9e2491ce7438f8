"""Who runs in the next round: continuous batching with chunked prefill, waiting, and preemption by recompute.

With overlap ("v2") a round is planned and launched before the one before it has ended, whose tokens are handled while
it runs: the host's view of a decoding request is then one round old. What depends on the true length stands in the
round's own arrays (see `engine.spec.round`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.config import DraftShape
from engine.ipc.messages import Submit, TokenLogprob, TokenUpdate
from engine.memory.pool import Pages
from engine.memory.prefix import PrefixCache
from engine.request import Request
from engine.scheduler.lane import InlineLane, Lane, Ticket
from engine.spec.alarm import AcceptanceAlarm
from engine.spec.base import Drafter
from engine.spec.gate import SpecGate
from engine.spec.round import RoundResult, SpecRound, Work


@dataclass(frozen=True)
class _Flight:
    """A round that has been launched."""

    work: Sequence[Work]
    ticket: Ticket[Callable[[], RoundResult]]


class Scheduler:
    """Admits requests in order of arrival and runs rounds over all that run.

    Pages are given round by round. When they run out, the youngest request gives its pages back and starts again
    later from its tokens: what it emits stays the same, since a token depends on its prefix and its coin alone. Those
    that run are always older than those that wait, so the oldest goes on whatever comes, and nobody starves.
    """

    def __init__(
        self,
        round_: SpecRound,
        pages: Pages,
        prefix: PrefixCache,
        gate: SpecGate,
        *,
        max_running: int,
        prefill_tokens: int,
        seed: int,
    ) -> None:
        self._round, self._pages, self._prefix, self.gate = round_, pages, prefix, gate
        self._lane: Lane = InlineLane()
        self._flight: _Flight | None = None
        self._chores: list[Callable[[], None]] = []  # for the drafter, which only the lane touches: before a round
        self._limbo: list[int] = []  # rows of ended requests that the round in flight still uses
        self._max_running, self._prefill_tokens = max_running, prefill_tokens
        self._seed = seed
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, Request] = {}
        self.alarm = AcceptanceAlarm()
        self.preemptions = 0
        self.finished = 0
        self.started = 0
        self.queued_s = 0.0

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._running or self._waiting or self._flight)

    @property
    def overlapping(self) -> bool:
        """Whether rounds run on a lane of their own."""
        return self._lane.overlaps

    @property
    def lane_idle_s(self) -> float:
        """Seconds in which a lane of its own had nothing to do."""
        return self._lane.idle_s

    def submit(self, message: Submit) -> TokenUpdate | None:
        """Queue a request; an update is returned at once when it can never run."""
        sampling, prompt = message.sampling, list(message.prompt_ids)
        most = len(prompt) + sampling.max_tokens
        pages = -(-most // self._pages.page_size)
        if pages > self._pages.total:
            return TokenUpdate(
                message.rid,
                (),
                "error",
                f"prompt and max_tokens need {most} tokens of cache; the server has "
                f"{self._pages.total * self._pages.page_size}",
            )
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, message.rid))
        stop_ids = frozenset(() if sampling.ignore_eos else sampling.stop_token_ids)
        request = Request(message.rid, prompt, len(prompt), sampling, seed % 2**64, stop_ids)
        self._waiting[message.rid] = request
        return None

    def abort(self, rid: int) -> None:
        """Forget a request, wherever it is. Unknown ids are ignored: its end may have crossed the abort."""
        request = self._running.pop(rid, None)
        if request is not None:
            self._release(request)
        self._waiting.pop(rid, None)

    def step(self) -> tuple[TokenUpdate, ...]:
        """Plan and run one round; what was emitted, with overlap by the round before it."""
        if not self.overlapping:
            launched = self._launch()
            return self._commit(launched) if launched else ()
        before = self._flight
        launched = self._launch()
        if launched is None and before is not None:  # nothing to add, or no pages for it: land first
            return self.land()
        self._flight = launched
        if before is None:
            return ()
        limbo, self._limbo = self._limbo, []  # ended with the round before `before`: no round uses them any more
        updates = self._commit(before)
        self._close(limbo)
        return updates

    def land(self) -> tuple[TokenUpdate, ...]:
        """Wait for the round in flight, if there is one; what it emitted. Nothing is in flight afterwards."""
        before, self._flight = self._flight, None
        updates = self._commit(before) if before is not None else ()
        limbo, self._limbo = self._limbo, []
        self._close(limbo)
        return updates

    def use_lane(self, lane: Lane) -> None:
        """Run rounds there from now on. Call `land` first."""
        assert self._flight is None
        self._lane.close()
        self._lane = lane

    def use_drafter(self, drafter: Drafter) -> None:
        """Draft with another one. Running requests are taken back and run again, so that it sees all their tokens.

        Call `land` first.
        """
        assert self._flight is None
        for request in reversed(list(self._running.values())):
            self._take_back(request)
        for chore in self._chores:
            chore()
        self._chores = []
        self._prefix.flush()
        self._prefix.lookahead = drafter.lookahead
        self._round.drafter = drafter

    def check(self) -> None:
        """free + cached + used = total, and when idle nothing is used. Raises AssertionError otherwise."""
        self._pages.check()
        self._prefix.check()
        if not self.busy:
            assert self._pages.used == 0, f"{self._pages.used} pages leaked"

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running and self._pages.rows_free:
            request = next(iter(self._waiting.values()))
            # Log-probabilities need every position to be run.
            shared = [] if request.unreported else self._prefix.match(request.tokens)
            need = -(-(len(request.tokens) + 1) // self._pages.page_size) - len(shared)
            available = self._pages.available - sum(not self._pages.in_use(page) for page in shared)
            # One page in hand for each running request, or it would be preempted again at once.
            if self._running and need + len(self._running) > available:
                return
            del self._waiting[request.rid]
            request.row = self._pages.open_row()
            request.cached = self._prefix.attach(request.row, request.tokens, shared)
            if not request.preemptions:
                request.hit = request.cached
                self.started += 1
                self.queued_s += time.monotonic() - request.arrived
            self._running[request.rid] = request
            drafter = self._round.drafter
            self._chores.append(partial(drafter.add, request.rid, request.row, tuple(request.tokens)))

    def _launch(self) -> _Flight | None:
        """The next round, launched; None when there is nothing to run, or a round in flight must land first."""
        self._admit()
        if not self._running:
            return None  # all have ended, and the gate is not to take nobody for a small batch
        shape = self.gate.shape(len(self._running))
        work = self._plan(shape)
        if not work:
            return None
        for w in work:
            if w.prompt:
                w.request.cached = w.first + len(w.prompt) - (w.following is None)
            if w.following is None:
                w.request.decoding = True
                w.request.ahead += 1 + w.steps
        chores, self._chores = self._chores, []
        return _Flight(work, self._lane.submit(lambda: self._run(chores, work, shape)))

    def _run(
        self, chores: Sequence[Callable[[], None]], work: Sequence[Work], shape: DraftShape
    ) -> Callable[[], RoundResult]:
        for chore in chores:
            chore()
        return self._round.launch(work, shape)

    def _plan(self, shape: DraftShape) -> list[Work]:
        budget = self._prefill_tokens
        work = []
        for request in list(self._running.values()):
            if request.rid not in self._running:
                continue  # preempted for an older one
            if not request.decoding:
                take = min(request.pending, budget)
                if not take:
                    continue
                if self._make_room(request, request.cached + take):
                    budget -= take
                    first, last = request.cached, request.cached + take
                    following = request.tokens[last] if last < len(request.tokens) else None
                    rows = range(max(first, request.unreported.start - 1), min(last, request.unreported.stop - 1))
                    work.append(Work(request, request.tokens[first:last], first, following, report=rows))
                elif self._pressed:
                    return []
                continue
            if self._pressed and request.sampling.changes_logits:
                return []  # its penalties count what the round in flight emits
            # In flight, at least one token is on its way.
            room = request.room - (request.ahead > 0)
            if room <= 0:
                continue
            steps = min(shape.num_steps, room - 1)
            committed = request.cached + request.ahead
            if not self._pages.grow(request.row, committed + (shape.limited(steps).slots if steps else 1)):
                steps = 0
                if not self._make_room(request, committed + 1):
                    if self._pressed:
                        return []
                    continue
            work.append(Work(request, steps=steps))
        return work

    @property
    def _pressed(self) -> bool:
        """Whether a round in flight could land first, where pages are short or the last token must be known."""
        return self._flight is not None

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Preempt the youngest until the request's pages suffice.

        False when it was itself the youngest, or when a round in flight must land first.
        """
        while not self._pages.grow(request.row, tokens):
            if self._pressed:
                return False
            youngest = next(reversed(self._running.values()))
            self._take_back(youngest)
            self.preemptions += 1
            if youngest is request:
                return False
        return True

    def _take_back(self, request: Request) -> None:
        """Return it to the head of those that wait, to be run again from its tokens."""
        del self._running[request.rid]
        self._release(request)
        request.cached, request.row, request.ahead, request.decoding = 0, -1, 0, False
        request.preemptions += 1
        self._waiting[request.rid] = request
        self._waiting.move_to_end(request.rid, last=False)

    def _commit(self, flight: _Flight) -> tuple[TokenUpdate, ...]:
        result = flight.ticket.wait()()
        updates, accepted, verified, steps, telling, right = [], 0, 0, 0, 0, 0
        for w in flight.work:
            request = w.request
            if self._running.get(request.rid) is not request:
                continue  # ended or aborted while the round ran
            request.prompt_logprobs += result.prompt_logprobs.get(request.rid, ())
            if w.following is not None:
                self._prefix.record(request.row, request.tokens, w.first + len(w.prompt))
                continue
            tokens = result.emitted[request.rid]
            request.ahead -= 1 + w.steps
            if w.steps:
                accepted, verified, steps = accepted + len(tokens) - 1, verified + 1, max(steps, w.steps)
                if request.rid not in result.silent:
                    telling, right = telling + 1, right + (len(tokens) > 1)
            updates.append(self._take(request, tokens, result.logprobs.get(request.rid, ())))
        self.gate.observe(steps, verified, accepted)
        self.alarm.observe(self._round.drafter, telling, right)
        return tuple(updates)

    def _take(self, request: Request, emitted: list[int], logprobs: Sequence[TokenLogprob]) -> TokenUpdate:
        first = len(request.tokens) == request.prompt_len
        prompt_logprobs = tuple(request.prompt_logprobs) if first else ()
        if -1 in emitted or any(math.isnan(entry.value) for entry in prompt_logprobs):
            self._prefix.disown(request.row)
            self._finish(request)
            return TokenUpdate(request.rid, (), "error", "the model produced NaN for this request")
        tokens, finish = request.cut(emitted)
        self._round.stats.generated += len(tokens)
        request.cached = len(request.tokens) - 1 + len(emitted)
        request.tokens.extend(tokens)
        self._prefix.record(request.row, request.tokens, request.cached)
        if finish:
            self._finish(request)
        return TokenUpdate(
            request.rid,
            tuple(tokens),
            finish,
            cached_tokens=request.hit if first else 0,
            logprobs=tuple(logprobs[: len(tokens)]),
            prompt_logprobs=prompt_logprobs,
        )

    def _finish(self, request: Request) -> None:
        del self._running[request.rid]
        self.finished += 1
        self._release(request)

    def _release(self, request: Request) -> None:
        self._prefix.detach(request.row)
        self._chores.append(partial(self._round.drafter.release, request.rid))
        if self._flight is not None:
            self._limbo.append(request.row)
        else:
            self._pages.close_row(request.row)

    def _close(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._pages.close_row(row)
