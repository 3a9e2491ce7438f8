"""From token updates to HTTP responses: whole, or one server-sent event per update.

Thirty-two streams share two cores with the model, so an event costs one `json.dumps` of its text and one
concatenation; everything that does not change within a stream is rendered once.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from engine.errors import EngineDown
from engine.ipc.messages import SamplingParams, TokenUpdate
from engine.server.client import Generation, Watch
from engine.server.errors import RequestError, error_body
from engine.server.logprobs import ChatLogprobs, CompletionLogprobs, Entry
from engine.server.schema import GenerationRequest
from engine.server.service import Service
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Endpoint:
    """How one endpoint spells its objects. `opens` and `closes` enclose the text of a streamed delta."""

    whole: str
    chunk: str
    opens: str
    closes: str
    first_delta: str | None

    def choice(self, index: int, text: str, finish: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice of a response that is not streamed."""
        if self is CHAT:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, tokenizer: Tokenizer, top: int) -> CompletionLogprobs | ChatLogprobs:
        """What writes one choice's log-probabilities."""
        return ChatLogprobs(tokenizer, top) if self is CHAT else CompletionLogprobs(tokenizer, top)


COMPLETION = Endpoint("text_completion", "text_completion", '"text":', "", None)
CHAT = Endpoint(
    "chat.completion", "chat.completion.chunk", '"delta":{"content":', "}", '"delta":{"role":"assistant","content":""}'
)


@dataclass(frozen=True)
class Delta:
    """New text of one choice, its finish reason when it is the last, and its tokens where those were asked for.

    `used`: output tokens of all choices up to here.
    """

    index: int
    text: str
    finish: str | None
    used: int
    tokens: tuple[Entry, ...] = ()


