"""What is not paid for again: a failure that every candidate meets, a crash that is known, a place where tuners die."""

import pytest

from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.errors import StudyStopped
from tuner.records import Failure
from tuner.study.crashes import CrashMemory
from tuner.study.policy import Policy
from tuner.study.score import PESSIMISTIC
from tuner.study.signature import signature

POLICY = Policy(pairs=1)


class Ended(BaseException):
    pass


def crash(message="it broke", evidence="", **facts):
    return Failure("startup_crash", "ready", message, evidence, **facts)


def at_ready(failure, when=lambda settings: len(settings) > 1):
    return lambda phase, settings, count: failure(count) if phase == "ready" and when(settings) else None


# -- the same failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CUDA error at 0x7f00 in rank 3", "CUDA error at 0x7fab in rank 11"),
        ("[12:00:01] cannot open /tmp/a1/model.bin", "[13:59:00] cannot open /tmp/b-2/x/model.bin"),
        ("\x1b[31mout of memory: 1.5 GiB\x1b[0m", "out of memory: 22.75 GiB"),
        ("RuntimeError: no kernel\nTraceback 1", "RuntimeError:  no kernel\nanother"),
    ],
)
def test_numbers_addresses_and_paths_do_not_make_two_failures_of_one(one, other):
    assert signature(crash(evidence=one)) == signature(crash(evidence=other))


def test_another_class_or_another_text_is_another_failure():
    assert signature(crash(evidence="no kernel")) != signature(crash(evidence="no memory"))
    assert signature(crash("x")) != signature(Failure("oom_startup", "ready", "x"))
    assert signature(crash("x")) == "startup_crash: x"
    assert signature(crash("")) == "startup_crash: "


def test_three_candidates_in_a_row_that_fail_alike_stop_the_study_with_advice_and_it_goes_on_later(tmp_path):
    ill = {"now": True}
    machine = ToyMachine(
        fails=at_ready(
            lambda count: crash(evidence=f"error: unrecognized --x (pid {count})"),
            lambda settings: ill["now"] and len(settings) > 1,
        )
    )
    store = study(tmp_path)
    with pytest.raises(StudyStopped, match="3 different candidates in a row failed alike") as stopped:
        controller(store, machine, policy=POLICY).run()
    assert stopped.value.exit_code == 1
    assert "speculation=ngram, unlike the baseline" in str(stopped.value)
    assert len(machine.starts) == 4
    assert store.data().state == "stopped"
    ill["now"] = False
    data = controller(store, machine, policy=POLICY).run()
    assert data.state == "done"
    assert machine.starts[4] == machine.starts[3], "the last one is tried again"
    assert [trial.value == PESSIMISTIC for trial in data.measured[:3]] == [True, True, False]


def test_when_they_still_fail_the_user_is_told_again_but_only_after_three_more(tmp_path):
    machine = ToyMachine(fails=at_ready(lambda count: crash()))
    store = study(tmp_path, space(SPACE, "budget.launches=40"))
    for starts in (4, 7):
        with pytest.raises(StudyStopped):
            controller(store, machine, policy=POLICY).run()
        assert len(machine.starts) == starts


def test_once_a_candidate_has_been_measured_a_setting_that_never_works_does_not_stop_the_study(tmp_path):
    bad = at_ready(lambda count: crash(), lambda settings: settings.get("num_steps", 0) >= 2)
    machine = ToyMachine(fails=bad)
    policy = Policy(pairs=1, same_failures=99)
    data = controller(study(tmp_path, space(SPACE, "budget.launches=40")), machine, policy=policy).run()
    assert data.state == "done"
    crashed = [trial.value == PESSIMISTIC for trial in data.measured]
    assert 2 <= sum(crashed) <= 3
    # Before one worked, nothing told those two from all others.
    assert not any(one for i, one in enumerate(crashed) if sum(crashed[:i]) >= 2 and not all(crashed[:i]))
    assert any(trial.kind == "known_crash" for trial in data.trials), "what crashed twice is left alone"


# -- crashes that are known --------------------------------------------------------------------------------------------


