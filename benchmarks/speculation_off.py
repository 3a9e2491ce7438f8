"""What a drafter costs where speculation is off, or hardly pays: one round of each contender in turn, in one process.

Every contender is an engine of its own with as many streams as asked for; each turn runs one round of every one, in a
new order, so that what the host does meets all alike. "none again" is the same as none and shows what this can tell
apart. Engines are built anew several times: where the weights come to lie in memory makes a difference, too.

    python -m benchmarks.speculation_off --streams 8 32 --builds 6 --output benchmarks/results/speculation_off_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.model.source import resolve
from engine.ops.native import cpu_flags
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts

CONTENDERS = {
    "none": SpecConfig(),
    "none again": SpecConfig(),
    "ngram, off above 4": SpecConfig(speculation="ngram", num_steps=8, num_draft_tokens=9, disable_batch_threshold=4),
    "hybrid, off above 4": SpecConfig(speculation="hybrid", num_steps=3, num_draft_tokens=4, disable_batch_threshold=4),
    "hybrid by batch": SpecConfig(
        speculation="hybrid", num_steps=5, num_draft_tokens=6, steps_by_batch=((1, 5), (4, 3), (8, 2), (16, 0))
    ),
}
LONGEST = 3
"""Tokens that a stream gets in one round at most, at 8 streams and more."""


def fill(core: Core, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Start all requests and run until each of them decodes."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        core.scheduler.submit(Submit(rid, tuple(prompt), sampling))
    first = set(range(len(prompts)))
    while first:
        first -= {update.rid for update in core.scheduler.step()}


def rounds(cores: Sequence[Core], streams: int, turns: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each engine's round in each turn, and tokens that it made, both [turns, engines]."""
    seconds, tokens = np.empty((turns, len(cores))), np.empty((turns, len(cores)))
    for turn in range(turns):
        for which in rng.permutation(len(cores)):
            began = time.perf_counter()
            updates = cores[which].scheduler.step()
            seconds[turn, which] = time.perf_counter() - began
            tokens[turn, which] = sum(len(update.token_ids) for update in updates)
            if len(updates) != streams:
                raise RuntimeError(f"engine {which} went on with {len(updates)} of {streams} streams")
    return seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--builds", type=int, default=6, help="times that the engines are built anew")
    parser.add_argument("--turns", type=int, default=100, help="rounds of each engine after a build")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve(given.model))
    texts = [
        tokenizer.render_chat([{"role": "user", "content": prompt.text}])
        for prompt in load_prompts("mixed", split="held_out")
    ]
    prompts = [tokenizer.encode(text, add_special=False) for text in texts]
    rng = np.random.default_rng(0)
    result = {str(streams): level(given, streams, prompts, rng) for streams in given.streams}
    if given.output:
        flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"})
        document = {
            "command": "python -m benchmarks.speculation_off " + " ".join(sys.argv[1:]),
            "machine": {"instructions": flags, "system": platform.system()},
            "streams": result,
        }
        given.output.write_text(json.dumps(document, indent=1) + "\n")


def level(
    given: argparse.Namespace, streams: int, prompts: Sequence[Sequence[int]], rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Every contender's tokens per second against none at so many streams, over all builds."""
    names = list(CONTENDERS)
    speeds, times = [], []
    for number in range(given.builds):
        some = [prompts[(number * streams + i) % len(prompts)] for i in range(streams)]
        cores: dict[str, Core] = {}
        for name in rng.permutation(names).tolist():
            cores[name] = build(EngineConfig(model=given.model, max_running_requests=streams, spec=CONTENDERS[name]))
            # Some streams get ahead while the others' prompts run; none may end before the last turn.
            fill(cores[name], some, LONGEST * (given.turns + 5) + 100)
        inner = [cores[name] for name in names]
        rounds(inner, streams, 5, rng)  # warm
        seconds, tokens = rounds(inner, streams, given.turns, rng)
        speeds.append(tokens.mean(axis=0) / np.median(seconds, axis=0))  # a stall of the host is nobody's
        times.append(np.median(seconds, axis=0))
        cores.clear()
        inner.clear()
        gc.collect()
    table: dict[str, dict[str, float]] = {}
    for at, name in enumerate(names):
        # One figure a build: neighbouring rounds are not independent of each other, nor is a build of its memory.
        logs = np.array([math.log(speed[at] / speed[0]) for speed in speeds])
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        table[name] = {
            "ratio": round(math.exp(logs.mean()), 4),
            "low": round(math.exp(logs.mean() - half), 4),
            "high": round(math.exp(logs.mean() + half), 4),
            "round_ms": round(1000 * float(np.median([each[at] for each in times])), 3),
        }
        print(f"{streams:3} {name:20} {json.dumps(table[name])} {np.round(np.exp(logs), 3).tolist()}", flush=True)
    return table


if __name__ == "__main__":
    main()
