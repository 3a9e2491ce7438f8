"""What a whole study does, on a machine whose speed is a function of the candidate."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

import optuna
import pytest

from tests.tuner.study.toy_study import (
    SPACE,
    Mismatch,
    ToyEngine,
    ToyMachine,
    controller,
    space,
    speed,
    study,
)
from tuner.errors import EnvironmentBroken, StudyStopped
from tuner.records import Failure
from tuner.report.view import study_view
from tuner.study.data import Slot
from tuner.study.decide import recommendation
from tuner.study.planner import launches_left, owed
from tuner.study.policy import Policy, policy_of
from tuner.study.score import PESSIMISTIC
from tuner.study.session import Limits, new_budget
from tuner.study.summary import summary

QUICK = Policy(pairs=1)
"""For what has nothing to do with the confirmation."""


def run(tmp_path, machine=None, engine=None, the_space=None, policy=None):
    store = study(tmp_path, the_space)
    machine = machine or ToyMachine()
    data = controller(store, machine, engine, policy=policy or Policy()).run()
    return data, machine, store


def fails(phase, kind="startup_crash", when=lambda settings, count: True, **facts):
    failure = Failure(kind, "start", "it broke", **facts)
    return lambda at, settings, count: failure if at == phase and when(settings, count) else None


def test_the_baseline_comes_first_and_the_budget_is_kept(tmp_path):
    data, machine, _ = run(tmp_path)
    assert machine.starts[0] == {"speculation": "none"}
    assert data.trials[0].kind == "baseline"
    assert len(machine.starts) == data.budget.launches == 14
    assert data.state == "done"


def test_one_launch_serves_all_levels(tmp_path):
    _data, machine, _ = run(tmp_path, policy=QUICK)
    assert len(machine.measured) == 2 * len(machine.starts)
    assert not machine.running


def test_the_confirmation_is_fresh_launches_in_mirrored_order_on_held_out_prompts(tmp_path):
    data, _machine, _ = run(tmp_path)
    (confirmation,) = data.confirmations
    (_winner,) = confirmation.finalists
    order = ["A" if launch.slot.candidate_id == data.baseline.id else "B" for launch in data.launches[-8:]]
    assert "".join(order) == "ABBABAAB"
    confirmed = [pair for pair in data.pairs if pair.role == "confirm"]
    assert Counter(pair.concurrency for pair in confirmed) == {1: 4, 8: 4}
    assert all(data.blocks[pair.candidate_block].role == "confirm" for pair in confirmed)


def test_both_blocks_of_a_pair_get_the_same_requests_and_every_repetition_others(tmp_path):
    _data, machine, _ = run(tmp_path)
    seeds = {}
    for candidate, level, role, seed in machine.measured:
        seeds.setdefault((role, level), {}).setdefault(candidate, []).append(seed)
    for (role, _level), by_candidate in seeds.items():
        drawn = {tuple(sorted(values)) for values in by_candidate.values()}
        assert len(drawn) == 1
        assert len(set(drawn.pop())) == (4 if role == "confirm" else 1)


def test_the_recommendation_is_the_best_candidate(tmp_path):
    data, _, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=30"))
    found = recommendation(data)
    assert found.overall.winner.settings == {"disable_batch_threshold": 4, "num_steps": 3, "speculation": "ngram"}
    assert found.per_concurrency[1].winner is None


def test_no_candidate_is_launched_twice_in_the_search(tmp_path):
    data, _machine, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=40", "sampler=tpe"), policy=QUICK)
    searched = [launch.slot.candidate_id for launch in data.launches if launch.slot.role == "screen"]
    assert len(searched) == len(set(searched))
    assert any(trial.kind == "duplicate" for trial in data.trials)


def test_a_duplicate_is_told_what_is_known(tmp_path):
    data, _, _ = run(tmp_path, policy=QUICK)
    for trial in data.trials:
        first = next(other for other in data.trials if other.candidate_id == trial.candidate_id)
        assert trial.value == first.value
        assert trial.constraints == first.constraints


def test_the_search_ends_when_a_finite_space_is_exhausted(tmp_path):
    data, _machine, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=100"), policy=QUICK)
    assert data.reason == "every candidate of the space has been tried"
    legal = set(data.space.listed())
    assert legal <= {trial.candidate_id for trial in data.trials}
    assert len(data.measured) == len(legal - {data.baseline.id}) == 7


def test_an_exhausted_space_leaves_launches_for_the_best_at_each_level(tmp_path):
    def crossing(settings, level):
        steps = settings.get("num_steps", 0)
        return 100 * level * (1 + 0.1 * steps if level == 1 else 1.05 - 0.02 * steps if steps else 1)

    the_space = space(SPACE, "budget.launches=100")
    data, _, _ = run(tmp_path, ToyMachine(speed=crossing), the_space=the_space, policy=Policy(fewest=99))
    found = recommendation(data)
    assert len(data.confirmations[0].finalists) >= 2
    assert found.per_concurrency[0].winner.settings["num_steps"] == 4
    assert found.per_concurrency[1].winner.settings["num_steps"] == 1


def test_the_search_stops_at_the_number_of_candidates(tmp_path):
    data, _, _ = run(tmp_path, the_space=space(SPACE, "budget.candidates=2"), policy=QUICK)
    assert len(data.measured) == 2
    assert data.reason == "2 of 2 candidates tried"


def test_rules_that_leave_nothing_are_named_where_the_candidates_cannot_be_listed(tmp_path):
    text = SPACE.partition("parameters:")[0] + (
        "parameters:\n  mem: {low: 0.1, high: 0.9}\nrules:\n  - {forbid: mem > 0, because: nothing fits}\n"
        "budget: {launches: 14, candidates: 40}\nprofile: short\n"
    )
    the_space = space(text, "sampler=random")
    data, machine, _ = run(tmp_path, the_space=the_space, policy=replace(QUICK, max_idle_trials=5))
    assert data.reason == ("the last 5 proposals were known or ruled out, 5 by: nothing fits (rule: mem > 0)")
    assert len(machine.starts) == 1


def test_the_search_stops_at_the_hours_and_still_confirms(tmp_path):
    # Two blocks of 10 s make a launch of 20 s; 288 s are 14 launches, 8 of them for the confirmation.
    data, _, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=40", "budget.hours=0.08"))
    assert "of 0.08 hours used" in data.reason
    assert data.confirmations[0].pairs == 4
    assert len(data.measured) == 5
    assert data.elapsed_s == 280


def test_hours_that_hold_no_confirmation_are_kept_and_the_end_says_how_to_get_one(tmp_path):
    # 108 s hold the baseline, a candidate, and 3 of the 8 launches that a claim takes.
    data, _, store = run(tmp_path, the_space=space(SPACE, "budget.launches=40", "budget.hours=0.03"))
    assert data.state == "done"
    assert (len(data.measured), data.confirmations, data.elapsed_s) == (1, (), 40)
    said = re.search(r"no time is left to confirm .* tuner resume toy --hours ([\d.]+)", data.reason)
    hours = float(said[1])
    store.set_budget(replace(data.budget, hours=hours), "more")
    more = controller(store, ToyMachine()).run()
    assert Counter(pair.concurrency for pair in more.pairs if pair.role == "confirm") == {1: 4, 8: 4}
    assert more.elapsed_s <= 3600 * hours


def test_hours_that_hold_fewer_pairs_confirm_in_those(tmp_path):
    # 280.8 s hold the baseline, a candidate and 12 launches: 6 of 8 pairs.
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.078")
    data, _, _ = run(tmp_path, the_space=the_space, policy=Policy(pairs=8))
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 6, 8: 6}
    assert "after 6 of 8 pairs: tuner resume toy --hours" in data.reason
    assert study_view(data).rounds == ((1, 6),)
    assert data.elapsed_s == 280


def test_why_the_search_has_ended_is_what_was_so_when_its_confirmation_began(tmp_path):
    data, _, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=12"), policy=Policy(pairs=4))
    confirmed = sum(launch.slot.role == "confirm" for launch in data.launches)
    assert confirmed >= 8
    assert data.reason == f"{len(data.launches) - confirmed} of 12 launches used, 8 kept for confirmation"


@dataclass
class Slower(ToyMachine):
    """A block of the confirmation takes longer."""

    confirm_s: float = 20.0

    def measure(self, *args, role, **given):
        self.block_s = self.confirm_s if role == "confirm" else 10.0
        return super().measure(*args, role=role, **given)


def test_pairs_that_the_hours_did_not_seem_to_hold_are_measured_where_there_is_time(tmp_path):
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.078")
    data, _, _ = run(tmp_path, Slower(confirm_s=5.0), the_space=the_space, policy=Policy(pairs=8))
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 8, 8: 8}
    assert data.elapsed_s == 200


def test_a_first_start_into_a_cold_cache_is_not_held_for_usual(tmp_path):
    # 612 s hold 320 s of the baseline, and 14 launches of 20 s: 6 candidates, 8 launches for the confirmation.
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.17")
    data, _, _ = run(tmp_path, ToyMachine(first_start_s=300.0), the_space=the_space)
    assert len(data.measured) == 6
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 4, 8: 4}
    assert data.elapsed_s == 600


def test_a_confirmation_that_the_hours_end_keeps_its_pairs_and_goes_on_with_more_hours(tmp_path):
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.08")
    data, _, store = run(tmp_path, Slower(), the_space=the_space)
    assert data.state == "done"
    assert data.elapsed_s <= 288 + 40, "to within a launch"
    assert "after 2 of 4 pairs: tuner resume toy --hours" in data.reason
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 2, 8: 2}
    assert new_budget(data, Limits(more=2), data.budget).hours is None, "they would end the search at once"
    assert new_budget(data, Limits(more=2, hours=1), data.budget).hours == 1
    store.set_budget(replace(data.budget, hours=0.11), "more")
    more = controller(store, Slower()).run()
    assert len(more.confirmations) == 1
    assert Counter(pair.concurrency for pair in more.pairs if pair.role == "confirm") == {1: 4, 8: 4}
    assert data.blocks.items() <= more.blocks.items()


def test_more_hours_finish_the_confirmation_that_they_cut_before_they_search_on(tmp_path):
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.08")
    data, _, store = run(tmp_path, Slower(), the_space=the_space)
    store.set_budget(replace(data.budget, hours=1), "more")
    more = controller(store, ToyMachine()).run()
    roles = [launch.slot.role for launch in more.launches[len(data.launches) :]]
    assert roles[:4] == ["confirm"] * 4
    assert "screen" in roles[4:]


def test_more_behind_a_confirmation_that_the_hours_cut_confirms_the_best_of_what_it_finds(tmp_path):
    before, _, store = run(tmp_path, Slower(), the_space=space(SPACE, "budget.launches=40", "budget.hours=0.08"))
    known = [dict(before.settings_of(trial.candidate_id)) for trial in before.trials]
    store.set_budget(new_budget(before, Limits(more=2), before.budget), "more")
    best_last = ToyMachine(speed=lambda some, level: speed(some, level) * (1 if dict(some) in known else 3))
    data = controller(store, best_last).run()
    assert len(data.measured) == len(before.measured) + 2
    best = max(data.measured, key=lambda trial: trial.value)
    assert best.number >= len(before.trials)
    assert best.candidate_id in data.confirmations[-1].finalists
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 8, 8: 8}


@pytest.mark.parametrize("fingerprint", [{}, {"pairs": 16}])
@pytest.mark.parametrize("state", ["done", "interrupted"])
def test_more_leaves_launches_for_so_many_candidates_and_for_all_that_is_confirmed(tmp_path, state, fingerprint):
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.08")
    data, _, _ = run(tmp_path, Slower(), the_space=the_space)
    data = replace(data, state=state, fingerprint=fingerprint, budget=replace(data.budget, launches=14))
    more = replace(data, budget=new_budget(data, Limits(more=3), data.budget))
    policy = policy_of(more)
    assert launches_left(more, policy) - owed(more, policy) >= 3


def test_the_pair_that_makes_a_claim_possible_is_measured_though_it_ends_late(tmp_path):
    the_space = space(SPACE, "budget.launches=40", "budget.hours=0.08")
    data, _, _ = run(tmp_path, Slower(confirm_s=12.5), the_space=the_space)
    assert Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm") == {1: 4, 8: 4}
    assert 288 < data.elapsed_s <= 288 + 2 * 25


def test_a_small_budget_searches_and_says_that_it_cannot_confirm(tmp_path):
    data, machine, _ = run(tmp_path, the_space=space(SPACE, "budget.launches=3"))
    assert len(machine.starts) == 3
    assert recommendation(data).overall.winner is None
    assert data.state == "done"


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["start", "ready", "smoke", "bench1", "bench8"])
def test_a_failed_candidate_is_told_as_complete_infeasible_and_finite(tmp_path, phase):
    deep = fails(phase, when=lambda settings, count: settings.get("num_steps", 0) >= 3)
    data, _, _ = run(tmp_path, ToyMachine(fails=deep), the_space=space(SPACE, "budget.launches=40"))
    failed = [t for t in data.trials if data.candidates[t.candidate_id].settings.get("num_steps", 0) >= 3]
    assert len(failed) == 3
    for trial in failed:
        assert (trial.value, trial.constraints) == (PESSIMISTIC, {"launch": 1.0})
    assert [trial.kind for trial in failed] == ["measured", "measured", "known_crash"]
    assert all(trial.why.startswith("startup_crash") for trial in failed[:2])
    numbers = ", ".join(f"trial {trial.number}" for trial in failed[:2])
    assert failed[2].why == f"2 of 2 candidates with num_steps >= 3 crashed ({numbers}), and none worked"
    assert summary(data).failures == {"startup_crash": 2}
    assert recommendation(data).overall.winner.settings["num_steps"] == 2


def test_every_trial_in_optuna_is_complete_with_a_finite_value_and_constraints(tmp_path):
    deep = fails("bench8", when=lambda settings, count: settings.get("num_steps", 0) >= 3)
    _, _, store = run(tmp_path, ToyMachine(fails=deep), the_space=space(SPACE, "budget.launches=40"), policy=QUICK)
    study = optuna.load_study(study_name="toy", storage=str(store.engine.url))
    assert {trial.state for trial in study.trials} == {optuna.trial.TrialState.COMPLETE}
    assert all(math.isfinite(trial.value) and trial.constraints for trial in study.trials)
    assert study.best_trial.params["num_steps"] == 2


def test_blocks_before_a_failure_are_kept_and_never_become_a_score(tmp_path):
    last = fails("bench8", "died_mid_bench", when=lambda settings, count: settings.get("num_steps") == 3)
    data, _, _ = run(tmp_path, ToyMachine(fails=last), the_space=space(SPACE, "budget.launches=40"), policy=QUICK)
    trial = next(t for t in data.measured if data.candidates[t.candidate_id].settings["num_steps"] == 3)
    kept = data.by_slot.get(Slot(trial.candidate_id, "screen", 0), ())
    assert {stored.concurrency for stored in kept} <= {1}
    assert trial.value == PESSIMISTIC


def test_what_a_rule_or_the_engine_rules_out_is_never_launched(tmp_path):
    engine = ToyEngine(problems=lambda settings: ["two is odd"] if settings.get("num_steps") == 2 else [])
    data, machine, _ = run(
        tmp_path, engine=engine, the_space=space(SPACE, "budget.launches=60", "sampler=tpe"), policy=QUICK
    )
    assert all(settings.get("num_steps") != 2 for settings in machine.starts)
    assert {"num_steps": 4, "disable_batch_threshold": 4, "speculation": "ngram"} not in machine.starts
    illegal = [trial for trial in data.trials if trial.kind == "illegal"]
    assert illegal
    assert all(t.value == PESSIMISTIC and t.constraints["legal"] > 0 for t in illegal)
    assert data.reason == "every candidate of the space has been tried"


@pytest.mark.parametrize(
    ("mismatch", "kind"),
    [
        (Mismatch("num_steps", 3, 2, "too deep"), "capped_effective"),
        (Mismatch("num_steps", 3, None), "no_op_setting"),
        (Mismatch("speculation", "ngram", "none"), "spec_inactive"),
    ],
)
def test_a_candidate_whose_settings_are_not_in_effect_is_never_scored(tmp_path, mismatch, kind):
    engine = ToyEngine(mismatches=lambda settings: [mismatch] if settings.get("num_steps") == 3 else [])
    data, machine, _ = run(tmp_path, engine=engine, the_space=space(SPACE, "budget.launches=40"), policy=QUICK)
    trials = [t for t in data.measured if data.candidates[t.candidate_id].settings["num_steps"] == 3]
    assert [(t.value, t.why.partition(":")[0]) for t in trials] == [(PESSIMISTIC, kind)] * 2
    assert not any("('num_steps', 3)" in measured[0] for measured in machine.measured)


def test_a_failed_baseline_stops_the_study_and_can_be_resumed(tmp_path):
    machine = ToyMachine(fails=fails("ready", when=lambda settings, count: count <= 1))
    store = study(tmp_path)
    with pytest.raises(StudyStopped, match="startup_crash") as stopped:
        controller(store, machine).run()
    assert stopped.value.exit_code == 1
    assert store.data().state == "stopped"
    assert store.data().trials[0].running
    assert controller(store, machine).run().state == "done"
    assert store.data().trials[0].value == 0.0


def test_the_machines_fault_is_tried_again_and_not_held_against_the_candidate(tmp_path):
    first = fails(
        "start", "port_conflict", when=lambda settings, count: count in (3, 4), blame="environment", retryable=True
    )
    data, machine, _ = run(tmp_path, ToyMachine(fails=first), the_space=space(SPACE, "budget.launches=16"))
    assert machine.starts[2] == machine.starts[3] == machine.starts[4]
    assert all(trial.feasible or "min_speedup" in trial.constraints for trial in data.measured)
    assert summary(data).failures == {"port_conflict": 2}
    assert len(machine.starts) == 16


def test_a_machine_that_stays_broken_stops_the_study_and_can_be_resumed(tmp_path):
    broken = {"now": True}
    failure = Failure("transient_env", "start", "still busy", blame="environment", retryable=True)
    machine = ToyMachine(
        fails=lambda phase, settings, count: (
            failure if broken["now"] and phase == "start" and settings.get("num_steps") else None
        )
    )
    store = study(tmp_path)
    with pytest.raises(EnvironmentBroken, match="transient_env") as stopped:
        controller(store, machine).run()
    assert stopped.value.exit_code == 3
    assert len(machine.starts) == 1 + 3
    assert store.data().trials[-1].running
    broken["now"] = False
    data = controller(store, machine).run()
    assert data.state == "done"
    assert all(trial.value != PESSIMISTIC for trial in data.measured)


def test_blocks_that_the_machine_spoils_are_retried_and_never_held_against_a_candidate(tmp_path):
    busy = {"now": True}
    machine = ToyMachine(
        valid=lambda settings, level, count: not (busy["now"] and settings.get("num_steps") and level == 8),
        gate="client_steals_cpu",
    )
    store = study(tmp_path)
    with pytest.raises(EnvironmentBroken, match="client_steals_cpu"):
        controller(store, machine).run()
    assert len(machine.starts) == 1 + 3
    assert store.data().trials[-1].running
    busy["now"] = False
    data = controller(store, machine).run()
    assert data.state == "done"
    assert all(trial.value != PESSIMISTIC for trial in data.measured)


def test_what_cannot_be_mended_by_trying_again_is_not_tried_again(tmp_path):
    machine = ToyMachine(fails=fails("start", "env_broken", blame="environment"))
    with pytest.raises(EnvironmentBroken):
        controller(study(tmp_path), machine).run()
    assert len(machine.starts) == 1


def test_when_every_candidate_fails_the_study_ends_without_a_winner(tmp_path):
    def each_in_its_own_way(phase, settings, count):
        if phase != "smoke" or len(settings) == 1:
            return None
        return Failure("startup_crash", "smoke", "it broke" + " and broke" * count)

    data, _, _ = run(tmp_path, ToyMachine(fails=each_in_its_own_way))
    assert data.state == "done"
    found = recommendation(data)
    assert found.overall.winner is None
    assert "no comparison possible" in found.overall.why


def test_a_block_that_fails_its_gates_is_measured_once_more_and_both_are_kept(tmp_path):
    data, _machine, _ = run(
        tmp_path, ToyMachine(valid=lambda settings, level, count: count > 1 or level == 1), policy=QUICK
    )
    first = [b for b in data.blocks.values() if b.candidate_id == data.baseline.id and b.role == "screen"]
    assert [(b.concurrency, b.block.valid) for b in first if b.concurrency == 8] == [(8, False), (8, True)]
    assert data.state == "done"


def test_a_candidate_whose_blocks_never_pass_has_no_score(tmp_path):
    def valid(settings, level, count):
        return not (settings.get("num_steps") == 3 and level == 8)

    data, _, _ = run(tmp_path, ToyMachine(valid=valid), the_space=space(SPACE, "budget.launches=40"), policy=QUICK)
    trials = [t for t in data.measured if data.candidates[t.candidate_id].settings["num_steps"] == 3]
    assert [(t.value, t.why.partition(":")[0]) for t in trials] == [(PESSIMISTIC, "degenerate_output")] * 2


def test_a_pair_that_is_lost_in_confirmation_is_made_up_for(tmp_path):
    machine = ToyMachine()

    def valid(settings, level, count):
        starts = len(machine.starts)
        return not (starts in (8, 11) and level == 1)  # a finalist's launch, then another's or the baseline's

    machine.valid = valid
    data, _, _ = run(tmp_path, machine, policy=Policy(block_attempts=1))
    confirmed = Counter(pair.concurrency for pair in data.pairs if pair.role == "confirm")
    assert confirmed[1] == 4
    assert recommendation(data).overall.verdict.n == 4
    (confirmation,) = data.confirmations
    used = {launch.slot.repetition for launch in data.launches if launch.slot.role == "confirm"}
    assert used == set(confirmation.repetitions)
    assert 14 < len(machine.starts) <= 18


def test_spare_pairs_are_bounded(tmp_path):
    def valid(settings, level, count):
        return count == 1 or len(settings) == 1  # of the finalists, no block passes but in the search

    data, machine, _ = run(tmp_path, ToyMachine(valid=valid), policy=Policy(block_attempts=1))
    assert data.state == "done"
    assert recommendation(data).overall.winner is None
    assert len(machine.starts) <= 6 + 2 * 6


def test_a_baseline_whose_blocks_never_pass_stops_the_study(tmp_path):
    with pytest.raises(StudyStopped, match="degenerate_output"):
        controller(study(tmp_path), ToyMachine(valid=lambda settings, level, count: level == 1)).run()


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_a_failure_and_never_a_value(tmp_path, rate):
    def broken(settings, level):
        return rate if settings.get("num_steps") == 3 else speed(settings, level)

    data, _, _ = run(tmp_path, ToyMachine(speed=broken), the_space=space(SPACE, "budget.launches=40"), policy=QUICK)
    trials = [t for t in data.measured if data.candidates[t.candidate_id].settings["num_steps"] == 3]
    assert [(t.value, t.why.partition(":")[0]) for t in trials] == [(PESSIMISTIC, "bench_parse_error")] * 2


def test_a_finalist_that_fails_in_confirmation_cannot_win_and_the_next_takes_its_place(tmp_path):
    def late(phase, settings, count):
        crash = Failure("died_mid_bench", "bench", "it died")
        return crash if settings.get("num_steps") == 3 and phase == "bench8" and count > 12 else None

    data, _, _ = run(tmp_path, ToyMachine(fails=late), the_space=space(SPACE, "budget.launches=40"))
    found = recommendation(data)
    assert len(data.confirmations) >= 2 or len(data.confirmations[0].finalists) >= 2
    assert found.overall.winner.settings["num_steps"] != 3
    assert any("failed in confirmation" in note for note in found.advice)


def test_a_guard_keeps_a_candidate_from_the_overall_place(tmp_path):
    def traded(settings, level):
        steps = settings.get("num_steps", 0)
        return 100 * (1 + 0.2 * steps if level == 1 else 1 - 0.06 * steps)

    data, _, _ = run(tmp_path, ToyMachine(speed=traded), the_space=space(SPACE, "budget.launches=60"))
    assert all(not trial.feasible for trial in data.measured)
    assert all("min_speedup" in trial.constraints for trial in data.measured)
    found = recommendation(data)
    assert found.overall.winner is None
    assert found.per_concurrency[0].winner.settings["num_steps"] == 4


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_finished_study_starts_nothing(tmp_path):
    _, _machine, store = run(tmp_path)
    before = store.data()
    again = ToyMachine()
    controller(store, again).run()
    assert again.starts == []
    assert store.data().blocks == before.blocks
    assert len(store.data().trials) == len(before.trials)


def test_two_studies_of_one_seed_propose_the_same(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = run(tmp_path / "a", policy=QUICK)[0], run(tmp_path / "b", policy=QUICK)[0]
    assert [t.params for t in one.trials] == [t.params for t in two.trials]


def test_stored_pairs_are_those_that_the_blocks_make_up(tmp_path):
    data, _, store = run(tmp_path)
    assert store.stored_pairs() == data.pairs
    assert {verdict.candidate_id for verdict in data.verdicts} == set(data.confirmations[0].finalists)


def test_the_full_profile_measures_the_baseline_again_and_pairs_with_the_latest(tmp_path):
    text = SPACE.replace("profile: short", "profile: full").replace("high: 4", "high: 8")
    drift = {"now": 1.0}

    def drifting(settings, level):
        drift["now"] *= 0.999
        return 100 * drift["now"] * (1 + 0.01 * settings.get("num_steps", 0))

    data, _machine, _ = run(
        tmp_path,
        ToyMachine(speed=drifting),
        the_space=space(text, "budget.launches=60"),
        policy=Policy(pairs=8, fewest=99),
    )
    screened = [launch.slot for launch in data.launches if launch.slot.role == "screen"]
    refreshes = [slot.repetition for slot in screened if slot.candidate_id == data.baseline.id]
    assert refreshes == [0, 1, 2]
    for pair in data.pairs:
        if pair.role == "screen":
            between = data.blocks[pair.candidate_block].order - data.blocks[pair.baseline_block].order
            assert 0 < between <= 2 * 7
    assert len([p for p in data.pairs if p.role == "confirm" and p.concurrency == 1]) >= 8


def test_speed_is_a_function_of_the_candidate():
    assert speed({"speculation": "none"}, 1) == 100


def test_a_candidate_that_is_killed_every_time_while_others_work_is_itself_at_fault(tmp_path):
    killed = fails(
        "start",
        "killed_externally",
        when=lambda settings, count: settings.get("num_steps") == 2,
        blame="environment",
        retryable=True,
        exit_status=-9,
    )
    data, _, _ = run(tmp_path, ToyMachine(fails=killed), policy=QUICK, the_space=space(SPACE, "budget.launches=30"))
    assert data.state == "done"
    failed = [trial for trial in data.trials if data.candidates[trial.candidate_id].settings.get("num_steps") == 2]
    assert failed, "the search has tried it"
    assert "while others work here" in str(failed[0])


def test_whoever_sends_sigterm_is_no_fault_of_the_candidate(tmp_path):
    ended = fails(
        "start",
        "killed_externally",
        when=lambda settings, count: settings.get("num_steps") is not None,
        blame="environment",
        retryable=True,
        exit_status=-15,
    )
    with pytest.raises(EnvironmentBroken, match="killed_externally"):
        run(tmp_path, ToyMachine(fails=ended), policy=QUICK)


def test_what_no_working_candidate_can_use_is_not_said_to_be_kept_for_a_confirmation(tmp_path):
    broken = fails("ready", when=lambda settings, count: settings["speculation"] != "none")
    data, _, _ = run(tmp_path, ToyMachine(fails=broken), the_space=space(SPACE, "budget.launches=4"), policy=QUICK)
    assert data.reason == "2 of 4 launches used, 2 left over: no candidate works"