def crashing(folder, name, memory, *, version="1", failure=None, overrides=()):
    """A study of which the candidates with two steps crash."""
    bad = at_ready(lambda count: failure or crash(f"boom {count}"), lambda settings: settings.get("num_steps") == 2)
    machine = ToyMachine(fails=bad)
    (folder / name).mkdir()
    small = ("parameters.num_steps.high=2", "budget.launches=12")
    store = study(folder / name, space(SPACE, *small, *overrides), name=name)
    fingerprint = {"engine_version": version, "hardware": {"cpu": "x"}}
    read = store.data
    store.data = lambda: read().__class__(**{**read().__dict__, "fingerprint": fingerprint})
    data = controller(store, machine, policy=POLICY, crashes=memory).run()
    return data, sum(settings.get("num_steps") == 2 for settings in machine.starts)


def test_a_crash_is_paid_for_once_and_told_as_infeasible_to_later_studies(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    _, first = crashing(tmp_path, "one", memory)
    data, second = crashing(tmp_path, "two", memory)
    assert (first, second) == (2, 0)
    known = [trial for trial in data.trials if trial.kind == "known_crash"]
    assert {(trial.value, dict(trial.constraints)["launch"]) for trial in known} == {(PESSIMISTIC, 1.0)}
    assert all(trial.why.startswith("known crash of study one: startup_crash: boom") for trial in known)
    assert data.state == "done"


def test_another_version_other_arguments_and_no_memory_pay_again(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    crashing(tmp_path, "one", memory)
    assert crashing(tmp_path, "two", memory, version="2")[1] == 2
    assert crashing(tmp_path, "three", memory, overrides=["engine.args.tp=2"])[1] == 2
    assert crashing(tmp_path, "four", None)[1] == 2


def test_a_torn_or_missing_memory_costs_nothing_but_a_launch(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    memory.path.write_bytes(b'{"key": "x"}\n[]\n\xff{"key')
    assert crashing(tmp_path, "one", memory)[1] == 2


def test_what_gates_refuse_and_the_machines_faults_are_not_remembered(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    data = study(tmp_path).data()
    memory.remember(data, data.baseline, Failure("degenerate_output", "bench", "x"))
    memory.remember(data, data.baseline, Failure("startup_crash", "ready", "x", blame="environment"))
    assert not memory.path.exists()


def test_crashes_of_a_row_that_stopped_the_study_are_forgotten(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    machine = ToyMachine(fails=at_ready(lambda count: crash()))
    with pytest.raises(StudyStopped):
        controller(study(tmp_path), machine, policy=POLICY, crashes=memory).run()
    assert memory.path.read_text() == ""


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_three_interruptions_without_a_block_stop_the_study_with_advice(tmp_path):
    machine = ToyMachine()
    measure, dies = machine.measure, {"now": True}

    def dying(*args, **kwargs):
        if dies["now"] and len(machine.starts) > 1:
            raise Ended
        return measure(*args, **kwargs)

    machine.measure = dying
    store = study(tmp_path, space(SPACE, "budget.launches=5"))
    for _ in range(3):
        with pytest.raises(Ended):
            controller(store, machine, policy=POLICY).run()
    started = len(machine.starts)
    with pytest.raises(StudyStopped, match="3 launches in a row ended because the tuner itself did") as stopped:
        controller(store, machine, policy=POLICY).run()
    assert stopped.value.exit_code == 1
    assert len(machine.starts) == started
    dies["now"] = False
    assert controller(store, machine, policy=POLICY).run().state == "done"


def test_interruptions_after_which_a_block_came_do_not_stop_it(tmp_path):
    machine = ToyMachine()
    measure, calls = machine.measure, []

    def dying(*args, **kwargs):
        calls.append(None)
        if len(calls) % 2 == 0:
            raise Ended
        return measure(*args, **kwargs)

    machine.measure = dying
    store = study(tmp_path, space(SPACE, "budget.launches=5"))
    for _ in range(40):
        try:
            data = controller(store, machine, policy=POLICY).run()
        except Ended:
            continue
        break
    assert data.state == "done"
