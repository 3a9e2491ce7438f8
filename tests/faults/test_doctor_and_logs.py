"""`tuner doctor` finds and clears what a killed tuner left, and nothing else; `tuner logs` shows a launch's output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.faults.test_launch_log import alive
from tests.tuner.study.toy_study import study as toy_study
from tuner.bench.machine import Surroundings
from tuner.cli.app import app
from tuner.launch import pump
from tuner.launch.leftovers import leftovers as everything
from tuner.launch.leftovers import orphaned, parse_marker
from tuner.launch.processes import look, marker_text
from tuner.launch.reap import reap
from tuner.launch.server import Server
from tuner.records import LaunchRecord
from tuner.study.data import Slot
from tuner.study.lease import hold
from tuner.study.store import StudyStore

OWNER = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from conftest import faulty_record
from tuner.launch.server import Server
record = faulty_record("leaks_segments", "--segment", {segment!r})
server = Server.start(record, marker={{"study": {study!r}, "launch": "7"}}, log_path=Path({log!r}))
server.wait_ready()
print(server.pid, record.port, flush=True)
time.sleep(3600)
"""


def doctor(*arguments: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def mine(facts: dict, study: str) -> list[dict]:
    return [left for left in facts["leftovers"] if left["study"] == study]


def test_leftovers_of_a_killed_tuner_are_listed_and_cleared_and_those_of_a_living_one_are_not(
    launch: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, segment = f"killed {os.getpid()}", Path(f"/dev/shm/spec-tuner-test-doctor-{os.getpid()}")
    here = Path(__file__).parent
    code = OWNER.format(
        root=str(here.parent.parent), here=str(here), study=study, log=str(tmp_path / "log"), segment=str(segment)
    )
    # Whatever else lies about on this machine is not the test's to clear.
    monkeypatch.setattr(
        "tuner.launch.leftovers.leftovers", lambda: [left for left in everything() if left.study == study]
    )
    working = launch("healthy")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        pid, port = map(int, owner.stdout.readline().split())
        assert mine(doctor()[1], study) == [], "its tuner lives"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        status, facts = doctor()
        (left,) = mine(facts, study)
        assert status == 3
        assert pid in left["pids"]
        assert left["launch"] == "7"
        assert left["ports"] == [port]
        assert left["segments"] == [segment.name]
        _, facts = doctor("--clean")
        assert mine(facts, study) == []
        assert facts["cleaned"] >= 1
        assert not alive(pid)
        assert not segment.exists()
        assert working.alive
    finally:
        owner.kill()
        reap(marker_text({"study": study}), grace_s=0)
        segment.unlink(missing_ok=True)


def test_a_marker_names_its_tuner_by_pid_and_start() -> None:
    me = look(os.getpid())
    assert me is not None
    alive_marker = marker_text({"study": "a;b=c", "tuner": f"{me.pid}.{me.started}"})
    assert parse_marker(alive_marker)["study"] == "a;b=c"
    assert not orphaned(alive_marker)
    assert orphaned(marker_text({"tuner": f"{me.pid}.{me.started + 1}"})), "another process had this pid"
    assert not orphaned(marker_text({"study": "x"})), "nobody knows whose that is"


def test_the_machine_and_its_engines_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.launch.leftovers.leftovers", list)
    status, facts = doctor()
    assert (status, facts["problems"]) == (0, [])
    assert facts["engines"]["bundled"]
    assert facts["cores"] >= 1


@pytest.mark.parametrize(
    ("foreign", "steal", "said"),
    [
        (0.02, 0.0, "nothing is in the way of a study"),
        (0.4, 0.0, "other programs take 40 % of the cores' time: it shows as noise"),
        (0.9, 0.0, "other programs take 90 % of the cores' time: blocks measured now would be invalid"),
        (0.0, 0.3, "the hypervisor takes 30 % of the cores' time: blocks measured now would be invalid"),
    ],
)
def test_a_machine_under_load_is_not_called_healthy(
    foreign: float, steal: float, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.launch.leftovers.leftovers", list)
    monkeypatch.setattr("tuner.bench.machine.between", lambda *_: Surroundings(foreign=foreign, steal=steal))
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0, "load is no breakage"
    shown = " ".join(result.stdout.split())
    assert said in shown
    assert ("healthy" in shown) == ("nothing" in said)
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["load"]["foreign"] == foreign


@pytest.mark.timing
def test_who_is_busy_on_the_machine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.bench.machine.between", lambda *_: Surroundings(foreign=0.9, steal=0.0))
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        _, facts = doctor()
        assert any(f"process {spinning.pid} (" in each for each in facts["load"]["busiest"])
    finally:
        spinning.kill()
        spinning.wait()


def test_too_little_disk_is_a_broken_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.launch.leftovers.leftovers", list)
    monkeypatch.setattr("tuner.cli.doctor.MIN_DISK_GIB", 1e9)
    status, facts = doctor()
    assert status == 3
    assert "GiB are free" in facts["problems"][0]


def tuner_logs(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["logs", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def study(tmp_path: Path, faulty: Callable[..., LaunchRecord]) -> Iterator[tuple[StudyStore, str]]:
    """A study of two launches, the second one at work."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    store = toy_study(tmp_path)
    store.put_candidate(store.data().baseline)
    for repetition in (0, 1):
        launch = store.begin_launch(Slot(store.data().baseline.id, "screen", repetition))
        path = tmp_path / f"launch-{launch}.log"
        path.write_text(f"log of {launch}: größer\n")
        store.launch_record(launch, faulty("healthy"), "", str(path))
        if repetition == 0:
            store.end_launch(launch, 0, "ended in order")
    yield store, url
    store.close()


def test_the_latest_log_or_the_one_that_is_named_is_printed(study: tuple[StudyStore, str]) -> None:
    store, url = study
    assert tuner_logs(store.name, "--storage", url) == (0, "log of 2: größer\n")
    assert tuner_logs(store.name, 1, "--storage", url) == (0, "log of 1: größer\n")
    status, said = tuner_logs(store.name, 9, "--storage", url)
    assert status == 2
    assert "it has 1, 2" in said


def test_following_ends_with_the_launch(study: tuple[StudyStore, str], tmp_path: Path) -> None:
    store, url = study
    sink = pump.Sink(tmp_path / "launch-2.log", 1 << 20, 1 << 20)

    def go_on() -> None:
        time.sleep(0.5)
        sink.write(b"more\n")
        store.end_launch(2, 0, "ended in order")

    thread = threading.Thread(target=go_on)
    with hold(store.engine, store.name):
        thread.start()
        assert tuner_logs(store.name, "--follow", "--storage", url) == (0, "log of 2: größer\nmore\n")
        thread.join()
