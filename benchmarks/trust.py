"""How often a study errs, on simulated truth: `python benchmarks/trust.py --studies 1000 --output FILE`.

The noise is set, so the truth is known. Planner, pairs, judge and the default full budget are the tuner's own; blocks
come from the simulator, and candidates are drawn at random where a real study asks Optuna. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scipy import stats

from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.judge.calibration import MAX_PAIRS, Calibration, Window, calibrate
from tuner.judge.intervals import t_interval
from tuner.judge.verdict import overall_log_ratios
from tuner.space import Space, parse_space
from tuner.study.decide import recommendation
from tuner.study.in_memory import simulate
from tuner.study.policy import POLICIES
from tuner.study.score import weights

SPACE = """
name: trust
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {low: 1, high: 6, when: speculation != 'none'}
profile: full
"""

TRUE_GAIN = 0.05
GAINING_STEPS = 3


def speed(gain: float, settings: Mapping[str, Any], level: int) -> float:
    rate = 100.0 * level**0.7
    return rate * (1 + gain) if settings.get("num_steps") == GAINING_STEPS else rate


def bounds(count: int, of: int) -> dict[str, float]:
    interval = stats.binomtest(count, of).proportion_ci(0.95, "exact")
    return {"count": count, "of": of, "share": count / of, "low": interval.low, "high": interval.high}


def calibrated(space: Space, noise: Noise, seed: int) -> Calibration:
    """What `tuner calibrate` would say of a machine with this noise: 8 launches of 2 windows."""
    source = BlockSource(lambda settings, level: speed(0.0, settings, level), noise, seed)
    windows = []
    for launch in range(8):
        source.launch()
        for number in range(2):
            for level in space.workload.concurrency:
                rate = source.block(space.baseline.settings, level, "screen").tokens_per_s
                windows.append(Window(launch, level, number, rate))
    return calibrate(windows, space.workload.weight_of)


def scenario(
    space: Space, noise: Noise, gain: float, studies: int, seed: int, *, calibrate_first: bool = False
) -> dict[str, Any]:
    winners = right = at_level = covered = intervals = stated_covered = stated = 0
    errors: list[float] = []
    confidences: list[float] = []
    pairs: list[int] = []
    began = time.perf_counter()
    for i in range(studies):
        source = BlockSource(lambda settings, level: speed(gain, settings, level), noise, seed + i)
        chosen, policy = space, POLICIES[space.profile]
        if calibrate_first:
            asked = calibrated(space, noise, seed + 250_000 + i)
            policy = replace(policy, pairs=asked.pairs or MAX_PAIRS)
            chosen = parse_space(SPACE, source="trust.yaml", overrides=(f"budget.launches={asked.launches}",))
            pairs.append(policy.pairs)
        data = simulate(chosen, source, seed + i, policy=policy)
        found = recommendation(data)
        winner = found.overall.winner
        at_level += winner is None and any(choice.winner is not None for choice in found.per_concurrency)
        if winner is not None and found.overall.verdict is not None and found.overall.verdict.speedup is not None:
            winners += 1
            truth = speed(gain, winner.settings, 1) / speed(gain, space.baseline.settings, 1)
            right += truth > 1
            errors.append(found.overall.verdict.speedup / truth - 1)
        for choice in (found.overall, *found.per_concurrency):
            verdict = choice.verdict
            if verdict is None or verdict.low is None or verdict.high is None:
                continue
            settings = data.candidates[verdict.candidate_id].settings
            truth = speed(gain, settings, 1) / speed(gain, space.baseline.settings, 1)
            stated += 1
            stated_covered += verdict.low <= truth <= verdict.high
            confidences.append(verdict.confidence)
        for candidate_id in {p.candidate_id for p in data.pairs if p.role == "confirm"}:
            confirmed = [p for p in data.pairs if p.role == "confirm" and p.candidate_id == candidate_id]
            settings = data.candidates[candidate_id].settings
            truth = math.log(speed(gain, settings, 1) / speed(gain, space.baseline.settings, 1))
            claims = [[p.log_ratio for p in confirmed if p.concurrency == level] for level in data.levels]
            for ratios in (*claims, overall_log_ratios(confirmed, weights(data))):
                interval = t_interval(ratios, 0.95)
                intervals += 1
                covered += interval.low <= truth <= interval.high
    return {
        "true_gain": gain,
        "studies": studies,
        "named_a_winner": bounds(winners, studies),
        "named_the_right_winner": bounds(right, studies),
        "no_winner_overall_but_at_a_level": bounds(at_level, studies),
        "coverage_of_95_percent_intervals": bounds(covered, intervals),
        "coverage_of_stated_intervals": bounds(stated_covered, stated),
        "mean_stated_confidence": statistics.fmean(confidences),
        "winner_quoted_minus_true": statistics.fmean(errors) if errors else None,
        "winner_quoted_sd": statistics.stdev(errors) if len(errors) > 1 else None,
        "mean_pairs": statistics.fmean(pairs) if pairs else POLICIES[space.profile].pairs,
        "studies_per_minute": round(60 * studies / (time.perf_counter() - began)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calibrated", action="store_true", help="three times the noise, each study calibrated first")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    space = parse_space(SPACE, source="trust.yaml")
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "simulated": True,
        "budget": space.budget.model_dump(),
        "profile": space.profile,
        "intervals_note": "of one study share its blocks; bounds of coverage take them as independent",
        "runs": {},
    }
    if chosen.calibrated:
        noise = Noise().times(3)
        result["runs"]["noise x3, calibrated"] = {
            "noise": asdict(noise),
            "what": "each study after a calibration of its own, with the pairs and launches that this asks for",
            "one gains 5 %": scenario(
                space, noise, TRUE_GAIN, chosen.studies, 1_000_000 * chosen.seed + 500_000, calibrate_first=True
            ),
        }
    else:
        for factor in (1, 3):
            noise = Noise().times(factor)
            result["runs"][f"noise x{factor}"] = {
                "noise": asdict(noise),
                "nothing differs": scenario(space, noise, 0.0, chosen.studies, 1_000_000 * chosen.seed),
                "one gains 5 %": scenario(space, noise, TRUE_GAIN, chosen.studies, 1_000_000 * chosen.seed + 500_000),
            }
    text = json.dumps(result, indent=1) + "\n"
    if chosen.output:
        chosen.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
