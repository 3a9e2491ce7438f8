"""What a study makes of the machine around it: neighbours, storage, clocks, what the last server left."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tests.tuner.study.toy_study import Report, ToyMachine, controller, space, study
from tuner.engines.base import get_engine
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import Failure
from tuner.space import parse_space
from tuner.study import tables
from tuner.study.engine import pointless, speculates
from tuner.study.hardware import hardware
from tuner.study.place import measuring, network_filesystem
from tuner.study.policy import Policy
from tuner.study.progress import Silent
from tuner.study.session import Limits, fingerprint, reopen, run_study
from tuner.study.summary import summary
from tuner.study.world import Machine, api_key

POLICY = Policy(pairs=1)
SMALL = "budget.launches=6"


class Told(Silent):
    def __init__(self):
        self.events = []

    def event(self, event):
        self.events.append(event)


# -- what the last server left --------------------------------------


def test_an_unclean_stop_is_settled_before_the_next_launch_and_blamed_on_nobody(tmp_path):
    machine = ToyMachine(report=Report(unclean=("GPU memory is not back where it was before the start",)))
    store = study(tmp_path, space(machine_space(), SMALL))
    data = controller(store, machine, policy=POLICY).run()
    assert data.state == "done"
    kinds = [event.kind for event in data.events]
    assert kinds.count("unclean_stop") == len(machine.starts)
    assert kinds.count("settled") == len(machine.starts) - 1, "the last one has no next launch"
    assert not [launch for launch in data.launches if launch.failure]


def test_shared_memory_that_may_be_a_servers_is_told_of_and_delays_nothing(tmp_path):
    machine = ToyMachine(report=Report(segments_unclaimed=("psm_0badcafe",)))
    data = controller(study(tmp_path, space(machine_space(), SMALL)), machine, policy=POLICY).run()
    said = [event for event in data.events if event.kind == "unclaimed_segments"]
    assert len(said) == len(machine.starts)
    assert "psm_0badcafe" in said[0].message
    assert not [event for event in data.events if event.kind == "settled"]


def machine_space():
    from tests.tuner.study.toy_study import SPACE

    return SPACE


def test_what_is_never_given_back_ends_the_study_before_another_launch_pays_for_it(tmp_path):
    stuck = {"now": ("GPU 0 holds 900 MiB more than before the launch: end that program",)}
    machine = ToyMachine(report=Report(unclean=("GPU memory is not back",)), settles=lambda: stuck["now"])
    store = study(tmp_path, space(machine_space(), SMALL))
    with pytest.raises(EnvironmentBroken, match="GPU 0 holds 900 MiB more") as stopped:
        controller(store, machine, policy=POLICY).run()
    assert stopped.value.exit_code == 3
    assert "Nothing measured is lost" in str(stopped.value)
    assert len(machine.starts) == 1
    data = store.data()
    assert (data.state, len(data.launches)) == ("stopped", 1), "no launch was begun that could be blamed"
    stuck["now"] = ()
    assert controller(store, machine, policy=POLICY).run().state == "done"


def test_what_cannot_be_ended_of_an_earlier_run_ends_the_study_at_once(tmp_path):
    machine = ToyMachine()
    machine.reap = lambda marker: [77]
    machine.remaining = lambda marker: [77]
    with pytest.raises(EnvironmentBroken, match="77 of an earlier run cannot be ended"):
        controller(study(tmp_path), machine, policy=POLICY).run()
    assert machine.starts == []


def test_others_on_the_gpu_are_told_of_and_kept_on_record(tmp_path):
    machine = ToyMachine(others=("process 5 computes on a GPU (900 MiB)",))
    data = controller(study(tmp_path, space(machine_space(), "budget.launches=2")), machine, policy=POLICY).run()
    assert [event.message for event in data.events if event.kind == "neighbour"] == list(machine.others)


# -- a launch that stalls --------------------------------------


@pytest.mark.parametrize(("hangs", "scored"), [(1, True), (2, False)])
def test_a_stalled_launch_is_tried_once_more_before_the_candidate_is_blamed(tmp_path, hangs, scored):
    seen = {"count": 0}

    def fails(phase, settings, count):
        if phase != "bench8" or settings.get("speculation") != "ngram" or seen["count"] == hangs:
            return None
        seen["count"] += 1
        return Failure("hung_decode", "bench", "no output for 30 s")

    machine = ToyMachine(fails=fails)
    data = controller(
        study(tmp_path, space(machine_space(), "budget.launches=6", "budget.candidates=1")), machine, policy=POLICY
    ).run()
    (trial,) = data.measured
    launches = [launch for launch in data.launches if launch.slot.candidate_id == trial.candidate_id]
    assert [launch.state for launch in launches[:2]] == ["failed", "done" if scored else "failed"]
    assert (trial.constraints["launch"] <= 0) == scored
    assert len([launch for launch in launches if launch.slot.role == "screen"]) == 2


# -- speculation that does nothing --------------------------------------


def drafted(steps, accept, settings):
    from tests.tuner.study.toy_study import ToyEngine, block

    record = ToyEngine().record(model="m", args={}, env={}, settings=settings, host="h", port=1)
    seen = replace(block(8, "screen", 100.0), accept_length=accept)
    return speculates(record, replace(seen, counters={} if steps is None else {"server_verify_steps": steps}))


def test_speculation_whose_drafts_are_all_rejected_or_that_never_drafts_is_inactive():
    ngram = {"speculation": "ngram", "num_steps": 3}
    assert not drafted(1000, 1.0, ngram).ok
    assert not drafted(0, None, ngram).ok
    assert drafted(1000, 1.2, ngram).ok
    assert drafted(None, None, ngram) is None, "the server does not tell"
    assert drafted(0, None, {"speculation": "none"}) is None
    lies = drafted(1000, 1.2, {"speculation": "none"})
    assert not lies.ok, "it was told not to speculate, and says so, and does"
    assert pointless(lies, 8).kind == "no_op_setting"
    assert drafted(1000, 1.2, {}) is None, "a server of its own mind, in a space that knows nothing of speculation"
    assert drafted(0, None, {**ngram, "disable_batch_threshold": 4}) is None, "it was told to be off at eight streams"
    assert not drafted(0, None, {**ngram, "disable_batch_threshold": 8}).ok
    assert drafted(0, None, {**ngram, "steps_by_batch": "1:3,8:0"}) is None
    assert not drafted(0, None, {**ngram, "steps_by_batch": "1:0,8:3"}).ok


def test_a_candidate_that_speculates_in_vain_is_stopped_after_one_block_and_never_scored(tmp_path):
    machine = ToyMachine()
    measure = machine.measure

    def measured(server, record, **kwargs):
        outcome = measure(server, record, **kwargs)
        steps = 1000 if record.settings.get("speculation") == "ngram" else 0
        outcome.block = replace(outcome.block, accept_length=1.0, counters={"server_verify_steps": steps})
        return outcome

    machine.measure = measured
    data = controller(
        study(tmp_path, space(machine_space(), "budget.launches=4", "budget.candidates=1")), machine, policy=POLICY
    ).run()
    (trial,) = data.measured
    assert trial.why.startswith("spec_inactive: speculation has no effect")
    blocks = [stored for stored in data.blocks.values() if stored.candidate_id == trial.candidate_id]
    assert [stored.block.valid for stored in blocks] == [False], "it is kept, and counts for nothing"


# -- storage, clocks, neighbours --------------------------------------


def test_a_database_on_a_network_file_system_is_recognised(tmp_path):
    mounts = tmp_path / "mounts"
    nested = tmp_path / "share" / "local disk"
    nested.mkdir(parents=True)
    spaced = str(nested).replace(" ", "\\040")
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/x {tmp_path}/share nfs4 rw 0 0\n/dev/sdb {spaced} xfs rw 0 0\n")
    assert network_filesystem(tmp_path / "share" / "study.db", mounts) == "nfs4"
    assert network_filesystem(nested / "study.db", mounts) is None
    assert network_filesystem(tmp_path / "study.db", mounts) is None
    assert network_filesystem(tmp_path, tmp_path / "nowhere") is None


def test_a_study_on_a_network_file_system_is_warned_of_and_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.study.session.network_filesystem", lambda path: "nfs")
    store, told = study(tmp_path, space(machine_space(), "budget.launches=2")), Told()
    run_study(store, observer=told, engine=controller(store, ToyMachine()).engine, world=ToyMachine(), folder=tmp_path)
    (warning,) = [event.message for event in told.events if event.kind == "storage"]
    assert "PostgreSQL" in warning


def test_a_second_study_on_other_devices_is_not_told_of_the_first_and_one_on_the_same_is(tmp_path):
    with measuring("first", tmp_path, ("0", "1")):
        with measuring("second", tmp_path, ("2",)) as met:
            assert met is None
        with measuring("second", tmp_path, ("1", "2")) as met:
            assert "study first" in met
        with measuring("second", tmp_path) as met:
            assert "is measuring on this machine as well" in met


def test_a_second_study_on_the_machine_is_told_of_the_first(tmp_path):
    with measuring("one", tmp_path) as first, measuring("two", tmp_path) as second:
        assert first is None
        assert second is not None
        assert f"study one (process {os.getpid()})" in second
    with measuring("three", tmp_path) as third:
        assert third is None


def test_another_sampler_on_resume_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    the_space = space(machine_space(), "engine.kind=command")
    url = f"sqlite:///{tmp_path / 'study.db'}"
    from tuner.study.data import Budget
    from tuner.study.store import create_study

    now = fingerprint(the_space, get_engine("command").version(), hardware())
    store = create_study(
        "toy", space=the_space, space_text="", fingerprint=now, seed=1, budget=Budget(4, 4, None), storage=url
    )
    store.close()
    reopen("toy", storage=url, limits=Limits()).close()
    with store.engine.begin() as connection:
        connection.execute(sa.update(tables.studies).values(sampler={"name": "random"}))
    with pytest.raises(UsageError, match=r"sampler: was \{'name': 'random'\}"):
        reopen("toy", storage=url, limits=Limits())


def test_another_time_zone_on_resume_changes_no_time(tmp_path, monkeypatch):
    store = study(tmp_path, space(machine_space(), "budget.launches=2"))
    before = controller(store, ToyMachine(), policy=POLICY).run()
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        after = study(tmp_path).data()
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert [launch.duration_s for launch in after.launches] == [launch.duration_s for launch in before.launches]
    assert (after.created_at, after.elapsed_s) == (before.created_at, before.elapsed_s)


def test_what_a_dead_tuner_had_begun_is_unfinished_and_not_running(tmp_path):
    store = study(tmp_path)
    store.trials.begin("baseline", store.data().baseline.id, None)
    assert summary(store.data()).trials == {"running": 1}
    assert summary(store.data(), working=False).trials == {"unfinished": 1}


# -- keys and limits --------------------------------------


def test_a_key_is_read_from_the_variable_that_the_space_names_and_kept_nowhere(monkeypatch):
    text = machine_space().replace("model: toy", "model: toy, api_key_env: TOY_KEY, launch: {token_stall_s: 7}")
    the_space = parse_space(text, source="toy.yaml")
    monkeypatch.delenv("TOY_KEY", raising=False)
    with pytest.raises(UsageError, match="TOY_KEY, which is not set"):
        api_key(the_space)
    monkeypatch.setenv("TOY_KEY", "sk-very-secret")
    assert api_key(the_space) == "sk-very-secret"
    assert "sk-very-secret" not in str(the_space.to_dict())
    machine = Machine(the_space)
    assert machine._plan.stall_s == 7
    assert api_key(space()) is None
