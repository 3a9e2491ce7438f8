"""How fast the engine itself is: one process, no HTTP, no tokenizer in the loop.

What a server's clients see beyond this is HTTP, scheduling between two processes, and text.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.build import Core, build
from engine.config import EngineConfig
from engine.errors import EngineError, UsageError
from engine.ipc.messages import Ask, SamplingParams, Submit
from engine.ranks import launch
from engine.text.tokenizer import load_tokenizer
from engine.worker import warm_up


def run(
    config: EngineConfig,
    streams: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    prompts: Path | None = None,
) -> dict[str, Any]:
    """Greedy decoding of so many requests at once, each level `repeats` times, prefix cache emptied before each.

    Args:
        config: of the engine.
        streams: requests at once, level by level.
        prompt_tokens: random ones per request, where no `prompts` are given.
        output_tokens: per request; end tokens are ignored.
        repeats: runs of each level; medians are over these.
        prompts: JSON lines with "prompt" or "text", each sent through the chat template where the model has one.

    Returns:
        What `engine bench` prints: settings in effect, and per level tokens and steps per second, times in ms.

    Raises:
        EngineError: as when serving; UsageError for levels or lengths that do not fit.
    """
    crew = launch(config)
    try:
        return _run(build(config, crew), streams, prompt_tokens, output_tokens, repeats, prompts)
    except EngineError as error:
        raise crew.explain(error) from error
    finally:
        crew.close()


def _run(
    core: Core, streams: Sequence[int], prompt_tokens: int, output_tokens: int, repeats: int, prompts: Path | None
) -> dict[str, Any]:
    config = core.config
    warm_up(core)
    if max(streams) > config.max_running_requests:
        raise UsageError(f"streams: {max(streams)} is more than max_running_requests ({config.max_running_requests})")
    given = _read(core, prompts) if prompts else _random(core, max(streams), prompt_tokens)
    longest = max(map(len, given)) + output_tokens
    room = min(core.context_length, core.pages.total * core.pages.page_size // max(streams))
    if longest > room:
        raise UsageError(f"{longest} tokens of prompt and output do not fit: there is room for {room} per request")
    levels = []
    for count in streams:
        runs = [_once(core, given, count, output_tokens, repeat) for repeat in range(repeats)]
        medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
        rates = [run["tokens_per_s"] for run in runs]
        levels.append({"streams": count, **medians, "tokens_per_s_range": [round(min(rates), 1), round(max(rates), 1)]})
    return {"model": core.source.name, "effective": core.effective(), "paths": core.paths, "levels": levels}


def _random(core: Core, count: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(core.model.config.vocab) for _ in range(length)] for _ in range(count)]


def _read(core: Core, file: Path) -> list[list[int]]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        texts = [str(line.get("prompt") or line["text"]) for line in lines]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"prompts: {file}: not JSON lines with 'prompt' or 'text': {error!r}") from error
    if not texts:
        raise UsageError(f"prompts: {file} is empty")
    tokenizer = load_tokenizer(core.source)
    if not tokenizer.has_template:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), False) for text in texts]


def _once(
    core: Core, prompts: Sequence[Sequence[int]], count: int, output_tokens: int, repeat: int
) -> dict[str, float]:
    core.flush(Ask(0, "flush_cache"))
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    before = core.counters()
    began = time.perf_counter()
    for i in range(count):
        prompt = prompts[(repeat * count + i) % len(prompts)]
        core.submit(Submit(i, tuple(prompt), sampling))
    first: dict[int, float] = {}
    decoded, decoding_since = 0, 0.0
    while core.scheduler.busy:
        updates = core.step()
        now = time.perf_counter()
        for update in updates:
            if update.error:
                raise UsageError(update.error)
            first.setdefault(update.rid, now)
        if decoding_since:
            decoded += sum(len(update.token_ids) for update in updates)
        elif len(first) == count:  # decoding alone from here on; what some emitted before is prefill's time as well
            decoding_since = now
    ended = time.perf_counter()
    after = core.counters()

    def spent(name: str) -> float:
        return after[name] - before[name]

    rounds, verified = spent("engine_rounds_total"), spent("engine_spec_verify_steps_total")
    return {
        "tokens_per_s": count * output_tokens / (ended - began),
        "decode_tokens_per_s": decoded / (ended - decoding_since) if decoded else 0.0,
        "time_to_first_token_ms": 1e3 * statistics.mean(at - began for at in first.values()),
        "step_ms": 1e3 * (ended - began) / rounds,
        "forward_ms": 1e3 * spent("engine_forward_seconds_total") / rounds,
        "draft_ms": 1e3 * spent("engine_draft_seconds_total") / rounds,
        "steps": rounds,
        "accept_length": 1 + spent("engine_spec_accepted_tokens_total") / verified if verified else 1.0,
    }
