"""What speculation gains on this machine: every setting against none, in one process, side by side.

Each round runs the same held-out prompts (greedy, a fixed number of tokens) through every contender in a new order;
what is compared is the logarithm of the ratio to "none" within a round. The engine is switched between contenders by
`reconfigure`, as a study would.

    python -m benchmarks.speculation_cpu --streams 1 8 32 --rounds 8 3 2 --output results/speculation_cpu.json
"""

from __future__ import annotations

import argparse
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
from engine.reconfigure import reconfigure
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts

CONTENDERS: dict[str, dict[str, object]] = {
    "none": {"speculation": "none"},
    **{f"ngram {s}": {"speculation": "ngram", "num_steps": s} for s in (3, 5, 8)},
    **{f"eagle3 {s}": {"speculation": "eagle3", "num_steps": s, "topk": 1} for s in (1, 2, 3, 4)},
    **{f"hybrid {s}": {"speculation": "hybrid", "num_steps": s, "topk": 1} for s in (2, 3, 5, 8)},
    **{
        f"hybrid 8, head {s}": {"speculation": "hybrid", "num_steps": 8, "topk": 1, "hybrid_steps": s}
        for s in (1, 2, 3)
    },
    "tree 16": {"speculation": "eagle3", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "hybrid tree 16": {"speculation": "hybrid", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "hybrid tree 16, head 2": {
        **{"speculation": "hybrid", "num_steps": 8, "topk": 4, "num_draft_tokens": 16, "hybrid_steps": 2}
    },
    "hybrid 3 v2": {"speculation": "hybrid", "num_steps": 3, "topk": 1, "spec_version": "v2"},
    "hybrid 3 adaptive": {"speculation": "hybrid", "num_steps": 3, "topk": 1, "policy": "adaptive"},
    "hybrid by batch": {"speculation": "hybrid", "num_steps": 5, "topk": 1, "steps_by_batch": "1:5,4:3,8:2,16:0"},
    "ngram, off above 4": {"speculation": "ngram", "num_steps": 8, "disable_batch_threshold": 4},
    "hybrid, off above 4": {"speculation": "hybrid", "num_steps": 3, "topk": 1, "disable_batch_threshold": 4},
}
_RESET = {
    **{"topk": 1, "spec_version": "v1", "policy": "fixed", "hybrid_steps": None},
    **{"steps_by_batch": None, "disable_batch_threshold": None},
}


def run(core: Core, settings: dict[str, object], prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Decode the prompts together, after switching; figures of the time when all of them decode."""
    core.prefix.flush()
    steps = int(str(settings.get("num_steps", 0)))  # a tree says itself how many tokens it drafts
    reconfigure(core, {**_RESET, "num_steps": steps, "num_draft_tokens": steps + 1, **settings})
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        core.scheduler.submit(Submit(rid, tuple(prompt), params))
    left = dict.fromkeys(range(len(prompts)), tokens)
    while min(core.scheduler.waiting, 1) or any(n == tokens for n in left.values()):
        for update in core.scheduler.step():
            left[update.rid] -= len(update.token_ids)
    _, landed = reconfigure(core, {})  # a new window of counters; with overlap a round was in flight
    for update in landed:
        left[update.rid] -= len(update.token_ids)
    began, made = time.perf_counter(), 0
    while all(left.values()):  # at full concurrency alone
        for update in core.scheduler.step():
            left[update.rid] -= len(update.token_ids)
            made += len(update.token_ids)
    seconds = time.perf_counter() - began
    window = core.info()["window"]
    while core.scheduler.busy:
        core.scheduler.step()
    core.scheduler.land()
    steps = window["engine_spec_verify_steps_total"]
    rounds = max(window["engine_rounds_total"], 1)
    return {
        "tokens_per_s": made / seconds,
        "accept_length": 1 + window["engine_spec_accepted_tokens_total"] / steps if steps else 1.0,
        "round_ms": 1000 * seconds / rounds,
        **{
            f"{part}_ms": 1000 * window[f"engine_{part}_seconds_total"] / rounds
            for part in ("draft", "forward", "extend", "other", "lane_idle")
        },
    }


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean with its 95 % interval over rounds."""
    logs = np.log(ratios)
    if len(logs) < 2:
        return {"ratio": math.exp(logs.mean())}
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return {"ratio": math.exp(logs.mean()), "low": math.exp(logs.mean() - half), "high": math.exp(logs.mean() + half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-head")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, nargs="+", default=[4], help="one figure, or one for each of --streams")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--only", nargs="+", help="contenders whose names begin so; none is always there")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rounds = given.rounds * len(given.streams) if len(given.rounds) == 1 else given.rounds
    if len(rounds) != len(given.streams):
        parser.error(f"--rounds: {len(rounds)} figures for {len(given.streams)} levels")
    chosen = {
        name: settings
        for name, settings in CONTENDERS.items()
        if name == "none" or not given.only or any(name.startswith(only) for only in given.only)
    }
    core = build(
        EngineConfig(
            model=given.model,
            dtype=given.dtype,
            weights=given.weights,
            max_running_requests=max(given.streams),
            spec=SpecConfig(draft_head=given.draft_head),
        )
    )
    tokenizer = load_tokenizer(resolve(given.model))
    texts = [
        tokenizer.render_chat([{"role": "user", "content": prompt.text}])
        for prompt in load_prompts("mixed", split="held_out")
    ]
    prompts = [tokenizer.encode(text, add_special=False) for text in texts]
    rng = np.random.default_rng(0)
    result: dict[str, object] = {}
    for streams, times in zip(given.streams, rounds, strict=True):
        each: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
        for settings in chosen.values():  # warm
            run(core, settings, prompts[:streams], 8)
        order = rng.permutation(len(prompts))
        for number in range(times):
            some = [prompts[order[(number * streams + i) % len(order)]] for i in range(streams)]
            for name in rng.permutation(list(chosen)):
                each[name].append(run(core, chosen[name], some, given.tokens))
        table = {}
        for name, runs in each.items():
            ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs, each["none"], strict=True)]
            means = {key: round(float(np.mean([r[key] for r in runs])), 3) for key in runs[0]}
            table[name] = {**{k: round(v, 3) for k, v in summary(ratios).items()}, **means}
            print(f"{streams:3} {name:20} {json.dumps(table[name])}", flush=True)
        result[str(streams)] = table
    if given.output:
        flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"})
        machine = {"cores": core.info()["effective"]["threads"], "instructions": flags, "system": platform.system()}
        settings = {k: str(v) for k, v in vars(given).items() if k not in ("output", "draft_head")}
        head = core.drafter.about if hasattr(core.drafter, "about") else {}
        about = {"machine": machine, "settings": settings, "head_trained_tokens": head.get("trained_tokens")}
        given.output.write_text(json.dumps({**about, "streams": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
