"""What is compared was measured alike, or does not count: lengths of answers, caches, latencies, and the hour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.toy_study import SPACE, Outcome, ToyMachine, controller, space, study
from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.records import Block, Percentiles
from tuner.space import parse_space
from tuner.study.data import StudyData
from tuner.study.decide import compared, pareto_set, recommendation
from tuner.study.in_memory import simulate
from tuner.study.quality import COMPARED
from tuner.study.score import score
from tuner.study.wear import unworn


def fast(settings: Mapping[str, Any], level: int) -> float:
    return 100.0 * level * (1.3 if settings.get("speculation") == "ngram" else 1.0)


@dataclass
class OddMachine(ToyMachine):
    """A fifth of a request's time is its prompt's; `odd` changes the blocks of candidates that speculate."""

    odd: Callable[[Block], Block] = lambda block: block

    def measure(self, *args: Any, **more: Any) -> Outcome:
        outcome = super().measure(*args, **more)
        if outcome.block is None:
            return outcome
        told = Percentiles(64, 1000.0, 1000.0, 1000.0, None)
        tpot = Percentiles(64, 10.0, 10.0, 10.0, None)
        first = Percentiles(64, 200.0, 200.0, 200.0, None)
        counters = {"output_tokens_sd": 0.0, "cached_share": 0.2}
        block = replace(outcome.block, ttft_ms=first, tpot_ms=tpot, e2e_ms=told, counters=counters)
        speculates = args[1].settings.get("speculation") == "ngram"
        return Outcome(self.odd(block) if speculates else block)


def run(folder: Path, odd: Callable[[Block], Block] = lambda block: block, *overrides: str) -> StudyData:
    store = study(folder, space(SPACE, *overrides))
    try:
        controller(store, OddMachine(speed=fast, odd=odd)).run()
        return store.data()
    finally:
        store.close()


def longer(block: Block) -> Block:
    return replace(block, mean_output_tokens=1.06 * block.mean_output_tokens)


def warmer(block: Block) -> Block:
    return replace(block, counters={**block.counters, "cached_share": 0.3})


def slower_stream(block: Block) -> Block:
    return replace(block, tpot_ms=Percentiles(64, 30.0, 30.0, 30.0, None))


def test_alike_sides_win_and_their_gates_are_kept_with_their_values(tmp_path: Path) -> None:
    data = run(tmp_path)
    assert recommendation(data).overall.winner is not None
    kept = {candidate: facts for (candidate, kind), facts in data.quality.items() if kind == COMPARED}
    assert kept.keys() == compared(data).keys() != set()
    for levels in kept.values():
        assert set(levels) == {"1", "8"}
        for gates in levels.values():
            assert {gate["name"] for gate in gates} == {"output_length_shift", "warm_cache"}
            assert all(gate["ok"] and gate["value"] <= gate["limit"] == 0.01 for gate in gates)


@pytest.mark.parametrize(("odd", "name"), [(longer, "output_length_shift"), (warmer, "warm_cache")])
def test_a_gain_that_length_or_cache_may_have_made_does_not_win(
    tmp_path: Path, odd: Callable[[Block], Block], name: str
) -> None:
    data = run(tmp_path, odd)
    found = recommendation(data)
    assert found.overall.winner is None
    assert all(choice.winner is None for choice in found.per_concurrency)
    assert any(name in line and "left out at concurrency 8" in line for line in found.advice)
    assert pareto_set(data) == (data.baseline.id,)


def test_the_guard_on_the_time_of_each_token_keeps_slow_streams_out(tmp_path: Path) -> None:
    limit = "objective.guard.tpot_p90_ms=20"
    assert recommendation(run(tmp_path / "kept", lambda block: block, limit)).overall.winner is not None
    data = run(tmp_path / "broken", slower_stream, limit)
    found = recommendation(data)
    assert found.overall.winner is None
    assert score(data, data.measured[-1].candidate_id).constraints["tpot_p90"] == pytest.approx(0.5)
    assert recommendation(run(tmp_path / "without", slower_stream)).overall.winner is not None
    told = recommendation(run(tmp_path / "all", lambda block: block, "objective.guard.tpot_p90_ms=5")).advice
    assert any("baseline itself breaks the guard" in line and "tpot_p90_ms" in line for line in told)


COLD = parse_space(
    """
name: cold
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {max_running: 1}
parameters:
  max_running: {low: 1, high: 40}
budget: {launches: 44}
profile: full
""",
    source="cold.yaml",
)


def test_between_two_baselines_drift_is_estimated_and_removed() -> None:
    """Nothing differs, every candidate has a launch of its own, and the machine slows down by a fifth meanwhile."""
    data = simulate(COLD, BlockSource(lambda _settings, level: 100.0 * level, Noise(0, 0, 0.2, 0), 1), 1)
    last = max(turn.order for turns in data.baseline_turns.values() for turn in turns)
    seen: list[float] = []
    left: list[float] = []
    for trial in data.measured:
        found = score(data, trial.candidate_id)
        if all(data.blocks[pair.candidate_block].order < last for pair in data.screened[trial.candidate_id]):
            seen.append(found.value)
            left.append(unworn(data, trial.candidate_id, found).value)
    assert len(seen) >= 12
    assert min(seen) < -0.04
    assert max(map(abs, left)) < 0.002
