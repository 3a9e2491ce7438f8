from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuner.engines.simulated.machine import Work, accept_length, fault_at_start, plan, predict
from tuner.engines.simulated.profiles import profile_named
from tuner.records import Candidate
from tuner.search.crashes import Crashes
from tuner.search.evidence import Evidence, Measurement
from tuner.search.guide import Costs, Goal, Guide, pays
from tuner.search.shape import PLAIN, Shape, shape_at
from tuner.search.surrogate import Surrogate, spread
from tuner.space import parse_space
from tuner.space.space import visible

SPACE = parse_space(
    """
name: searched
engine: {kind: simulated, model: any, args: {tp: 8}}
workload: {concurrency: [1, 8, 30]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram, eagle3]}
  num_steps: {low: 1, high: 6, when: speculation != 'none'}
  topk: {choices: [1, 2, 4], when: speculation == 'eagle3'}
  spec_version: {choices: [v1, v2], when: speculation != 'none'}
  disable_batch_threshold: {choices: [never, 8], when: speculation != 'none'}
  allreduce: {choices: [nccl_ring, nccl_tree]}
""",
    source="searched.yaml",
)
LISTED = SPACE.listed() or {}
CANDIDATES = tuple(listed.candidate for listed in LISTED.values())
LEVELS = SPACE.workload.concurrency
GOAL = Goal(SPACE.workload.weights)
PROFILE = profile_named("pcie_blackwell_8gpu_70b")

Truth = Callable[[Mapping[str, Any], int], float]


def simulated(settings: Mapping[str, Any], level: int) -> float:
    return predict(PROFILE, {**SPACE.args, **settings}, level, Work()).tokens_per_s


def guide() -> Guide:
    return Guide(CANDIDATES, SPACE.baseline, LEVELS, visible(SPACE.args))


def measured(candidate: Candidate, truth: Truth, draw: random.Random, accept: float = 1.0) -> list[Measurement]:
    found = []
    for level in LEVELS:
        length = accept_length(plan(PROFILE, {**SPACE.args, **candidate.settings}, level))
        rate = truth(candidate.settings, level) * math.exp(draw.gauss(0, 0.012))
        found.append(Measurement(candidate, level, rate, length * accept if length > 1 else None))
    return found


def crashes(candidate: Candidate) -> bool:
    return fault_at_start(PROFILE, {**SPACE.args, **candidate.settings}) is not None


def value(candidate: Candidate, truth: Truth) -> float:
    ratios = [truth(candidate.settings, at) / truth(SPACE.baseline.settings, at) for at in LEVELS]
    return float(np.mean(np.log(ratios)))


def searched(truth: Truth, launches: int, seed: int = 1, accept: float = 1.0) -> tuple[float, list[Candidate]]:
    """Regret after so many launches, and what was tried."""
    draw, chosen = random.Random(seed), guide()
    blocks = measured(SPACE.baseline, truth, draw, accept)
    failed: list[Candidate] = []
    tried: list[Candidate] = [SPACE.baseline]
    for _ in range(launches):
        found = chosen.suggest(Evidence(tuple(blocks), tuple(failed)), {c.id for c in tried}, GOAL)
        assert found is not None
        tried.append(found.candidate)
        if crashes(found.candidate):
            failed.append(found.candidate)
        else:
            blocks += measured(found.candidate, truth, draw, accept)
    best = max(value(c, truth) for c in CANDIDATES if not crashes(c))
    return best - max(value(c, truth) for c in tried if c not in failed), tried


