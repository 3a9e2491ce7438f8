"""What a drafter costs while it drafts for nobody: one round of each contender in turn, in one process.

Every contender is an engine of its own with as many streams as asked for; each turn runs one round of every one, in a
new order, so that what the host does meets all alike. "none again" is the same as none and shows what this can tell
apart. Engines are built anew several times: where the weights come to lie in memory makes a difference, too.

    python -m benchmarks.speculation_off --streams 32 --builds 4 --output benchmarks/results/speculation_off_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
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
}


def fill(core: Core, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Start all requests and run until each of them decodes."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        core.scheduler.submit(Submit(rid, tuple(prompt), sampling))
    first = set(range(len(prompts)))
    while first:
        first -= {update.rid for update in core.scheduler.step()}


def rounds(cores: Sequence[Core], streams: int, turns: int, rng: np.random.Generator) -> np.ndarray:
    """Seconds of each engine's round in each turn, [turns, engines]."""
    seconds = np.empty((turns, len(cores)))
    for turn in range(turns):
        for which in rng.permutation(len(cores)):
            began = time.perf_counter()
            updates = cores[which].scheduler.step()
            seconds[turn, which] = time.perf_counter() - began
            if sum(len(update.token_ids) for update in updates) != streams:
                raise RuntimeError(f"engine {which} made other than one token for each of {streams} streams")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--builds", type=int, default=4, help="times that the engines are built anew")
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
    names = list(CONTENDERS)
    each = []
    for number in range(given.builds):
        some = [prompts[(number * given.streams + i) % len(prompts)] for i in range(given.streams)]
        cores: dict[str, Core] = {}
        for name in rng.permutation(names).tolist():
            cores[name] = build(
                EngineConfig(model=given.model, max_running_requests=given.streams, spec=CONTENDERS[name])
            )
            # Drafts let some streams get ahead while the others' prompts run; none may end before the last turn.
            fill(cores[name], some, given.turns + 200)
        rounds([cores[name] for name in names], given.streams, 5, rng)  # warm
        each.append(rounds([cores[name] for name in names], given.streams, given.turns, rng))
        cores.clear()
        gc.collect()
    table: dict[str, dict[str, float]] = {}
    for at, name in enumerate(names):
        # One figure a build: neighbouring rounds are not independent of each other, nor is a build of its memory.
        logs = np.array([np.median(np.log(seconds[:, 0] / seconds[:, at])) for seconds in each])
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        table[name] = {
            "ratio": round(math.exp(logs.mean()), 4),
            "low": round(math.exp(logs.mean() - half), 4),
            "high": round(math.exp(logs.mean() + half), 4),
            "round_ms": round(1000 * float(np.median(np.concatenate([seconds[:, at] for seconds in each]))), 3),
        }
        print(f"{name:20} {json.dumps(table[name])} {np.round(np.exp(logs), 3).tolist()}", flush=True)
    if given.output:
        flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"})
        machine = {"instructions": flags, "system": platform.system()}
        settings = {k: v for k, v in vars(given).items() if k != "output"}
        given.output.write_text(
            json.dumps({"machine": machine, "settings": settings, "contenders": table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
