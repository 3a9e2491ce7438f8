"""Which request is sent next, and its bytes. Baseline and candidate of a pair get the same ones in the same order."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.bench.client import Exchange, Outgoing, Target
from tuner.bench.prompts import Prompt

PATH = "/v1/chat/completions"

PASSES = 1000
"""Passes over its prompts that no block makes."""


@dataclass(frozen=True)
class Sampling:
    """What every request of a block asks for. `stream_options` is what the server was found to accept."""

    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    stream_options: tuple[str, ...] = ("include_usage", "continuous_usage_stats")


def prompt_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """All prompts once, in an order that is a function of the seed, with the kinds spread evenly.

    Any stretch of it holds about the same mix, so that a window's throughput hangs less on which prompts fell into it.
    """
    rng = random.Random(f"order:{seed}")
    by_kind: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_kind[prompt.kind].append(prompt)
    placed: list[tuple[float, float, Prompt]] = []
    for kind in sorted(by_kind):
        group = by_kind[kind]
        rng.shuffle(group)
        start = rng.random()
        placed += [((i + start) / len(group), rng.random(), prompt) for i, prompt in enumerate(group)]
    return [prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2])]


def encode(target: Target, sampling: Sampling, text: str, *, seed: int, max_tokens: int, api_key: str | None) -> bytes:
    """One streaming chat request as it goes over the wire. Every sampling field is explicit, none left to a default."""
    body: dict[str, object] = {
        "model": sampling.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1,
        "seed": seed,
        "stream": True,
    }
    if sampling.stream_options:
        body["stream_options"] = dict.fromkeys(sampling.stream_options, True)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return post(target, PATH, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), api_key)


def post(target: Target, path: str, body: bytes, api_key: str | None) -> bytes:
    """A JSON POST as it goes over the wire."""
    head = target.head("POST", path, api_key)
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def request_sequence(
    target: Target,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    seed: int,
    api_key: str | None,
    earlier: int = 0,
) -> Iterator[Outgoing]:
    """Requests without end. The n-th is the same for the same arguments, whenever it is asked for.

    The first `concurrency` of them, one a stream, are cut to spread lengths: streams that start together with equal
    lengths would finish together for a long time, and throughput would swing with them. From the second pass over the
    prompts on, each starts with the number of the pass, so that a prefix cache does not answer for the server; so it
    does from the first pass on where `earlier` blocks were asked the same of a server whose cache cannot be emptied.
    """
    order = prompt_order(prompts, seed)
    lengths = [max(1, round(sampling.max_tokens * (i + 1) / concurrency)) for i in range(concurrency)]
    random.Random(f"lengths:{seed}").shuffle(lengths)
    number = 0
    while True:
        turn, place = divmod(number, len(order))
        prompt = order[place]
        asked = PASSES * earlier + turn
        text = prompt.text if asked == 0 else f"[{asked + 1}] {prompt.text}"
        max_tokens = lengths[number] if number < concurrency else sampling.max_tokens
        request_seed = (seed * 1_000_003 + number) % 2**31
        data = encode(target, sampling, text, seed=request_seed, max_tokens=max_tokens, api_key=api_key)
        yield data, Exchange(number, prompt.id, max_tokens)
        number += 1
