"""Whole studies of drawn spaces: the model against samplers that know nothing of speculation, schedules included.

    python -m benchmarks.random_spaces --spaces 48 --output benchmarks/results/random_spaces.json

`benchmarks/search.py` replays tables, which have no schedules of draft depths. Here `tuner run` itself searches, tries
schedules and confirms, on the simulated machine in virtual time. Each space is drawn by its number: levels and their
weights, drafters, widths, versions, what needs a launch, a guard, a budget. What counts is what was confirmed: the
speed-up overall in its pairs, or none where nobody won, and the launches and candidates that the study took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SAMPLERS = ("model", "tpe", "exhaustive")

WORSE = 0.02
"""A speed-up that is smaller by so much (log) is worse beyond the noise of eight pairs."""


def drawn(number: int, sampler: str) -> str:
    """The space of this number, as a file."""
    draw = random.Random(number)
    levels = sorted(draw.sample([1, 2, 4, 8, 16, 30, 64, 100], draw.choice([2, 3, 4])))
    if 1 not in levels and draw.random() < 0.7:
        levels[0] = 1
    weights = [draw.choice([1, 1, 2, 3]) for _ in levels]
    drafters = draw.choice([["none", "eagle3"], ["none", "eagle3", "ngram"], ["eagle3"], ["eagle3", "ngram"]])
    widths = draw.choice([[1, 4], [1, 2, 4, 8], [4], [2, 8]])
    more, rules = "", ""
    if draw.random() < 0.4:
        more += "  spec_version: {choices: [v1, v2], when: speculation != 'none'}\n"
        rules = "rules:\n  - {forbid: spec_version == 'v2' and topk > 1, because: overlapped drafting only chains}\n"
    if draw.random() < 0.4:
        more += "  allreduce: {choices: [nccl_ring, nccl_tree, custom]}\n"
    guard = draw.choice(["", ", guard: {min_speedup: 0.9}", ", guard: {min_speedup: 0.97}"])
    return f"""name: drawn{number}
engine: {{kind: simulated, model: llama-70b, args: {{tp: 8}}}}
workload: {{prompts: mixed, max_tokens: 200, temperature: 0, concurrency: {levels}, weights: {weights}}}
baseline: {{speculation: none}}
parameters:
  speculation: {{choices: {json.dumps(drafters)}}}
  num_steps: {{low: 1, high: 5, when: speculation != 'none'}}
  topk: {{choices: {widths}, when: speculation == 'eagle3'}}
{more}{rules}objective: {{maximize: speedup{guard}}}
budget: {{launches: {draw.choice([24, 40, 60])}, candidates: 100}}
profile: full
sampler: {sampler}
simulation: {{profile: pcie_blackwell_8gpu_70b, clock: virtual}}
"""


def studied(folder: Path, number: int, sampler: str) -> dict[str, Any]:
    """What a study of it came to. The studies of a folder share what they know of crashes, as users' do."""
    name = f"drawn{number}"
    (folder / f"{name}.yaml").write_text(drawn(number, sampler), encoding="utf-8")
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def tuner(*words: str) -> str:
        command = [sys.executable, "-m", "tuner", *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout

    tuner("run", f"{name}.yaml", "--quiet")
    overall = json.loads(tuner("recommend", name, "--json"))["overall"]
    with sqlite3.connect(folder / "studies" / name / "study.db") as database:
        (launches,) = database.execute("select count(*) from tuner_launches").fetchone()
        query = "select count(distinct candidate), count(distinct launch) from tuner_blocks where role != 'confirm'"
        candidates, searched = database.execute(query).fetchone()
    winner = overall["winner"]
    return {
        "speedup": round(overall["verdict"]["speedup"], 4) if winner else 1.0,
        "winner": winner["settings"] if winner else None,
        "launches": launches,
        "launches_of_the_search": searched,
        "candidates": candidates - 1,
    }


def summary(spaces: list[dict[str, Any]], samplers: list[str]) -> dict[str, Any]:
    """Each sampler: how far it stays behind the best of all, and what it takes."""
    found = {}
    for sampler in samplers:
        behind = []
        for space in spaces:
            best = max(space[other]["speedup"] for other in samplers)
            behind.append(math.log(best / space[sampler]["speedup"]))
        found[sampler] = {
            "behind_the_best_median": round(statistics.median(behind), 4),
            "behind_the_best_worst": round(max(behind), 4),
            "spaces_worse": sum(each > WORSE for each in behind),
            "launches": sum(space[sampler]["launches"] for space in spaces),
            "launches_of_the_search": sum(space[sampler]["launches_of_the_search"] for space in spaces),
            "candidates": sum(space[sampler]["candidates"] for space in spaces),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", type=int, default=48)
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS))
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    spaces: list[dict[str, Any]] = [{"number": number} for number in range(asked.spaces)]
    for sampler in asked.samplers:
        with tempfile.TemporaryDirectory() as folder:
            for space in spaces:
                space[sampler] = studied(Path(folder), space["number"], sampler)
                print(space["number"], sampler, json.dumps(space[sampler]), flush=True)
    document = {
        "command": f"python -m benchmarks.random_spaces --spaces {asked.spaces}",
        "simulated": True,
        "samplers": summary(spaces, asked.samplers),
        "spaces": spaces,
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")
    print(json.dumps(document["samplers"], indent=1))


if __name__ == "__main__":
    main()
