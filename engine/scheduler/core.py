"""Who runs in the next round: continuous batching with chunked prefill, waiting, and preemption by recompute."""

from __future__ import annotations

import math
from collections import deque

from engine.ipc.messages import Submit, TokenUpdate
from engine.memory.pool import Pages
from engine.memory.prefix import PrefixCache
from engine.request import Request
from engine.spec.base import Drafter
from engine.spec.gate import SpecGate
from engine.spec.round import SpecRound, Work


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
        drafter: Drafter,
        gate: SpecGate,
        *,
        max_running: int,
        prefill_tokens: int,
        seed: int,
    ) -> None:
        self._round, self._pages, self._prefix, self._drafter, self._gate = round_, pages, prefix, drafter, gate
        self._max_running, self._prefill_tokens = max_running, prefill_tokens
        self._seed = seed
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self.preemptions = 0
        self.finished = 0

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
        return bool(self._running or self._waiting)

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
        self._waiting.append(Request(message.rid, prompt, len(prompt), sampling, seed % 2**64, stop_ids))
        return None

    def abort(self, rid: int) -> None:
        """Forget a request, wherever it is. Unknown ids are ignored: its end may have crossed the abort."""
        request = self._running.pop(rid, None)
        if request is not None:
            self._release(request)
            return
        self._waiting = deque(r for r in self._waiting if r.rid != rid)

    def step(self) -> tuple[TokenUpdate, ...]:
        """One round; what it emitted."""
        self._admit()
        work = self._plan()
        if not work:
            return ()
        emitted = self._round.run(work)
        for w in work:
            if not w.completes:
                self._prefix.record(w.request.row, w.request.tokens, w.request.cached)
        return tuple(self._commit(self._running[rid], tokens) for rid, tokens in emitted.items())

    def check(self) -> None:
        """free + cached + used = total, and when idle nothing is used. Raises AssertionError otherwise."""
        self._pages.check()
        self._prefix.check()
        if not self.busy:
            assert self._pages.used == 0, f"{self._pages.used} pages leaked"

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            # Log-probabilities need every position to be run.
            shared = [] if request.unreported else self._prefix.match(request.tokens)
            need = -(-(len(request.tokens) + 1) // self._pages.page_size) - len(shared)
            available = self._pages.available - sum(not self._pages.in_use(page) for page in shared)
            # One page in hand for each running request, or it would be preempted again at once.
            if self._running and need + len(self._running) > available:
                return
            self._waiting.popleft()
            request.row = self._pages.open_row()
            request.cached = self._prefix.attach(request.row, request.tokens, shared)
            if not request.preemptions:
                request.hit = request.cached
            self._running[request.rid] = request
            self._drafter.add(request.rid, request.tokens)

    def _plan(self) -> list[Work]:
        budget = self._prefill_tokens
        steps = self._gate.steps(len(self._running))
        work = []
        for request in list(self._running.values()):
            if request.rid not in self._running:
                continue  # preempted for an older one
            decoding = request.pending == 1
            take = 1 if decoding else min(request.pending, budget)
            if take == 0:
                continue
            drafts = max(0, min(steps, request.room - 1)) if decoding else 0
            if not self._pages.grow(request.row, request.cached + take + drafts):
                drafts = 0
                if not self._make_room(request, request.cached + take):
                    continue
            if not decoding:
                budget -= take
            work.append(Work(request, take, drafts))
        return work

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Preempt the youngest until the request's pages suffice; False when it was itself the youngest."""
        while not self._pages.grow(request.row, tokens):
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        del self._running[request.rid]
        self._release(request)
        request.cached, request.row = 0, -1
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    def _commit(self, request: Request, emitted: list[int]) -> TokenUpdate:
        first = len(request.tokens) == request.prompt_len
        prompt_logprobs = tuple(request.prompt_logprobs) if first else ()
        if -1 in emitted or any(math.isnan(entry.value) for entry in prompt_logprobs):
            self._prefix.disown(request.row)
            self._finish(request)
            return TokenUpdate(request.rid, (), "error", "the model produced NaN for this request")
        tokens, finish = request.cut(emitted)
        self._round.stats.generated += len(tokens)
        request.tokens.extend(tokens)
        if not finish:
            self._drafter.extend(request.rid, tokens)
        if not finish or not self._prefix.lookahead:  # a drafter has not seen the last tokens of all
            self._prefix.record(request.row, request.tokens, request.cached)
        if finish:
            self._finish(request)
        return TokenUpdate(
            request.rid,
            tuple(tokens),
            finish,
            cached_tokens=request.hit if first else 0,
            logprobs=tuple(request.logprobs[: len(tokens)]),
            prompt_logprobs=prompt_logprobs,
        )

    def _finish(self, request: Request) -> None:
        del self._running[request.rid]
        self.finished += 1
        self._release(request)

    def _release(self, request: Request) -> None:
        self._prefix.detach(request.row)
        self._pages.close_row(request.row)
        self._drafter.release(request.rid)
