"""Hot and cold settings: one launch serves every candidate that it can be put to, with the baseline beside it."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.hot_toy import HOT, SPACE, START_S, HotEngine, HotMachine
from tests.tuner.study.toy_study import controller, space, study
from tuner.engines.base import get_engine
from tuner.engines.bundled import hot_settings
from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.errors import TunerError
from tuner.records import Failure
from tuner.search.shape import shape_at
from tuner.study.data import Budget, Slot
from tuner.study.decide import recommendation
from tuner.study.hot import reachable, saving
from tuner.study.in_memory import simulate
from tuner.study.planner import launches_used
from tuner.study.policy import Policy
from tuner.study.recompute import recompute
from tuner.study.store import open_study
from tuner.study.wear import worn

POLICY = Policy(pairs=4)


def run(folder: Path, machine: HotMachine | None = None, *overrides: str, policy: Policy = POLICY) -> Any:
    machine = machine or HotMachine()
    folder.mkdir(exist_ok=True)
    store = study(folder, space(SPACE, *overrides))
    return controller(store, machine, HotEngine(), policy=policy).run(), machine


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hot"), policy=Policy(pairs=4, fewest=99))  # to the end of the space


def test_the_whole_space_is_searched_in_one_launch_for_each_value_of_the_cold_setting(done):
    data, _ = done
    assert len(data.measured) == 17, "2 x 8 with speculation, and without it on two threads"
    searched = [launch for launch in data.launches if launch.slot.role == "screen"]
    assert len(searched) <= 4, [launch.slot for launch in searched]
    assert {tuple(sorted(e.changes)) for e in data.reconfigurations} == {tuple(sorted(HOT))}, (
        "every hot setting is told"
    )
    assert recommendation(data).overall.winner is not None
    found = saving(data)
    assert found.candidates == len(data.measured) - sum(
        launch.slot.candidate_id != data.baseline.id for launch in searched
    )
    assert "Launches saved" in found.sentence


def test_a_search_without_a_confirmation_leaves_no_server_running(tmp_path):
    data, machine = run(tmp_path, None, "budget.launches=2", "budget.candidates=2")
    assert data.state == "done"
    assert not data.confirmations
    assert not machine.running
    assert all(launch.ended_at for launch in data.launches)


def test_launches_of_the_confirmation_serve_one_candidate_each_as_they_were_launched(done):
    data, _ = done
    confirming = [launch for launch in data.launches if launch.slot.role == "confirm"]
    assert confirming
    for launch in confirming:
        assert {b.candidate_id for b in data.on_launch[launch.id]} == {launch.slot.candidate_id}
        assert launch.record.settings == data.settings_of(launch.slot.candidate_id)
    assert not {each.launch_id for each in data.reconfigurations} & {launch.id for launch in confirming}


def test_a_candidate_is_compared_with_the_baseline_on_the_same_launch_and_that_stays_fresh(done):
    data, _ = done
    for pair in data.pairs:
        if pair.role == "screen" and data.settings_of(pair.candidate_id)["threads"] == 1:
            before, after = data.blocks[pair.baseline_block], data.blocks[pair.candidate_block]
            assert before.launch_id == after.launch_id
            between = {
                b.candidate_id
                for b in data.on_launch[after.launch_id]
                if min(before.order, after.order) < b.order < max(before.order, after.order)
            }
            assert len(between - {data.baseline.id, pair.candidate_id}) <= 3


def test_a_launch_effect_does_not_tell_candidates_apart(tmp_path):
    """What one start of a server is faster by cancels, since the baseline is measured on it too."""

    class Uneven(HotMachine):
        def measure(self, server: Any, record: Any, **given: Any) -> Any:
            inner = self.speed
            self.speed = lambda s, level: inner(s, level) * (1 + 0.2 * (len(self.starts) % 3))
            try:
                return super().measure(server, record, **given)
            finally:
                self.speed = inner

    machine = Uneven(speed=lambda settings, level: 100.0)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]")
    assert all(abs(trial.value) < 0.01 for trial in data.measured)


def test_the_budget_counts_launches_and_keeps_those_of_the_confirmation(tmp_path):
    data, machine = run(tmp_path, None, "budget.launches=10")
    assert launches_used(data) == len(machine.starts) <= 10
    assert sum(launch.slot.role == "confirm" for launch in data.launches) == 8
    assert len(data.measured) >= 8, "what the launches that are left can serve is still tried"


def test_a_change_that_is_refused_gives_the_candidate_a_launch_of_its_own(tmp_path):
    machine = HotMachine(refuses=lambda changes: "no room" if changes["num_steps"] == 3 else None)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=20")
    wrong = [each for each in data.reconfigurations if each.state == "failed"]
    assert wrong
    assert all(data.settings_of(each.slot.candidate_id)["num_steps"] == 3 for each in wrong)
    assert len({each.slot for each in wrong}) == len(wrong), "it is not asked again"
    for each in wrong:
        assert data.launched_for[each.slot][0].state == "done"
        trial = next(t for t in data.trials if t.candidate_id == each.slot.candidate_id)
        assert trial.constraints["launch"] <= 0, "a change that fails is not held against the candidate"
    assert recommendation(data).overall.winner.settings["num_steps"] == 3


@pytest.mark.parametrize("launches", [8, 10, 13])
@pytest.mark.parametrize("bad", [(3,), (2, 4), (1, 2, 3, 4)])
def test_changes_that_fail_take_no_launch_beyond_the_budget(tmp_path, launches, bad):
    """A change that failed is tried again on a launch of its own, and there may be none left for that."""
    machine = HotMachine(refuses=lambda changes: "no room" if changes["num_steps"] in bad else None)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", f"budget.launches={launches}")
    assert launches_used(data) == len(machine.starts) <= launches
    kept = 2 * min(POLICY.pairs, (launches - 2) // 2)
    assert sum(launch.slot.role == "screen" for launch in data.launches) <= launches - kept
    lost = [trial for trial in data.trials if trial.kind == "out_of_launches"]
    assert lost or launches > 8 or len(bad) == 1
    for trial in lost:
        assert "the search has none left" in trial.why
        assert data.settings_of(trial.candidate_id)["num_steps"] in bad
        assert not trial.running
    assert data.state == "done"


def test_a_worn_server_keeps_no_search_going_that_has_no_launch_left(tmp_path):
    machine = HotMachine(speed=lambda _settings, level: 100.0 * level, wear=0.06)
    many = ("parameters.threads.choices=[1]", "parameters.num_steps.high=8", "budget.launches=8")
    data, _ = run(tmp_path, machine, *many, policy=Policy(pairs=4, fewest=99, no_gain=99))
    assert worn(data, data.launches[0].id)
    lost = [trial for trial in data.trials if trial.kind == "out_of_launches"]
    assert len(lost) <= 1, "who was begun when the wear showed, and nobody after"
    assert "launches used" in data.reason


def test_what_had_no_launch_left_is_tried_again_with_a_larger_budget(tmp_path):
    machine = HotMachine(refuses=lambda changes: "no room" if changes["num_steps"] in (2, 4) else None)
    of, policy = space(SPACE, "parameters.threads.choices=[1]", "budget.launches=8"), Policy(pairs=4, fewest=99)
    before = controller(study(tmp_path, of), machine, HotEngine(), policy=policy).run()
    lost = {trial.candidate_id for trial in before.trials if trial.kind == "out_of_launches"}
    assert lost
    store = study(tmp_path)
    store.set_budget(Budget(40, 40, None), "40 launches")
    data = controller(store, machine, HotEngine(), policy=policy).run()

    def depths(candidate: str) -> tuple[int, ...]:
        """Of a schedule that was lost another one may take the place, which changes elsewhere between two levels."""
        return tuple(shape_at(data.settings_of(candidate), level).depth for level in data.levels)

    assert {depths(one) for one in lost} <= {depths(trial.candidate_id) for trial in data.measured}
    assert data.state == "done"


@pytest.mark.parametrize("seed", range(12))
def test_no_fault_of_the_search_lends_a_launch_from_the_budget(tmp_path, seed):
    """Refusals, stalls, deaths under changes and the machine's own faults, at random."""
    rng = random.Random(seed)

    def fails(phase: str, settings: Any, _count: int) -> Failure | None:
        if not settings.get("num_steps") or rng.random() > 0.15:
            return None
        kind, blame = rng.choice([("hung_decode", "candidate"), ("transient_env", "environment")])
        return Failure(kind, "bench", f"{phase} {rng.random()}", blame=blame, retryable=True)

    machine = HotMachine(
        refuses=lambda _changes: "no room" if rng.random() < 0.3 else None,
        hot_fails=lambda _s: Failure("died_mid_bench", "bench", "it died") if rng.random() < 0.1 else None,
        fails=fails,
    )
    with suppress(TunerError):  # too many faults in a row end it; it can be resumed
        run(tmp_path, machine, f"budget.launches={rng.randint(10, 16)}")
    data = open_study("toy", f"sqlite:///{tmp_path / 'study.db'}").data()
    kept = 2 * min(POLICY.pairs, (data.budget.launches - 2) // 2)
    assert sum(launch.slot.role == "screen" for launch in data.launches) <= data.budget.launches - kept
    assert len({launch.slot for launch in data.launches if launch.slot.role == "confirm"}) <= kept


def test_what_a_server_keeps_of_its_old_settings_is_found_and_not_measured(tmp_path):
    machine = HotMachine(keeps=frozenset({"disable_batch_threshold"}))
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=30")
    wrong = [each for each in data.reconfigurations if each.failure]
    assert wrong
    assert all("disable_batch_threshold" in each.failure.message for each in wrong)
    assert all(each.failure.phase == "readback" for each in wrong)
    for each in wrong:
        mine = [b for b in data.blocks.values() if b.candidate_id == each.slot.candidate_id]
        assert each.launch_id not in {b.launch_id for b in mine}


def test_a_server_that_dies_after_a_change_costs_nobody_but_itself(tmp_path):
    dies = Failure("died_mid_bench", "bench", "it died")
    machine = HotMachine(hot_fails=lambda settings: dies if settings.get("num_steps") == 2 else None)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=20")
    failed = [each for each in data.reconfigurations if each.failure]
    assert failed
    assert not [launch for launch in data.launches if launch.failure], "the launch is not what failed"
    assert all(trial.constraints["launch"] <= 0 for trial in data.measured)


def test_a_candidate_that_dies_on_a_launch_of_its_own_too_is_to_blame(tmp_path):
    dies = Failure("died_mid_bench", "bench", "it died")
    machine = HotMachine(
        fails=lambda phase, settings, _n: dies if settings.get("num_steps") == 2 and phase == "bench8" else None
    )
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=20")
    guilty = {t.candidate_id for t in data.measured if t.constraints["launch"] > 0}
    assert guilty
    assert all(data.settings_of(candidate)["num_steps"] == 2 for candidate in guilty)
    assert {launch.slot.candidate_id for launch in data.launches if launch.failure} == guilty


def test_changes_that_never_work_are_given_up(tmp_path):
    machine = HotMachine(refuses=lambda _changes: "not here")
    data, _ = run(tmp_path, machine, "budget.launches=14")
    assert len(machine.changes) == 3
    assert recommendation(data).overall.winner is not None


@dataclass
class Jittery(HotMachine):
    """No two starts take the same time, as on any machine."""

    def start(self, record: Any, **given: Any) -> Any:
        server = super().start(record, **given)
        if self.clock is not None:
            self.clock.now -= START_S * 0.1 * random.random()
        return server


def test_garbled_output_after_a_change_is_measured_again_on_a_launch_of_its_own(tmp_path):
    machine = HotMachine(hot_garbles=lambda settings: settings.get("num_steps") == 3)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=20")
    wrong = [each for each in data.reconfigurations if each.failure]
    assert wrong
    assert {(each.failure.kind, each.failure.phase) for each in wrong} == {("degenerate_output", "bench")}
    for each in wrong:
        launch = data.launched_for[each.slot][0]
        assert {b.concurrency for b in data.on_launch[launch.id] if b.candidate_id == each.slot.candidate_id} == {1, 8}
    assert all(trial.constraints["launch"] <= 0 for trial in data.measured), "nobody is blamed"
    assert recommendation(data).overall.winner.settings["num_steps"] == 3


def test_output_that_is_garbled_on_a_launch_of_its_own_too_is_the_candidates_fault(tmp_path):
    machine = HotMachine(valid=lambda settings, _level, _count: settings.get("num_steps") != 3)
    data, _ = run(tmp_path, machine, "parameters.threads.choices=[1]", "budget.launches=20")
    guilty = {data.settings_of(t.candidate_id)["num_steps"] for t in data.measured if t.constraints["launch"] > 0}
    assert guilty == {3}
    for trial in data.measured:
        own = [b for b in data.blocks.values() if b.candidate_id == trial.candidate_id and not b.block.valid]
        assert len(own) <= 2 * POLICY.block_attempts


def test_garbled_output_of_the_baseline_after_a_change_does_not_stop_the_study(tmp_path):
    machine = HotMachine(hot_garbles=lambda settings: settings["speculation"] == "none")
    data, _ = run(tmp_path, machine, "budget.launches=20")
    assert data.state == "done"
    assert recommendation(data).overall.winner.settings["num_steps"] == 3


def test_a_server_that_changes_wear_serves_no_further_candidate_and_changes_are_given_up(tmp_path):
    machine = HotMachine(wear=0.1)
    data, _ = run(tmp_path, machine, "budget.launches=24", "parameters.threads.choices=[1]")
    changed = {each.launch_id for each in data.reconfigurations}
    first, *later = sorted(launch for launch in changed if worn(data, launch))
    assert worn(data, first)
    for launch in later:
        candidates = [b.candidate_id for b in data.on_launch[launch]]
        assert len(set(candidates) - {data.baseline.id}) <= 2, "the baseline has a turn after each, once that is known"
    assert len(changed) <= 3, "after three such servers every candidate gets a launch of its own"
    assert recommendation(data).overall.winner.settings["num_steps"] == 3, "wear is not taken for slowness"
    assert recommendation(data).overall.winner.settings["disable_batch_threshold"] == 4
    undisturbed, _ = run(tmp_path / "undisturbed", HotMachine(), "budget.launches=24")
    assert not [launch for launch in undisturbed.launches if worn(undisturbed, launch.id)]


DIES = Failure("died_mid_bench", "bench", "it died")
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "refused": {"refuses": lambda changes: "no room" if changes["num_steps"] == 2 else None},
    "never": {"refuses": lambda _changes: "not here"},
    "kept": {"keeps": frozenset({"disable_batch_threshold"})},
    "dies": {"hot_fails": lambda settings: DIES if settings.get("num_steps") == 2 else None},
    "dies, own too": {"fails": lambda phase, s, _n: DIES if s.get("num_steps") == 2 and phase == "bench8" else None},
    "garbled": {"hot_garbles": lambda settings: settings.get("num_steps") == 2},
    "garbled, own too": {"valid": lambda settings, _level, _n: settings.get("num_steps") != 2},
}


