from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.engines.base import get_engine
from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.judge.calibration import MAX_PAIRS, Window, calibrate
from tuner.space import Space, parse_space
from tuner.study.calibrate import calibration_key, keep, known_pairs, measure_noise
from tuner.study.in_memory import simulate
from tuner.study.policy import policy_of
from tuner.study.simulated_world import world_of

TEXT = """
name: quiet
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {low: 1, high: 4, when: speculation != 'none'}
simulation: {clock: virtual}
"""
NOW = {"engine_version": "1", "hardware": {"cpu": "c"}}


def space(*overrides: str) -> Space:
    return parse_space(TEXT, source="quiet.yaml", overrides=overrides)


def windows(launch_sd: float, window_sd: float, launches: int, each: int) -> list[Window]:
    draw = random.Random(4)
    found = []
    for launch in range(launches):
        effect = draw.gauss(0, launch_sd)
        for level in (1, 8):
            for number in range(each):
                rate = 100 * level * math.exp(effect + draw.gauss(0, window_sd))
                series = tuple(rate * math.exp(draw.gauss(0, 0.05)) for _ in range(40))
                found.append(Window(launch, level, number, rate, series))
    return found


def test_the_components_of_noise_are_told_apart() -> None:
    found = calibrate(windows(0.02, 0.01, 400, 4), {1: 0.5, 8: 0.5})
    for level in found.levels:
        assert level.between_windows == pytest.approx(0.01, rel=0.1)
        assert level.between_launches == pytest.approx(0.02, rel=0.15)
        assert level.within_window == pytest.approx(0.05 / math.sqrt(40), rel=0.15)
    # Two launches, each with its effect and the mean of two windows.
    assert found.pair_sd == pytest.approx(math.sqrt(2 * (0.02**2 + 0.01**2 / 2)), rel=0.1)


def test_drift_over_the_hours_is_in_no_pair() -> None:
    steady = windows(0.0, 0.005, 40, 1)
    drifting = [replace(w, tokens_per_s=w.tokens_per_s * (1 + 0.1 * w.launch / 40)) for w in steady]
    weights = {1: 0.5, 8: 0.5}
    assert calibrate(drifting, weights).pair_sd == pytest.approx(calibrate(steady, weights).pair_sd, rel=0.2)


def test_more_noise_asks_for_more_pairs_until_none_would_do() -> None:
    weights = {1: 0.5, 8: 0.5}
    counts = [calibrate(windows(0.0, sd, 40, 1), weights).pairs for sd in (0.002, 0.02, 0.03, 0.3)]
    assert counts[0] == 4
    assert counts[-1] is None
    assert sorted(counts[:-1]) == counts[:-1]  # type: ignore[type-var]
    assert calibrate(windows(0.0, 0.02, 40, 1), weights).detectable <= 0.05
    assert counts[2] is None or counts[2] <= MAX_PAIRS


def test_three_launches_are_no_calibration() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        calibrate(windows(0.0, 0.01, 3, 1), {1: 0.5, 8: 0.5})


def test_a_kept_calibration_is_found_for_the_same_and_for_nothing_else(tmp_path: Path) -> None:
    chosen = space()
    measured, simulated = measure_noise(
        chosen, get_engine("simulated"), world_of(chosen, 1), launches=6, windows=2, seed=0, logs=tmp_path
    )
    assert simulated
    assert len(measured) == 6 * 2 * 2
    assert known_pairs(chosen, NOW, tmp_path) is None
    found, path = keep(chosen, NOW, measured, simulated=simulated, gain=0.05, folder=tmp_path)
    assert known_pairs(chosen, NOW, tmp_path) == found.pairs
    stored = json.loads(path.read_text())
    assert stored["simulated"] is True
    again = calibrate([Window(**{**w, "series": tuple(w["series"])}) for w in stored["windows"]], {1: 0.5, 8: 0.5})
    assert again == found  # all that was said can be computed again from what was kept
    assert known_pairs(space("workload.concurrency=[1, 16]"), NOW, tmp_path) is None
    assert known_pairs(chosen, {**NOW, "engine_version": "2"}, tmp_path) is None
    noisy = [replace(each, tokens_per_s=each.tokens_per_s * (1 + each.launch)) for each in measured]
    hopeless, path = keep(chosen, NOW, noisy, simulated=simulated, gain=0.05, folder=tmp_path)
    assert hopeless.pairs is None
    assert known_pairs(chosen, NOW, tmp_path) == MAX_PAIRS, "where none would do, as many as are of use"
    path.write_text("{torn")
    assert known_pairs(chosen, NOW, tmp_path) is None
    assert calibration_key(chosen, NOW) == calibration_key(space("name=other"), NOW)


def test_a_study_takes_its_pairs_from_the_calibration_within_its_budget() -> None:
    data = simulate(space(), BlockSource(lambda _s, _l: 100.0, Noise(), 1), 1)
    assert policy_of(data).pairs == 8
    assert policy_of(replace(data, fingerprint={"pairs": 5})).pairs == 5
    assert policy_of(replace(data, fingerprint={"pairs": 16})).pairs == 8  # of 24 launches
    large = replace(data, budget=replace(data.budget, launches=60), fingerprint={"pairs": 16})
    assert policy_of(large).pairs == 16
    largest = replace(data, budget=replace(data.budget, launches=96), fingerprint={"pairs": MAX_PAIRS})
    assert policy_of(largest).pairs == MAX_PAIRS
