"""The simulated machine in real time, with the bundled engine's API. Its tokens are words drawn from the prompt."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tuner.engines.bundled import HOT
from tuner.engines.simulated.machine import (
    Profile,
    Work,
    accept_chances,
    fault_under_load,
    plan,
    prefill_s,
    step_s,
)

WORDS = (
    *("the", "a", "of", "light", "water", "stone", "river", "field", "night", "morning", "table", "letter", "window"),
    *("garden", "small", "large", "old", "new", "quiet", "warm", "reads", "holds", "turns", "keeps", "finds", "gives"),
    *("under", "over", "beside", "before", "after", "because", "while", "then", "often", "never", "seven", "nine"),
)
CHARACTERS_PER_TOKEN = 4
_OWN = frozenset(WORDS)


def tokens_of(prompt: str) -> int:
    """Words of its own are a token each, as they are in its answers; of any other text so many characters are one."""
    words = prompt.split()
    return len(words) if words and _OWN.issuperset(words) else max(1, len(prompt) // CHARACTERS_PER_TOKEN)


@dataclass
class Generation:
    """One request. `updates` gets the number of tokens of each step, and None at the end."""

    prompt: str
    prompt_tokens: int
    limit: int
    updates: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    made: int = 0
    gone: bool = False

    def words(self) -> list[str]:
        """The whole answer: a function of the prompt, whatever the settings are."""
        draw = random.Random(self.prompt)
        return [draw.choice(WORDS) + " " for _ in range(self.limit)]


class Simulation:
    """Steps the running requests together, each step as long as the machine would take.

    `speed` divides all times; `launch_factor` is what this launch is off by.
    """

    def __init__(
        self, profile: Profile, settings: dict[str, Any], *, speed: float, launch_factor: float, slots: int
    ) -> None:
        self.profile = profile
        self.settings = settings
        self.speed = speed * launch_factor
        self.slots = slots
        self.epoch = 0
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.generated = self.verify_steps = self.accepted = 0
        self._work = asyncio.Event()
        self._random = random.Random(os.getpid())

    def add(self, prompt: str, limit: int) -> Generation:
        """Queue a request."""
        generation = Generation(prompt, tokens_of(prompt), limit)
        self.waiting.append(generation)
        self._work.set()
        return generation

    async def run(self) -> None:
        """Steps for ever, on a timetable that lateness does not shift."""
        due = time.monotonic()
        while True:
            if not (self.running or self.waiting):
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            due += self._admit()
            due += step_s(self.profile, plan(self.profile, self.settings, len(self.running)), len(self.running)) / (
                self.speed
            )
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._step()

    def _admit(self) -> float:
        """Takes in what waits, as far as there are slots; seconds that its prompts take."""
        seconds = 0.0
        while self.waiting and len(self.running) < self.slots:
            generation = self.waiting.popleft()
            if generation.gone:
                continue
            self.running.append(generation)
            chosen = plan(self.profile, self.settings, len(self.running))
            seconds += prefill_s(self.profile, chosen, generation.prompt_tokens) / self.speed
        if fault := fault_under_load(self.profile, self.settings, max(1, len(self.running)), Work()):
            print(f"torch.OutOfMemoryError: {fault.message}", file=sys.stderr, flush=True)
            os._exit(1)
        return seconds

    def _step(self) -> None:
        chances = accept_chances(plan(self.profile, self.settings, len(self.running)))
        for generation in self.running:
            depth = 0
            while depth < len(chances) and self._random.random() < chances[depth]:
                depth += 1
            count = min(depth + 1, generation.limit - generation.made)
            generation.made += count
            self.generated += count
            self.verify_steps += bool(chances)
            self.accepted += depth if chances else 0
            generation.updates.put_nowait(count)
            if generation.made >= generation.limit:
                generation.updates.put_nowait(None)
                generation.gone = True
        self.running = [generation for generation in self.running if not generation.gone]


class Api:
    """The HTTP face."""

    def __init__(self, simulation: Simulation, model: str) -> None:
        self.simulation = simulation
        self.model = model

    def app(self) -> Starlette:
        """The application; the simulation runs while it does."""
        import contextlib

        @contextlib.asynccontextmanager
        async def running(_app: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(self.simulation.run())
            yield
            task.cancel()

        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/server_info", self.info),
                Route("/metrics", self.metrics),
                Route("/reconfigure", self.reconfigure, methods=["POST"]),
                Route("/flush_cache", self.flush, methods=["POST"]),
            ],
            lifespan=running,
        )

    async def health(self, _request: Request) -> Response:
        """It lives."""
        return JSONResponse({"status": "ok", "simulated": True})

    async def models(self, _request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model", "simulated": True}]})

    async def flush(self, _request: Request) -> Response:
        """There is no prefix cache."""
        return JSONResponse({"pages": 0})

    async def info(self, _request: Request) -> Response:
        """Settings in effect: all that were asked for."""
        simulation = self.simulation
        return JSONResponse(
            {
                "simulated": True,
                "profile": simulation.profile.name,
                "model": self.model,
                "effective": simulation.settings,
                "epoch": simulation.epoch,
            }
        )

    async def metrics(self, _request: Request) -> Response:
        """The counters by the bundled engine's names."""
        simulation = self.simulation
        counters = {
            "engine_generated_tokens_total": simulation.generated,
            "engine_spec_verify_steps_total": simulation.verify_steps,
            "engine_spec_accepted_tokens_total": simulation.accepted,
        }
        page = "".join(f"# TYPE {name} counter\n{name} {value}\n" for name, value in counters.items())
        return PlainTextResponse(page)

    async def reconfigure(self, request: Request) -> Response:
        """Changes hot settings between two steps."""
        changes = await request.json()
        wrong = [name for name in changes if name not in HOT]
        if wrong:
            message = f"{wrong[0]}: cannot be changed while running; valid: {', '.join(HOT)}"
            return JSONResponse({"error": {"message": message}}, 422)
        self.simulation.settings = {**self.simulation.settings, **changes}
        self.simulation.epoch += 1
        return JSONResponse({"applied": changes, "effective": self.simulation.settings, "epoch": self.simulation.epoch})

    async def complete(self, request: Request) -> Response:
        """Completions and chat completions, streamed or whole."""
        body = await request.json()
        chat = request.url.path.endswith("chat/completions")
        prompt = str(body["messages"][-1]["content"] if chat else body["prompt"])
        generation = self.simulation.add(prompt, int(body.get("max_tokens") or 16))
        if body.get("stream"):
            return StreamingResponse(self._stream(generation, body, chat), media_type="text/event-stream")
        while await generation.updates.get() is not None:
            pass
        text = "".join(generation.words())
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return JSONResponse({**self._head(chat), "choices": [choice], "usage": usage(generation)})

    async def _stream(self, generation: Generation, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        options = body.get("stream_options") or {}
        head, words, sent = self._head(chat), generation.words(), 0
        try:
            while (count := await generation.updates.get()) is not None:
                text = "".join(words[sent : sent + count])
                sent += count
                ended = "length" if sent >= generation.limit else None
                choice = {
                    "index": 0,
                    "finish_reason": ended,
                    **({"delta": {"content": text}} if chat else {"text": text}),
                }
                event = {**head, "choices": [choice]}
                if options.get("continuous_usage_stats"):
                    event["usage"] = usage(generation, sent)
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if options.get("include_usage"):
                yield b"data: " + json.dumps({**head, "choices": [], "usage": usage(generation)}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            generation.gone = True

    def _head(self, chat: bool) -> dict[str, Any]:
        return {
            "id": "simulated",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "model": self.model,
        }


def usage(generation: Generation, made: int | None = None) -> dict[str, int]:
    """Token counts as the API tells them."""
    count = generation.limit if made is None else made
    prompt = generation.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
