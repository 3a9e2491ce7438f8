"""Whether a setting that was changed on a running engine costs what it costs after a fresh launch.

Two engines in one process: one launched with the settings, one launched with others and changed to them. They run the
same prompts in turn (A B B A); what is compared is the time per round.

    python -m benchmarks.reconfigure_cost --pairs 12
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.speculation_cpu import CONTENDERS, run
from engine.build import build
from engine.config import EngineConfig, SpecConfig
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
        cores = []
        for launched in (after, before):
            spec = SpecConfig(draft_head=given.draft_head).merged(CONTENDERS[launched])
            cores.append(build(EngineConfig(model=given.model, max_running_requests=given.streams, spec=spec)))
        run(cores[1], CONTENDERS[before], prompts[: given.streams], 16)
        reconfigure(cores[1], CONTENDERS[after])
        ratios = []
        for pair in range(given.pairs):
            some = [prompts[(pair * given.streams + i) % len(prompts)] for i in range(given.streams)]
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            took = {i: run(cores[i], CONTENDERS[after], some, given.tokens)["round_ms"] for i in order}
            ratios.append(took[1] / took[0])
        logs = np.log(ratios)
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
        low, middle, high = (round(math.exp(logs.mean() + sign * half), 4) for sign in (-1, 0, 1))
        result[f"{before} -> {after}"] = {"changed_over_fresh": middle, "low": low, "high": high}
        print(f"{before:>10} -> {after:16} {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if given.output:
        settings = {"streams": given.streams, "pairs": given.pairs, "tokens": given.tokens}
        given.output.write_text(json.dumps({"settings": settings, "changes": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
