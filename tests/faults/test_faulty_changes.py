"""Servers that fail, hang, die or lie when their settings are changed while they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.changing import QUICK, SPACE, ChangingEngine, changing_study, orphans
from tests.faults.test_faulty_servers import bench
from tests.tuner.study.toy_study import space
from tuner.errors import LaunchFailed
from tuner.launch.ports import free_port
from tuner.launch.server import Server
from tuner.records import Failure, LaunchRecord
from tuner.study.decide import recommendation
from tuner.study.engine import pointless, speculates, unsettled
from tuner.study.world import Machine

Launch = Callable[..., Server]
ENGINE = ChangingEngine()


def changing(mode: str, steps: int = 1, port: int = 0) -> LaunchRecord:
    the_space = space(SPACE, f"engine.args.change={mode}")
    return ENGINE.record(
        model="fake",
        args=the_space.args,
        env={},
        settings={"num_steps": steps},
        host="127.0.0.1",
        port=port or free_port(),
    )


MACHINE = Machine(space(SPACE))


def changed(server: Server, mode: str, steps: int = 3) -> str | None:
    """Puts a server to so many steps; what is wrong with what it then says."""
    record = changing(mode, steps, server.record.port)
    asked = ENGINE.change(record)
    MACHINE.reconfigure(server, record, asked)
    return unsettled(ENGINE, record, asked, server.server_info())


def up(launch: Launch, mode: str) -> Server:
    server = launch(changing(mode), limits=QUICK)
    server.wait_ready()
    server.smoke()
    return server


def failing(server: Server, mode: str) -> tuple[Failure, float]:
    record = changing(mode, 3, server.record.port)
    asked = ENGINE.change(record)
    began = time.monotonic()
    with pytest.raises(LaunchFailed) as caught:
        MACHINE.reconfigure(server, record, asked)
    return caught.value.failure, time.monotonic() - began


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("says_500", "status 500"),
        ("says_409", "requests are running"),
        ("redirects", "status 307"),
        ("closes", "disconnected"),
        ("cuts_off", "peer closed"),
        ("no_http", "RemoteProtocolError"),
        ("endless", "longer than 8 MiB"),
        ("compressed", "Compressed"),
        ("trickles", "no answer in 3 s"),
        ("never_answers", "no answer in 3 s"),
    ],
)
def test_a_change_that_is_not_answered_as_it_should_be_is_the_changes_fault(
    launch: Launch, mode: str, said: str
) -> None:
    failure, seconds = failing(up(launch, mode), mode)
    assert (failure.kind, failure.phase, failure.blame) == ("reconfigure_failed", "bench", "environment")
    assert said in failure.message
    assert seconds < 6


@pytest.mark.timing
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies_before", "expected hidden size 576"),
        ("dies_silently", "status 1"),
        ("exits_0", "status 0 without being asked to"),
        ("dies_with_heir", "the scheduler is gone"),
    ],
)
def test_a_death_in_a_change_is_noticed_within_a_second_whoever_holds_the_connection(
    launch: Launch, mode: str, said: str
) -> None:
    failure, seconds = failing(up(launch, mode), mode)
    assert (failure.kind, failure.phase) == ("died_mid_bench", "bench"), "it is not the first decode any more"
    assert said in failure.message
    assert seconds < 1.3, "it ends a moment after it was asked"


@pytest.mark.parametrize("mode", ["dies_after", "info_dies"])
def test_a_death_behind_a_change_is_not_called_a_crash_of_the_first_decode(launch: Launch, mode: str) -> None:
    server = up(launch, mode)
    try:
        changed(server, mode)
    except LaunchFailed as error:
        failure = error.failure
    else:
        failure = server.failure(wait_s=5)
    assert failure is not None
    assert failure.kind == "died_mid_bench"
    assert "lost in the change" in failure.message or "cannot be told" in failure.message


@pytest.mark.parametrize("mode", ["keeps_old", "half", "late"])
def test_settings_that_are_not_in_effect_when_the_change_is_answered_are_found(launch: Launch, mode: str) -> None:
    problem = changed(up(launch, mode), mode)
    assert problem is not None
    assert "num_steps: asked for 3, in effect 1" in problem


@pytest.mark.parametrize("mode", ["info_breaks", "goes_deaf", "stops_listening"])
def test_a_server_that_does_not_tell_its_settings_after_a_change_is_not_believed(launch: Launch, mode: str) -> None:
    assert changed(up(launch, mode), mode) is not None


@pytest.mark.parametrize(("before", "kind"), [(1, "capped_effective"), (5, "no_op_setting"), (0, "spec_inactive")])
def test_a_server_that_claims_its_new_settings_and_keeps_the_old_is_given_away_by_its_counters(
    launch: Launch, before: int, kind: str
) -> None:
    server = launch(changing("lies", before), limits=QUICK)
    server.wait_ready()
    server.smoke()
    assert changed(server, "lies", 3) is None, "by its own word it has them"
    block = bench(server).block
    assert block is not None
    assert block.counters["server_generated"] > 200
    record = changing("lies", 3, server.record.port)
    gate = speculates(record, block)
    assert gate is not None
    assert not gate.ok
    found = pointless(gate, 1)
    assert (found.kind, found.phase) == (kind, "bench")
    if before:
        honest = speculates(changing("lies", before, server.record.port), block)
        assert honest is not None
        assert honest.ok


def test_a_change_that_works_is_believed(launch: Launch) -> None:
    assert changed(up(launch, "works"), "works") is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mode", ["works", "says_500", "keeps_old", "lies", "never_answers", "dies_with_heir", "stops_decoding", "slower"]
)
def test_a_study_survives_every_fault_of_a_change_with_the_same_recommendation(tmp_path: Path, mode: str) -> None:
    _, work = changing_study(tmp_path, f"engine.args.change={mode}")
    data = work.run()
    if mode != "lies":
        assert work.world.wrong == [], "no block of other settings than its candidate's"  # type: ignore[attr-defined]
    for stored in data.blocks.values():
        asked = data.settings_of(stored.candidate_id)["num_steps"]
        assert stored.block.counters["true_steps"] == asked or not stored.block.valid
    assert len(data.measured) == 6
    assert all(trial.constraints["launch"] <= 0 for trial in data.measured), "on a launch of its own each works"
    if mode not in ("works", "slower"):
        failed = [each for each in data.reconfigurations if each.failure]
        assert [data.settings_of(each.slot.candidate_id)["num_steps"] for each in failed] == [3]
    assert not [launch for launch in data.launches if launch.failure or launch.ended_at is None]
    winner = recommendation(data).overall.winner
    assert winner is not None
    assert winner.settings["num_steps"] == 3
    assert orphans(data.uid) == []
