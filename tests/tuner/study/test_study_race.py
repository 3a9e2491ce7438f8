"""The race of the search: who cannot win is looked at in short and no more, with the reason kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.racing import HOT, SPACE, alike, spread, value
from tests.tuner.study.hot_toy import HotEngine, HotMachine
from tests.tuner.study.toy_study import SPACE as TOY
from tests.tuner.study.toy_study import Outcome, ToyMachine, controller, space, study
from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.judge.racing import Figure, cannot_beat, level_figure
from tuner.records import Failure
from tuner.report.view import study_view
from tuner.space import parse_space
from tuner.study.data import StudyData
from tuner.study.decide import recommendation
from tuner.study.in_memory import simulate
from tuner.study.looks import OUT, looks_saved
from tuner.study.policy import POLICIES, Policy

RACING = Policy(pairs=2, look=1 / 3)
THE_SPACE = parse_space(SPACE, source="racing.yaml")


def test_only_what_lies_below_the_best_at_its_optimistic_end_is_given_up() -> None:
    best = Figure(0.20, 0.01)
    assert cannot_beat(Figure(0.10, 0.01), best)
    assert not cannot_beat(Figure(0.19, 0.01), best)
    assert not cannot_beat(Figure(0.10, 0.06), best), "one that is not known well is measured further"
    assert cannot_beat(Figure(-0.05, 0.01), None), "the baseline is always in the race"
    assert not cannot_beat(Figure(0.005, 0.01), None)


def test_more_seconds_make_a_figure_surer_and_a_restless_window_less_sure() -> None:
    whole = (30.0, ())
    short = level_figure([0.1], [(10.0, ())], whole)
    both = level_figure([0.1, 0.13], [(10.0, ()), (20.0, ())], whole)
    assert both.sd < short.sd
    assert both.mean == pytest.approx(0.12)
    restless = tuple(100.0 + 60.0 * (i // 2 % 2) for i in range(10))
    assert level_figure([0.1], [(10.0, restless)], whole).sd > short.sd


def _blocks(data: StudyData, candidate: str) -> list[tuple[str, int]]:
    mine = [b for b in data.blocks.values() if b.candidate_id == candidate and b.role != "confirm"]
    return [(b.role, b.concurrency) for b in mine]


@pytest.mark.parametrize("hot", [True, False])
def test_who_cannot_win_is_looked_at_once_and_the_reason_is_kept(tmp_path: Path, hot: bool) -> None:
    def speed(settings: Any, level: int) -> float:
        return 100.0 * {None: 1.0, 1: 0.7, 2: 1.3, 3: 0.6, 4: 1.1}[settings.get("num_steps")]

    machine = (HotMachine if hot else ToyMachine)(speed=speed)
    the_space = space(TOY, "rules=[]", "parameters.disable_batch_threshold.choices=[never]", "budget.launches=12")
    store = study(tmp_path, the_space)
    data = controller(store, machine, HotEngine() if hot else None, policy=RACING).run()
    steps = {data.settings_of(t.candidate_id).get("num_steps"): t for t in data.measured}
    slow, best = steps[3], steps[2]
    assert sorted(_blocks(data, slow.candidate_id)) == [("look", 1), ("look", 8)]
    assert slow.why.startswith(OUT)
    assert slow.value == pytest.approx(math.log(0.6), abs=0.02)
    assert sorted(_blocks(data, best.candidate_id)) == [("look", 1), ("look", 8), ("screen", 1), ("screen", 8)]
    assert best.why == ""
    assert recommendation(data).overall.winner is None or data.confirmations[0].finalists[0] == best.candidate_id
    assert data.confirmations[0].finalists[0] == best.candidate_id
    assert store.stored_pairs() == data.pairs
    shown = study_view(data).candidate(slow.candidate_id)
    assert shown.standing == "out of the race"
    assert shown.why == slow.why
    assert looks_saved(data).left == sum(t.why.startswith(OUT) for t in data.measured) > 0


def test_a_look_that_fails_its_gates_is_followed_by_the_whole_block(tmp_path: Path) -> None:
    valid = lambda _settings, _level, _count: True  # noqa: E731
    machine = ToyMachine(valid=valid)
    measure = machine.measure

    def spoiled(*args: Any, **given: Any) -> Any:
        machine.valid = (lambda *_: False) if given["role"] == "look" else valid
        return measure(*args, **given)

    machine.measure = spoiled  # type: ignore[method-assign]
    data = controller(study(tmp_path, space(TOY, "budget.launches=6")), machine, policy=RACING).run()
    for trial in data.measured:
        assert all(data.block(trial.slot, level) is not None for level in data.levels)
        assert not trial.why


def test_who_dies_after_a_good_look_is_no_finalist_and_nobody_has_to_beat_it(tmp_path: Path) -> None:
    def speed(settings: Any, level: int) -> float:
        return 100.0 * {None: 1.0, 1: 0.7, 2: 1.3, 3: 0.6, 4: 1.1}[settings.get("num_steps")]

    machine = ToyMachine(speed=speed)
    measure = machine.measure

    def dying(server: Any, record: Any, **given: Any) -> Any:
        if given["role"] == "screen" and record.settings.get("num_steps") == 2:
            return Outcome(None, Failure("died_mid_bench", "bench", "it died"))
        return measure(server, record, **given)

    machine.measure = dying  # type: ignore[method-assign]
    the_space = space(TOY, "rules=[]", "parameters.disable_batch_threshold.choices=[never]", "budget.launches=12")
    data = controller(study(tmp_path, the_space), machine, policy=RACING).run()
    steps = {data.settings_of(trial.candidate_id).get("num_steps"): trial for trial in data.measured}
    dead, best = steps[2], steps[4]
    assert sorted(_blocks(data, dead.candidate_id)) == [("look", 1), ("look", 8)]
    assert dead.constraints["launch"] > 0
    assert data.confirmations[0].finalists == (best.candidate_id,)
    assert not best.why, "it is measured further"
    shown = study_view(data).candidate(dead.candidate_id)
    assert (shown.standing, shown.overall) == ("failed", None)
    assert "it died" in shown.why


def test_a_race_saves_hours_of_the_search_and_comes_to_the_same_decision() -> None:
    """Virtual time; `benchmarks/results/racing.json` holds the figures of many studies."""
    spent, regret = {0.0: 0.0, RACING.look: 0.0}, {0.0: 0.0, RACING.look: 0.0}
    for seed in range(12):
        for look in spent:
            policy = Policy(pairs=8, look=look)
            data = simulate(THE_SPACE, BlockSource(spread, Noise(), seed), seed, policy=policy)
            winner = recommendation(data).overall.winner
            best = max(value(spread, c.settings, data) for c in data.candidates.values())
            regret[look] += 1 - value(spread, (winner or data.baseline).settings, data) / best
            search = [b.block for b in data.blocks.values() if b.role != "confirm"]
            spent[look] += sum(block.warmup_s + block.window_s for block in search) / len(data.measured)
    assert spent[RACING.look] < 0.9 * spent[0.0]
    assert regret[RACING.look] / 12 < max(0.01, 1.5 * regret[0.0] / 12)


@pytest.mark.slow
@pytest.mark.parametrize("hot", [HOT, frozenset[str]()])
def test_a_race_makes_no_false_winners(hot: frozenset[str]) -> None:
    false = 0
    for seed in range(100):
        data = simulate(THE_SPACE, BlockSource(alike, Noise(), 5000 + seed), seed, policy=POLICIES["full"], hot=hot)
        false += recommendation(data).overall.winner is not None
    assert false <= 5