@dataclass
class Job:
    """One request on its way through the model: its choices' texts and what they have used so far.

    Choice i is of prompt i // n. `echoes`: the prompts as text, where they are to come first.
    """

    service: Service
    endpoint: Endpoint
    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    request: GenerationRequest
    arrived: float
    echoes: list[str] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.n = self.request.n or 1
        stop = self.request.stop_strings
        least = self.sampling.min_tokens
        self.texts = [TextStream(self.service.tokenizer, stop, least) for _ in range(len(self.prompts) * self.n)]
        self.prompt_tokens = sum(map(len, self.prompts))
        self.cached_tokens = 0
        self.output_tokens = 0

    @property
    def choices(self) -> int:
        """How many there will be."""
        return len(self.texts)

    def submit(self) -> Generation:
        """Starts the generation; to be used as a context manager."""
        samplings = [replace(self.sampling, seed=_seed_of(self.sampling.seed, choice)) for choice in range(self.n)]
        generation = self.service.client.generate(
            [(prompt, sampling) for prompt in self.prompts for sampling in samplings]
        )
        self.service.metrics.prompt_tokens.inc(self.prompt_tokens * self.n)
        return generation

    async def deltas(self, generation: Generation) -> AsyncIterator[list[Delta]]:
        """Batches of deltas, one delta per token update, until every choice has ended.

        Raises:
            RequestError: the model process gave up on the request.
            EngineDown, ClientGone: as `Generation.updates`.
        """
        metrics = self.service.metrics
        open_choices = set(range(self.choices))
        first = True
        last: dict[int, float] = {}
        echoing = set(open_choices) if self.echoes is not None else set()
        while open_choices:
            batch = []
            for index, update in await generation.updates():
                if index not in open_choices:
                    continue
                self.cached_tokens += update.cached_tokens
                now = time.perf_counter()
                if update.token_ids and index in last:
                    metrics.itl.observe((now - last[index]) / len(update.token_ids))
                last[index] = now
                text = self.texts[index]
                before = text.tokens
                new = text.feed(update.token_ids)
                self.output_tokens += text.tokens - before
                tokens: tuple[Entry, ...] = ()
                if update.logprobs:
                    tokens = tuple(zip(update.token_ids, update.logprobs, strict=True))[: text.tokens - before]
                finish: str | None = None
                if text.stopped:
                    finish = "stop"
                    generation.stop(index)
                elif update.finish in ("stop", "length"):
                    new += text.finish()
                    finish = "stop" if text.stopped else update.finish
                elif update.finish is not None:
                    raise _gave_up(update.finish, update.error)
                if finish is not None:
                    open_choices.discard(index)
                if index in echoing:
                    echoing.discard(index)
                    echo, known = self._echo(index, update)
                    new, tokens = echo + new, known + tokens
                batch.append(Delta(index, new, finish, self.output_tokens, tokens))
            if first:
                metrics.ttft.observe(time.perf_counter() - self.arrived)
                first = False
            yield batch
        metrics.e2e.observe(time.perf_counter() - self.arrived)

    def _echo(self, index: int, first: TokenUpdate) -> tuple[str, tuple[Entry, ...]]:
        """What comes before a choice's own text and tokens."""
        assert self.echoes is not None
        at = index // self.n
        if self.sampling.prompt_logprobs is None:
            return self.echoes[at], ()
        return self.echoes[at], tuple(zip(self.prompts[at], (None, *first.prompt_logprobs), strict=True))

    def usage(self, output_tokens: int) -> dict[str, int]:
        """With so many output tokens, over all choices."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self.prompt_tokens + output_tokens,
        }

    def final_usage(self) -> dict[str, Any]:
        """All tokens, and how many of the prompts' the prefix cache had."""
        return {**self.usage(self.output_tokens), "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


def _seed_of(seed: int | None, choice: int) -> int | None:
    """The first choice has the request's own seed, so that it is what it would be alone; the others have others."""
    return seed if seed is None or choice == 0 else hash((seed, choice)) % 2**63


def _gave_up(finish: str, error: str) -> RequestError:
    if finish == "abort":
        return RequestError(503, error or "the request was aborted: the server is shutting down", code="aborted")
    return RequestError(500, error or "the model process could not finish this request", code="generation_failed")


async def whole_response(job: Job, receive: Receive) -> Response:
    """The response of a request that is not streamed."""
    texts = [""] * job.choices
    finishes = [""] * job.choices
    tokens: list[list[Entry]] = [[] for _ in texts]
    with job.submit() as generation, Watch(receive, generation):
        async for batch in job.deltas(generation):
            for delta in batch:
                texts[delta.index] += delta.text
                finishes[delta.index] = delta.finish or ""
                tokens[delta.index] += delta.tokens
    top = job.sampling.logprobs
    choices = []
    for i, (text, end) in enumerate(zip(texts, finishes, strict=True)):
        told = None if top is None else job.endpoint.logprobs(job.service.tokenizer, top).render(tokens[i])
        choices.append(job.endpoint.choice(i, text, end, told))
    head = {"id": job.id, "object": job.endpoint.whole, "created": job.created, "model": job.service.name}
    return JSONResponse({**head, "choices": choices, "usage": job.final_usage()})


class StreamedResponse(Response):
    """Server-sent events, from the first token on; a request that fails before that gets a proper status instead."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        frames = _Frames(self._job)
        started = False
        try:
            with self._job.submit() as generation, Watch(receive, generation):
                async for batch in self._job.deltas(generation):
                    body = "".join(map(frames.event, batch))
                    if not started:
                        started = True
                        await send(_START)
                        body = frames.opening() + body
                    await send({"type": "http.response.body", "body": body.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": frames.closing().encode(), "more_body": False})
        except (RequestError, EngineDown) as error:
            if not started:
                raise
            status, code = (error.status, error.code) if isinstance(error, RequestError) else (503, "engine_down")
            event = f"data: {json.dumps(error_body(status, str(error), code=code))}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class _Frames:
    """The events of one stream, with all that stays the same rendered beforehand."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._endpoint = job.endpoint
        head = {"id": job.id, "object": job.endpoint.chunk, "created": job.created, "model": job.service.name}
        self._head = f"data: {_compact(head)[:-1]},"
        self._before = [f'{self._head}"choices":[{{"index":{i},{job.endpoint.opens}' for i in range(job.choices)]
        self._after = f'{job.endpoint.closes},"logprobs":null,"finish_reason":'
        self._top = job.sampling.logprobs
        self._logprobs = [
            job.endpoint.logprobs(job.service.tokenizer, self._top or 0)
            for _ in range(job.choices if self._top is not None else 0)
        ]
        options = job.request.stream_options
        self._last = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats

    def opening(self) -> str:
        """What comes before the first delta: the role, in a chat."""
        if self._endpoint.first_delta is None:
            return ""
        role = self._endpoint.first_delta
        return "".join(
            f'{self._head}"choices":[{{"index":{i},{role},"logprobs":null,"finish_reason":null}}]}}\n\n'
            for i in range(self._job.choices)
        )

    def event(self, delta: Delta) -> str:
        """One delta."""
        finish = f'"{delta.finish}"' if delta.finish else "null"
        usage = f',"usage":{_compact(self._job.usage(delta.used))}' if self._always else ""
        after = self._after
        if self._logprobs and delta.tokens:
            told = _compact(self._logprobs[delta.index].render(delta.tokens))
            after = f'{self._endpoint.closes},"logprobs":{told},"finish_reason":'
        return f"{self._before[delta.index]}{json.dumps(delta.text)}{after}{finish}}}]{usage}}}\n\n"

    def closing(self) -> str:
        """The usage, where it was asked for, and the end mark."""
        usage = f'{self._head}"choices":[],"usage":{_compact(self._job.final_usage())}}}\n\n' if self._last else ""
        return f"{usage}data: [DONE]\n\n"


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
