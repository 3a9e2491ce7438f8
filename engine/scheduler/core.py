"""Who runs in the next round: continuous batching with chunked prefill, waiting, and preemption by recompute."""

from __future__ import annotations

from collections import deque

from engine.ipc.messages import Submit, TokenUpdate
from engine.memory.pool import Pages
from engine.request import Request
from engine.spec.base import Drafter
from engine.spec.gate import SpecGate
from engine.spec.round import SpecRound, Work


class Scheduler:
    """Admits requests in order of arrival and runs rounds over all that run.

    Pages are given round by round. When they run out, the youngest request gives its pages back and starts again
    later from its tokens: what it emits stays the same, since a token depends on its prefix and its coin alone.
    """

    def __init__(
        self,
        round_: SpecRound,
        pages: Pages,
        drafter: Drafter,
        gate: SpecGate,
        *,
        max_running: int,
        prefill_tokens: int,
        seed: int,
    ) -> None:
        self._round, self._pages, self._drafter, self._gate = round_, pages, drafter, gate
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
        return tuple(self._commit(self._running[rid], tokens) for rid, tokens in emitted.items())

    def check(self) -> None:
        """When idle: every page must be free. Raises AssertionError otherwise."""
        self._pages.check()
        if not self.busy:
            assert self._pages.free == self._pages.total, "pages leaked"

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            need = -(-(len(request.tokens) + 1) // self._pages.page_size)
            # One page in hand for each running request, or it would be preempted again at once.
            if self._running and need + len(self._running) > self._pages.free:
                return
            self._waiting.popleft()
            request.row = self._pages.open_row()
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
            drafts = min(steps, request.room - 1) if decoding else 0
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
        if -1 in emitted:
            self._finish(request)
            return TokenUpdate(request.rid, (), "error", "the model produced NaN for this request")
        tokens, finish = request.cut(emitted)
        self._round.stats.generated += len(tokens)
        request.tokens.extend(tokens)
        if finish:
            self._finish(request)
        else:
            self._drafter.extend(request.rid, tokens)
        return TokenUpdate(request.rid, tuple(tokens), finish)

    def _finish(self, request: Request) -> None:
        del self._running[request.rid]
        self.finished += 1
        self._release(request)

    def _release(self, request: Request) -> None:
        self._pages.close_row(request.row)
        self._drafter.release(request.rid)
