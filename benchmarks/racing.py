"""What racing saves, and whether it costs the answer: `python -m benchmarks.racing --studies 200 --output FILE`.

Whole studies on simulated blocks, on a virtual clock, each once with racing and once with whole blocks for everyone,
from the same seeds. Candidates are drawn at random where a real study asks its sampler. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy import stats

from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.space import parse_space
from tuner.study.data import StudyData
from tuner.study.decide import recommendation
from tuner.study.in_memory import simulate
from tuner.study.policy import POLICIES

SPACE = """
name: racing
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8, 32]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram, eagle3]}
  num_steps: {low: 1, high: 8, when: speculation != 'none'}
  topk: {choices: [1, 4], when: speculation == 'eagle3'}
budget: {launches: 60, candidates: 24}
profile: full
"""
HOT = frozenset({"speculation", "num_steps", "topk"})


def spread(settings: Mapping[str, Any], level: int) -> float:
    """Speculation pays less with every further stream, the more so for trees; three to five steps are best."""
    rate = 100.0 * level**0.7
    if settings.get("speculation", "none") == "none":
        return rate
    steps = settings["num_steps"]
    top = {"ngram": 0.12, "eagle3": 0.30}[settings["speculation"]] + (0.05 if settings.get("topk") == 4 else 0.0)
    cost = {1: 0.0, 8: 0.08, 32: 0.25}[level] * (1.6 if settings.get("topk") == 4 else 1.0)
    return rate * (1 + top - 0.012 * (steps - 4) ** 2 - cost * (0.4 + 0.1 * steps))


def alike(settings: Mapping[str, Any], level: int) -> float:
    """Nothing differs from the baseline."""
    return 100.0 * level**0.7


TRUTHS = {"candidates differ": spread, "nothing differs": alike}


def value(truth: Any, settings: Mapping[str, Any], data: StudyData) -> float:
    """The true mean speed-up over the levels."""
    base = data.baseline.settings
    return statistics.geometric_mean([truth(settings, at) / truth(base, at) for at in data.levels])


def study_figures(data: StudyData, truth: Any) -> dict[str, float]:
    found = recommendation(data).overall
    best = max(value(truth, c.settings, data) for c in data.candidates.values())
    chosen = found.winner.settings if found.winner is not None else data.baseline.settings
    search = [b.block for b in data.blocks.values() if b.role != "confirm"]
    return {
        "search_blocks": sum(block.window_s for block in search) / 35.0,
        "search_hours": sum(block.warmup_s + block.window_s for block in search) / 3600,
        "study_hours": data.elapsed_s / 3600,
        "left_the_race": sum(bool(trial.why) for trial in data.measured),
        "candidates": len(data.measured),
        "winner": float(found.winner is not None),
        "regret": 1 - value(truth, chosen, data) / best,
    }


def compare(truth: Any, hot: frozenset[str], studies: int, seed: int, noise: Noise) -> dict[str, Any]:
    space = parse_space(SPACE, source="racing.yaml")
    found: dict[str, Any] = {}
    for name, look in (("racing", POLICIES["full"].look), ("whole blocks", 0.0)):
        runs = []
        for i in range(studies):
            source = BlockSource(truth, noise, seed + i)
            policy = replace(POLICIES["full"], look=look)
            runs.append(study_figures(simulate(space, source, seed + i, policy=policy, hot=hot), truth))
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        winners = int(sum(run["winner"] for run in runs))
        share = stats.binomtest(winners, studies).proportion_ci(0.95, "exact")
        regrets = sorted(run["regret"] for run in runs)
        found[name] = {
            **{key: round(number, 4) for key, number in mean.items()},
            "winner_95": [round(share.low, 4), round(share.high, 4)],
            "regret_p90": round(regrets[int(0.9 * (studies - 1))], 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.racing " + " ".join(sys.argv[1:]),
        "simulated": True,
        "note": "search_blocks: windows of the search in units of a whole one; regret of the decision, truth known",
        "runs": {},
    }
    for factor in (1, 3):
        for name, truth in TRUTHS.items():
            for kind, hot in (("servers kept", HOT), ("a launch each", frozenset[str]())):
                noise = Noise().times(factor)
                key = f"{name}, {kind}, noise x{factor}"
                result["runs"][key] = compare(truth, hot, chosen.studies, 1_000_000 * chosen.seed, noise)
                print(key, json.dumps(result["runs"][key], indent=1), flush=True)
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