@pytest.mark.parametrize(
    ("settings", "running", "shape"),
    [
        ({"speculation": "none"}, 8, PLAIN),
        ({"speculation": "ngram", "num_steps": 3}, 8, Shape("ngram", 3, 1, 4, False)),
        ({"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8}, 9, PLAIN),
        ({"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8}, 8, Shape("ngram", 3, 1, 4, False)),
        ({"speculation": "ngram", "num_steps": 3, "steps_by_batch": "1:0,8:3"}, 7, PLAIN),
        ({"speculation": "ngram", "num_steps": 3, "steps_by_batch": "1:0,8:2"}, 9, Shape("ngram", 2, 1, 3, False)),
        (
            {"speculation": "eagle3", "num_steps": 3, "topk": 4, "spec_version": "v2"},
            1,
            Shape("eagle3", 3, 4, 16, True),
        ),
    ],
)
def test_settings_come_to_a_shape(settings: dict[str, Any], running: int, shape: Shape) -> None:
    assert shape_at(settings, running) == shape


def test_a_few_candidates_tell_the_speed_of_all() -> None:
    draw, chosen = random.Random(2), guide()
    some = draw.sample([c for c in CANDIDATES if not crashes(c)], 14)
    blocks = [one for c in (SPACE.baseline, *some) for one in measured(c, simulated, draw)]
    model = Surrogate(chosen.catalogue, blocks, chosen.fixed)
    rates = model.log_rates()
    truth = np.log([[simulated(c.settings, at) for at in LEVELS] for c in CANDIDATES])
    error = rates[: len(CANDIDATES)] - truth
    assert np.median(np.abs(error)) < 0.03
    every = np.arange(len(CANDIDATES))
    sd = spread(model.covariances(every), GOAL.weights)
    covered = np.abs(error @ np.array(GOAL.weights)) < 2 * sd
    assert covered.mean() > 0.8  # so its uncertainty means something


def test_what_was_measured_is_predicted_as_measured() -> None:
    chosen = guide()
    blocks = measured(SPACE.baseline, simulated, random.Random(1))
    model = Surrogate(chosen.catalogue, blocks, chosen.fixed)
    place = chosen.place[SPACE.baseline.id]
    assert model.log_rates()[place] == pytest.approx([math.log(one.tokens_per_s) for one in blocks], abs=0.03)
    assert spread(model.covariances(np.array([place])), GOAL.weights)[0] < 0.02


def test_the_search_is_within_two_percent_after_a_tenth_of_the_candidates() -> None:
    regret, tried = searched(simulated, len(CANDIDATES) // 10)
    assert regret < 0.02
    assert len({c.id for c in tried}) == len(tried)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_prediction_that_is_wrong_by_two_everywhere_costs_launches_and_not_the_answer(factor: float) -> None:
    """All that speculates is so many times as fast as any step time and accept length would allow."""

    def strange(settings: Mapping[str, Any], level: int) -> float:
        off = 1.0 if shape_at(settings, level).depth == 0 else factor
        return simulated(settings, level) * off

    regret, _ = searched(strange, 16)
    assert regret < 0.02


def test_accept_lengths_that_are_told_wrong_by_two_are_no_harm() -> None:
    regret, _ = searched(simulated, 16, accept=2.0)
    assert regret < 0.02


def test_a_setting_that_physics_does_not_know_is_learned() -> None:
    def unknown(settings: Mapping[str, Any], level: int) -> float:
        return 100.0 * level * {"a": 1.0, "b": 0.7, "c": 1.3}[str(settings.get("flag", "a"))]

    candidates = tuple(Candidate({"flag": flag, "other": n}) for flag in "abc" for n in range(8))
    baseline = Candidate({"flag": "a", "other": 0})
    chosen = Guide(candidates, baseline, (1, 8))
    draw = random.Random(3)
    blocks = []
    tried = [baseline]
    for _ in range(6):
        blocks += [
            Measurement(tried[-1], at, unknown(tried[-1].settings, at) * math.exp(draw.gauss(0, 0.01))) for at in (1, 8)
        ]
        found = chosen.suggest(Evidence(tuple(blocks)), {c.id for c in tried}, Goal((0.5, 0.5)))
        assert found is not None
        tried.append(found.candidate)
    assert any(c.settings["flag"] == "c" for c in tried[:5])


def test_equal_evidence_gives_equal_suggestions() -> None:
    assert searched(simulated, 5)[1] == searched(simulated, 5)[1]


def test_what_a_running_server_can_become_is_preferred_where_it_is_nearly_as_promising() -> None:
    chosen, draw = guide(), random.Random(1)
    evidence = Evidence(tuple(measured(SPACE.baseline, simulated, draw)))
    running = {"speculation": "ngram", "num_steps": 2, "allreduce": "nccl_tree"}
    hot = frozenset({"speculation", "num_steps", "topk", "spec_version", "disable_batch_threshold"})
    costs = Costs(launch_s=600.0, blocks_s=60.0, hot=hot, running=running)
    found = chosen.suggest(evidence, {SPACE.baseline.id}, GOAL, costs)
    assert found is not None
    assert found.candidate.settings["allreduce"] == "nccl_tree"
    assert costs.of(found.candidate.settings) == 60.0
    kept = replace(costs, stay=True)
    reach = {c.id for c in CANDIDATES if c.settings["allreduce"] == "nccl_tree"}
    assert chosen.suggest(evidence, reach, GOAL, kept) is None


def test_a_guard_keeps_the_search_where_no_level_is_slow() -> None:
    def uneven(settings: Mapping[str, Any], level: int) -> float:
        rate = simulated(SPACE.baseline.settings, level)
        deep = settings.get("num_steps", 0)
        return rate * (1 + 0.05 * deep) if level > 1 else rate * (1 - 0.1 * max(0, deep - 2))

    draw, chosen = random.Random(1), guide()
    goal = Goal(SPACE.workload.weights, least=math.log(0.97))
    blocks, tried = measured(SPACE.baseline, uneven, draw), [SPACE.baseline]
    for _ in range(12):
        found = chosen.suggest(Evidence(tuple(blocks)), {c.id for c in tried}, goal)
        assert found is not None
        tried.append(found.candidate)
        blocks += measured(found.candidate, uneven, draw)
    late = [c.settings.get("num_steps", 0) for c in tried[6:]]
    assert sum(steps > 2 for steps in late) <= 3  # of seven, and four in six candidates are such


def test_nothing_to_gain_is_said() -> None:
    def equal(settings: Mapping[str, Any], level: int) -> float:
        return 100.0 * level / (1 + 0.5 * shape_at(settings, level).depth)

    draw, chosen = random.Random(1), guide()
    blocks, tried = measured(SPACE.baseline, equal, draw), [SPACE.baseline]
    for _ in range(12):
        found = chosen.suggest(Evidence(tuple(blocks)), {c.id for c in tried}, GOAL)
        assert found is not None
        tried.append(found.candidate)
        blocks += measured(found.candidate, equal, draw)
    assert not pays(chosen.suggest(Evidence(tuple(blocks)), {c.id for c in tried}, GOAL))
    assert chosen.suggest(Evidence(tuple(blocks)), {c.id for c in CANDIDATES} | {SPACE.baseline.id}, GOAL) is None


def test_where_nothing_promises_anything_the_search_looks_at_what_works() -> None:
    """A search that may not end yet spends its launches on what can teach it, not on what crashes."""

    def slower(settings: Mapping[str, Any], level: int) -> float:
        return 100.0 * level / (1 + 0.5 * shape_at(settings, level).depth)

    def bad(one: Candidate) -> bool:
        return one.settings.get("allreduce") == "nccl_tree" or one.settings.get("topk", 1) > 1

    draw, chosen = random.Random(1), guide()
    blocks, tried = measured(SPACE.baseline, slower, draw), [SPACE.baseline]
    failed: list[Candidate] = []
    late: list[bool] = []
    for _ in range(24):
        found = chosen.suggest(Evidence(tuple(blocks), tuple(failed)), {c.id for c in tried}, GOAL)
        assert found is not None
        tried.append(found.candidate)
        if not pays(found):
            late.append(bad(found.candidate))
        if bad(found.candidate):
            failed.append(found.candidate)
        else:
            blocks += measured(found.candidate, slower, draw)
    assert len(late) > 10
    assert sum(late) <= 3


TOY = [
    {"speculation": "eagle3", "num_steps": steps, "topk": topk, "num_draft_tokens": rows}
    for steps in range(1, 8)
    for topk in (1, 2, 4, 8)
    for rows in (8, 16, 32)
]


def test_crashes_teach_where_not_to_go() -> None:
    """Half of 84 combinations crash, by two rules that nobody tells: rows against depth, and width against depth."""

    def bad(one: Mapping[str, Any]) -> bool:
        return one["num_draft_tokens"] >= 32 or (one["topk"] == 8 and one["num_steps"] >= 4)

    model = Crashes(TOY, (1, 8))
    draw = random.Random(1)
    order = draw.sample(range(len(TOY)), 20)
    failed = [i for i in order if bad(TOY[i])]
    worked = [i for i in order if not bad(TOY[i])]
    chance = model.works(failed, worked)
    others = [i for i in range(len(TOY)) if i not in order]
    good = np.mean([chance[i] for i in others if not bad(TOY[i])])
    poor = np.mean([chance[i] for i in others if bad(TOY[i])])
    assert good > 0.6
    assert poor < 0.35
    assert all(chance[i] == 0 for i in failed)


def test_a_suggestion_among_five_thousand_stored_candidates_is_quick() -> None:
    draw = random.Random(1)
    candidates = tuple(
        Candidate({"speculation": "eagle3", "num_steps": d, "topk": k, "spec_version": v, "flag": f, "size": s})
        for d in range(1, 9)
        for k in (1, 2, 4, 8)
        for v in ("v1", "v2")
        for f in "abcdefghij"
        for s in range(8)
    )
    assert len(candidates) >= 5000
    chosen = Guide(candidates, Candidate({"speculation": "none"}), (1, 8, 32))
    stored = candidates[:5000]
    blocks = tuple(Measurement(c, at, 100.0 * at * math.exp(draw.gauss(0, 0.1))) for c in stored for at in (1, 8, 32))
    evidence = Evidence(blocks, candidates[5000:5060])
    tried = {c.id for c in (*stored, *candidates[5000:5060])}
    chosen.suggest(evidence, tried, GOAL)
    began = time.process_time()
    assert chosen.suggest(evidence, tried, GOAL) is not None
    took = time.process_time() - began
    assert took < 2.0, f"{took:.2f} s"  # 0.3 s on a quiet machine; the bound leaves room for a busy one
    print(f"suggestion: {took:.2f} s")
