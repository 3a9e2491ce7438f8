"""Whether a setting that was changed on a running engine costs what it costs after a fresh launch.

Two engines in one process: one launched with the settings, one launched with others and changed to them. Both serve
the same prompts, so that a round of one does exactly the work of the same round of the other, and they take turns of a
few rounds, in an order that alternates (A B B A). What is compared is the time of the same rounds; the median of the
ratios, with the interval that order statistics give it, is not moved by a host that stops now and then.

    python -m benchmarks.reconfigure_cost --output benchmarks/results/reconfigure_cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.speculation_cpu import CONTENDERS, run
from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig, parse_schedule
from engine.ipc.messages import SamplingParams, Submit
from engine.model.source import resolve
from engine.reconfigure import reconfigure
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts

CHANGES = [
    ("none", "ngram 5"),
    ("ngram 8", "none"),
    ("ngram 3", "eagle3 3"),
    ("eagle3 3", "tree 16"),
    ("tree 16", "hybrid 3"),
    ("none", "hybrid 3 v2"),
    ("eagle3 2", "hybrid by batch"),
]


_ROUNDS = 4  # of a turn


def launched_with(name: str, draft_head: str | None) -> SpecConfig:
    """The settings of a contender, as a launch has them."""
    settings: dict[str, Any] = dict(CONTENDERS[name])
    if "steps_by_batch" in settings:
        settings["steps_by_batch"] = parse_schedule(settings["steps_by_batch"])
    return SpecConfig(draft_head=draft_head).merged(settings)


def side_by_side(cores: Sequence[Core], prompts: Sequence[Sequence[int]], tokens: int, first: int) -> list[float]:
    """Times of the second engine's turns over those of the first's; `first` begins."""
    for core in cores:
        core.prefix.flush()
        for rid, prompt in enumerate(prompts):
            core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True)))
        while any(not request.decoding for request in core.scheduler._running.values()) or core.scheduler.waiting:
            core.scheduler.step()
        core.scheduler.land()
    ratios, turn = [], first
    while all(core.scheduler.running == len(prompts) for core in cores):
        took = [0.0, 0.0]
        for i in (turn, 1 - turn):
            began = time.perf_counter()
            for _ in range(_ROUNDS):
                if cores[i].scheduler.busy:
                    cores[i].scheduler.step()
            cores[i].scheduler.land()
            took[i] = time.perf_counter() - began
        if all(core.scheduler.running == len(prompts) for core in cores):
            ratios.append(took[1] / took[0])
        turn = 1 - turn
    for core in cores:
        while core.scheduler.busy:
            core.scheduler.step()
    return ratios


def median(values: Sequence[float]) -> dict[str, float]:
    """With its 95 % interval by order statistics, which asks nothing of the distribution."""
    low, high = (int(rank) for rank in stats.binom.ppf((0.025, 0.975), len(values), 0.5))
    ordered = sorted(values)
    found = {"changed_over_fresh": float(np.median(ordered)), "low": ordered[max(0, low - 1)], "high": ordered[high]}
    return {name: round(value, 4) for name, value in found.items()} | {"turns": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-head")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve(given.model))
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": p.text}]), add_special=False)
        for p in load_prompts("mixed", split="held_out")
    ]
    result = {}
    for before, after in CHANGES:
        specs = [launched_with(name, given.draft_head) for name in (after, before)]
        cores = [build(EngineConfig(model=given.model, max_running_requests=given.streams, spec=s)) for s in specs]
        run(cores[1], CONTENDERS[before], prompts[: given.streams], 16)
        for core in cores:
            run(core, CONTENDERS[after], prompts[: given.streams], 16)  # the second is changed here
        ratios = []
        for pair in range(given.pairs):
            some = [prompts[(pair * given.streams + i) % len(prompts)] for i in range(given.streams)]
            ratios += side_by_side(cores, some, given.tokens, pair % 2)
        told = result[f"{before} -> {after}"] = median(ratios)
        print(f"{before:>10} -> {after:16} {json.dumps(told)}", flush=True)
        for core in cores:
            reconfigure(core, {"spec_version": "v1"})  # ends its lane
    if given.output:
        settings = {"streams": given.streams, "pairs": given.pairs, "tokens": given.tokens}
        given.output.write_text(json.dumps({"settings": settings, "changes": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
