"""The frontend's handle on the model process: submit, receive, abort, ask; and one place where its death arrives."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.types import Receive

from engine.errors import EngineDown, EngineError
from engine.ipc.messages import Abort, Answer, Ask, SamplingParams, Shutdown, Submit, Tokens, TokenUpdate
from engine.server.errors import RequestError

RETRY_AFTER_S = 5


class Sender(Protocol):
    """What the client needs of a channel."""

    def send(self, message: Any) -> None:
        """Queues a message to the model process."""


class ClientGone(Exception):
    """The HTTP client has left; nobody waits for the rest."""


class EngineClient:
    """All requests in flight, by `rid`.

    `receive` and `fail` are called by the owner of the channel, everything else by request handlers; all of it on one
    event loop.
    """

    def __init__(
        self, channel: Sender, on_tokens: Callable[[int], None] = lambda count: None, most: int = sys.maxsize
    ) -> None:
        """`on_tokens` is told how many output tokens each message brought. `most` sequences run or wait at a time."""
        self.most = most
        self._channel = channel
        self._on_tokens = on_tokens
        self._rids = itertools.count(1)
        self._tickets = itertools.count(1)
        self._running: dict[int, tuple[Generation, int]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.down: EngineDown | None = None

    @property
    def running(self) -> int:
        """Sequences submitted and not yet ended."""
        return len(self._running)

    def generate(self, sequences: Sequence[tuple[Sequence[int], SamplingParams]]) -> Generation:
        """Submits sequences (prompt, sampling). Use as a context manager: leaving it aborts what still runs.

        Raises:
            EngineDown: the model process has ended.
            RequestError: 429, more are waiting than the server keeps.
        """
        if self.down is not None:
            raise self.down
        if len(self._running) + len(sequences) > self.most:
            message = f"{len(self._running)} sequences run or wait, and the server keeps {self.most}; try again later"
            raise RequestError(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
        generation = Generation(self)
        for index, (prompt_ids, sampling) in enumerate(sequences):
            rid = next(self._rids)
            generation.rids.append(rid)
            self._running[rid] = (generation, index)
            self._channel.send(Submit(rid, tuple(prompt_ids), sampling))
        return generation

    def abort(self, rid: int) -> None:
        """Ends one sequence early; its later updates are ignored. Does nothing when it has ended."""
        if self._running.pop(rid, None) is not None:
            self._channel.send(Abort(rid))

    async def ask(self, what: str, timeout_s: float, **arguments: Any) -> Any:
        """The model process's answer to an `Ask`.

        Raises:
            EngineDown: the model process has ended, or ended before answering.
            TimeoutError: no answer within `timeout_s`.
            EngineError: it answered with an error.
        """
        if self.down is not None:
            raise self.down
        ticket = next(self._tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._channel.send(Ask(ticket, what, arguments))  # type: ignore[arg-type]
        try:
            answer: Answer = await asyncio.wait_for(future, timeout_s)
        finally:
            del self._asked[ticket]
        if answer.error:
            raise EngineError(f"the model process could not answer '{what}': {answer.error}")
        return answer.payload

    def shutdown(self, drain_s: float) -> None:
        """Tells the model process to finish what runs, within `drain_s`, and to exit."""
        self._channel.send(Shutdown(drain_s))

    def receive(self, message: Tokens | Answer) -> None:
        """Hands a message of the model process to whoever waits for it."""
        if isinstance(message, Tokens):
            count = 0
            for update in message.updates:
                count += len(update.token_ids)
                entry = self._running.get(update.rid)
                if entry is None:  # aborted, and the abort crossed with this update
                    continue
                if update.finish is not None:
                    del self._running[update.rid]
                generation, index = entry
                generation.put(index, update)
            self._on_tokens(count)
        else:
            future = self._asked.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message)

    def fail(self, cause: str) -> None:
        """The model process has ended: everyone who waits is told, and nothing is accepted any more."""
        self.down = self.down or EngineDown(cause)
        for generation, _ in list(self._running.values()):
            generation.cancel(self.down)
        self._running.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.down)


class Generation:
    """The updates of the sequences of one HTTP request, in order of arrival."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._arrived: list[tuple[int, TokenUpdate]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.rids: list[int] = []

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rid in self.rids:
            self._client.abort(rid)

    def put(self, index: int, update: TokenUpdate) -> None:
        """Called by the client: an update of sequence `index` has arrived."""
        self._arrived.append((index, update))
        self._wake()

    def cancel(self, error: Exception) -> None:
        """Makes `updates` raise `error`, once, instead of waiting."""
        self._error = self._error or error
        self._wake()

    def stop(self, index: int) -> None:
        """Ends sequence `index` early, because a stop string was seen."""
        self._client.abort(self.rids[index])

    async def updates(self) -> list[tuple[int, TokenUpdate]]:
        """What has arrived since the last call, at least one; waits for it.

        Raises:
            EngineDown: the model process has ended.
            ClientGone: the HTTP client has left.
        """
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Watch:
    """While in it, a client that leaves cancels its generation."""

    def __init__(self, receive: Receive, generation: Generation) -> None:
        self._receive = receive
        self._generation = generation

    def __enter__(self) -> None:
        self._task = asyncio.create_task(self._wait())

    def __exit__(self, *error: object) -> None:
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel(ClientGone())