@pytest.mark.parametrize(
    ("look", "kills", "fault"),
    [(0.0, 15, "none"), (1 / 3, 12, "none"), *((0.0, 4, fault) for fault in FAULTS if fault != "none")],
)
def test_a_kill_between_any_two_writes_ends_in_the_same_decision(tmp_path, look, kills, fault):
    from tests.tuner.study.test_study_resume import Moments, Watched

    moments = Moments(tmp_path)

    small = ("parameters.num_steps.high=2", "budget.launches=14", "budget.candidates=6")
    if fault == "garbled":
        # Another launch has another turn of the baseline, by which the model may weigh a close call otherwise.
        small += ("sampler=random",)
    if fault == "kept":
        # A launch that was lost has no change that fails on it, and after three such changes the study does without
        # them: then another candidate is in reach. So all are tried, in whatever order.
        small += ("sampler=exhaustive", "budget.candidates=9", "budget.launches=40")
    store = study(tmp_path, space(SPACE, *small))
    policy = Policy(pairs=1, look=look)
    whole = controller(
        Watched(store, moments), Watched(Jittery(**FAULTS[fault]), moments), HotEngine(), policy=policy
    ).run()
    worked = {"after reconfiguration_failed" if fault in ("never", "kept") else "after reconfigured"}
    assert {"after ask_reconfiguration"} | worked <= {name for name, _ in moments}
    for i, (name, moment) in list(enumerate(moments))[:: max(1, len(moments) // kills)]:
        shutil.copytree(moment, tmp_path / f"again-{i}")
        store = study(tmp_path / f"again-{i}", space(SPACE, *small))
        before = store.data()
        machine = Watched(Jittery(**FAULTS[fault]), lambda _name: None)
        data = controller(store, machine, HotEngine(), policy=policy).run()
        tried, wanted = ([t.candidate_id for t in each.trials] for each in (data, whole))
        assert sorted(tried) == sorted(wanted) if fault == "kept" else tried == wanted, name
        assert before.blocks.items() <= data.blocks.items()
        assert recommendation(data).overall.winner == recommendation(whole).overall.winner
        blamed = {t.candidate_id for t in data.measured if t.constraints["launch"] > 0}
        assert blamed == {t.candidate_id for t in whole.measured if t.constraints["launch"] > 0}, name
        for trial in data.measured:
            for level in data.levels if trial.candidate_id not in blamed else ():
                slot = Slot(trial.candidate_id, "screen", 0)
                assert data.block(slot, level) or (look and data.block(slot.look, level))


def test_settings_are_in_reach_when_only_hot_ones_differ():
    plain, ngram = {"speculation": "none"}, {"speculation": "ngram", "num_steps": 3, "ngram_max": 4}
    assert reachable(HOT, ngram, plain), "how to speculate does not matter where nothing speculates"
    assert not reachable(HOT, plain, ngram), "a server that was launched without knows no ngram_max"
    assert reachable(HOT, {**plain, "env.X": "1"}, {"speculation": "ngram", "num_steps": 1, "env.X": "1"})
    assert not reachable(HOT, {**plain, "env.X": "1"}, plain)


def test_a_change_tells_the_bundled_engine_every_hot_setting():
    engine = get_engine("bundled")
    settings = {"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 4}
    record = engine.record(model="smollm2-135m", args={}, env={}, settings=settings, host="h", port=1)
    assert engine.change(record).body.keys() == engine.hot
    plain = engine.record(model="smollm2-135m", args={}, env={}, settings={}, host="h", port=1)
    body = engine.change(plain).body
    assert body["speculation"] == "none"
    assert body["disable_batch_threshold"] == "never"
    assert "num_steps" not in body, "without speculation there is no depth to say"
    assert hot_settings(record.expected)["steps_by_batch"] is None


def test_a_study_in_memory_with_hot_settings_takes_a_fraction_of_the_launches():
    the_space = space(SPACE, "profile=full", "budget.launches=24", "budget.candidates=12")
    truth = lambda settings, level: 100.0 * level * (1.2 if settings.get("num_steps") == 3 else 1.0)  # noqa: E731
    cold = simulate(the_space, BlockSource(truth, Noise(), 1), 1)
    hot = simulate(the_space, BlockSource(truth, Noise(), 1), 1, hot=HOT)
    screened = [sum(x.slot.role == "screen" for x in data.launches) for data in (cold, hot)]
    assert screened[1] < screened[0] / 2
    assert len(hot.measured) > len(cold.measured)


def test_a_candidate_that_is_another_in_effect_is_not_launched_again(tmp_path):
    """`padded: yes` starts the same server as leaving it out."""

    class Padded(HotEngine):
        def record(self, **given: Any) -> Any:
            settings = {name: value for name, value in given["settings"].items() if name != "padded"}
            return super().record(**{**given, "settings": settings})

    store = study(tmp_path, space(SPACE, "parameters.padded.choices=[1, 2]", "parameters.threads.choices=[1]"))
    data = controller(store, HotMachine(), Padded(), policy=Policy(pairs=0)).run()
    again = [trial for trial in data.trials if "the same in effect" in trial.why]
    assert again
    assert all(trial.kind == "duplicate" for trial in again)
    assert len(data.measured) == 8
    assert recompute(data, data.pairs).differences == (), "what it was told of the other one is no figure of its own"


def test_a_budget_of_hours_that_the_baseline_uses_up_ends_the_study_and_says_so(tmp_path):
    data, machine = run(tmp_path, None, "budget.hours=0.01")
    assert len(machine.starts) == 1
    assert "the baseline alone took" in data.reason
    assert data.measured == ()
