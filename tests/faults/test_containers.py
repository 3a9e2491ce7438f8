"""Servers in containers, with a runtime that is a stand-in and servers that are real: outside of our process family."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.faults.conftest import PATIENT, QUICK, FakeDocker
from tests.faults.test_faulty_servers import failing
from tests.tuner.study.test_study_fuzz import Served
from tests.tuner.study.toy_study import controller, space
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.errors import EnvironmentBroken
from tuner.launch import container
from tuner.launch.leftovers import leftovers
from tuner.launch.processes import marker_of, marker_text, wait_until
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server
from tuner.launch.settle import settle
from tuner.study.data import Budget
from tuner.study.policy import Policy
from tuner.study.session import current_fingerprint
from tuner.study.store import create_study

Launch = Callable[..., Server]

OWNER = """
import sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from tests.faults.conftest import FakeDocker
from tuner.launch.server import LaunchLimits, Server
fake = object.__new__(FakeDocker)
server = Server.start(fake.record("healthy"), marker={{"study": {study!r}, "launch": "3"}}, log_path=Path({log!r}))
server.wait_ready()
print(server._container.id, flush=True)
time.sleep(3600)
"""


def test_a_server_in_a_container_goes_through_every_step_and_leaves_nothing(docker: FakeDocker, launch: Launch) -> None:
    record = docker.record("healthy", env={"COLOUR": "deep blue", "GONE": None}, shm_size="1g")
    server = launch(record)
    server.wait_ready()
    assert server.smoke(tokens=8).tokens == 8
    echo = httpx.get(record.base_url + "/echo", trust_env=False).json()
    assert echo["env"].pop("HOSTNAME") == server._container.id, "as runtimes have it"
    assert echo["env"] == {"FROM_IMAGE": "1", "COLOUR": "deep blue"} | {
        name: value for name, value in echo["env"].items() if name.startswith("LC_")
    }, "a container has the variables that it was given, and no marker"
    assert marker_of(echo["pid"]) is None
    assert echo["pid"] not in {process.pid for process in server._family.living()}
    (name,) = docker.ids()
    assert name == server._container.id
    labels = json.loads(docker.ask("container", "inspect", name))[0]["Config"]["Labels"]
    assert labels == {"spec-tuner.marker": server.marker}
    assert "listening on" in server.log_tail(), "the output of a container is in the log of its launch"
    report = server.stop()
    assert (report.clean, report.escalated) == (True, False)
    assert report.seconds < LaunchLimits().grace_s
    assert docker.ids() == []


def test_a_container_that_does_not_heed_sigterm_is_killed_after_the_grace_time(
    docker: FakeDocker, launch: Launch
) -> None:
    server = launch(docker.record("ignores_sigterm"))
    server.wait_ready()
    report = server.stop()
    assert report.escalated
    assert report.seconds >= QUICK.grace_s
    assert docker.ids() == []


def test_a_published_port_is_the_containers_though_nobody_sees_who_listens(docker: FakeDocker, launch: Launch) -> None:
    docker.rules(hides_pids=True)
    server = launch(docker.record("healthy", network="bridge"))
    server.wait_ready()
    assert server.smoke().tokens


def test_somebody_elses_server_is_never_taken_for_the_containers(docker: FakeDocker, launch: Launch) -> None:
    record = docker.record("never_listens")
    server = launch(record)
    index = record.argv.index(docker.PINNED)
    inner = list(record.argv[index + 1 :])
    inner[inner.index("never_listens")] = "healthy"
    stranger = subprocess.Popen(inner)
    try:
        failure, _ = failing(server.wait_ready)
        assert (failure.kind, failure.blame) == ("port_conflict", "environment")
    finally:
        stranger.kill()
        stranger.wait()


def test_memory_that_runs_out_in_a_container_is_the_class_though_the_log_says_nothing(
    docker: FakeDocker, launch: Launch
) -> None:
    docker.rules(oom_killed=True)
    server = launch(docker.record("healthy"))
    server.wait_ready()
    server.smoke()
    os.kill(server._container.state().pid, signal.SIGKILL)
    failure = server.failure(wait_s=3)
    assert failure is not None
    assert (failure.kind, failure.exit_status, failure.blame) == ("oom_under_load", 137, "candidate")
    assert "memory ran out in its container" in failure.message


def test_a_container_that_somebody_ends_is_not_held_against_the_candidate(docker: FakeDocker, launch: Launch) -> None:
    server = launch(docker.record("healthy"))
    server.wait_ready()
    server.smoke()
    docker.ask("stop", "-t", "0", server._container.id)
    failure = server.failure(wait_s=3)
    assert failure is not None
    assert (failure.kind, failure.blame) == ("killed_externally", "environment")


def test_a_crash_in_a_container_shows_its_exception(docker: FakeDocker, launch: Launch) -> None:
    server = launch(docker.record("crashes_at_start"))
    failure, _ = failing(server.wait_ready)
    assert (failure.kind, failure.exit_status) == ("startup_crash", 1)
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.message
    assert docker.ids(), "how it ended has been read from it"
    server.stop()
    assert docker.ids() == []


def test_what_the_runtime_cannot_start_is_the_machines_fault(docker: FakeDocker, launch: Launch) -> None:
    broken = 'could not select device driver "" with capabilities: [[gpu]]'
    docker.rules(start_error=broken)
    failure, _ = failing(launch(docker.record("healthy", gpus="all")).wait_ready)
    assert (failure.kind, failure.blame) == ("env_broken", "environment")
    assert broken in failure.message


def test_a_client_that_is_killed_does_not_leave_its_container_behind(docker: FakeDocker, launch: Launch) -> None:
    server = launch(docker.record("healthy"))
    server.wait_ready()
    os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: not server.alive, 2)
    assert docker.ids(), "the container does not care about its client"
    assert server.stop().clean
    assert docker.ids() == []


def test_a_container_that_cannot_be_removed_is_said_and_waited_for(docker: FakeDocker, tmp_path: Path) -> None:
    record = docker.record("healthy")
    limits = replace(PATIENT, gone_s=0.5)
    server = Server.start(record, marker={"study": "stuck"}, log_path=tmp_path / "log", limits=limits)
    server.wait_ready()
    docker.rules(keeps_containers=True)
    report = server.stop()
    assert report.containers_left == (server._container.id,)
    assert "cannot be removed" in report.unclean[0]
    assert "docker rm --force" in settle(report, timeout_s=0)[0]
    docker.rules()
    assert settle(report, timeout_s=5) == ()


def test_a_container_of_a_killed_tuner_is_listed_and_cleared_by_its_label(docker: FakeDocker, tmp_path: Path) -> None:
    study = f"contained {os.getpid()}"
    root, log = str(Path(__file__).parents[2]), str(tmp_path / "log")
    code = OWNER.format(root=root, study=study, log=log)
    mine = marker_text({"study": study})
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        name = owner.stdout.readline().decode().strip()
        assert docker.ids() == [name]
        assert [left for left in leftovers() if left.study == study] == [], "its tuner lives"
        owner.kill()
        owner.wait()
        (left,) = [left for left in leftovers() if left.study == study]
        assert left.containers == (("docker", name),)
        shown = CliRunner().invoke(app, ["doctor"])
        assert f"docker container {name[:12]}" in shown.output.replace("\n", "")
        assert CliRunner().invoke(app, ["doctor", "--clean", "--json"]).exit_code in (0, 3)
        assert docker.ids() == []
        assert wait_until(lambda: marked(mine) == [], 5)
    finally:
        owner.kill()
        reap(mine, grace_s=0)


def test_the_next_run_of_a_study_ends_its_containers_and_nobody_elses(docker: FakeDocker, launch: Launch) -> None:
    mine, other = launch(docker.record("healthy")), launch(docker.record("healthy"))
    for server in (mine, other):
        server.wait_ready()
    found, left = container.reap(mine.marker)
    assert (found, left) == ([mine._container.id], [])
    assert docker.ids() == [other._container.id]
    with pytest.raises(ValueError, match="every study"):
        container.marked("docker", "")


def test_a_runtime_or_an_image_that_is_not_there_is_found_before_a_launch(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert container.image("docker", docker.IMAGE).pinned == docker.PINNED
    with pytest.raises(EnvironmentBroken, match="docker pull nowhere/fake:2"):
        container.image("docker", "nowhere/fake:2")
    docker.down()
    with pytest.raises(EnvironmentBroken, match="Is the docker daemon running"):
        container.version("docker")
    docker.up()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentBroken, match="not installed"):
        container.version("docker")


SPACE = f"""\
name: boxed
engine:
  kind: command
  model: fake
  args:
    command: [{sys.executable}, -I, -S, {Path(__file__).with_name("misbehaving_server.py")},
              --host, "{{host}}", --port, "{{port}}", --mode, "{{mode}}"]
  container: {{image: "{FakeDocker.IMAGE}"}}
workload: {{concurrency: [1, 8], max_tokens: 64}}
baseline: {{mode: healthy}}
parameters:
  mode: {{choices: [grandchild]}}
budget: {{launches: 2}}
profile: short
"""


def test_a_study_in_containers_runs_to_its_end_and_keeps_the_image_by_digest(
    docker: FakeDocker, tmp_path: Path
) -> None:
    the_space = space(SPACE)
    now = current_fingerprint(the_space)
    assert now["engine_version"] == f"unknown in {docker.PINNED}"
    budget = Budget(2, 4, None)
    store = create_study(
        "boxed",
        space=the_space,
        space_text=SPACE,
        fingerprint=now,
        seed=1,
        budget=budget,
        storage=f"sqlite:///{tmp_path / 'study.db'}",
    )
    data = controller(store, Served(), get_engine("command"), policy=Policy(pairs=0)).run()
    assert data.state == "done"
    assert [launch.failure for launch in data.launches] == [None, None]
    for launch in data.launches:
        assert launch.record is not None
        assert launch.record.argv[:2] == ("docker", "run")
        assert docker.PINNED in launch.record.argv
        assert "--cidfile" not in launch.record.argv, "what is of one launch alone is not part of what was measured"
    assert docker.ids() == []


def test_check_and_run_say_what_a_container_lacks_before_anything_starts(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "boxed.yaml"
    file.write_text(SPACE)
    assert CliRunner().invoke(app, ["check", "boxed.yaml"]).exit_code == 0
    for command in ("check", "run"):
        missing = CliRunner().invoke(app, [command, "boxed.yaml", "--set", "engine.container.image=nowhere:1"])
        assert missing.exit_code == 3
        assert "docker pull nowhere:1" in missing.output.replace("\n", " ")
    docker.down()
    for command in ("check", "run"):
        down = CliRunner().invoke(app, [command, "boxed.yaml"])
        assert down.exit_code == 3
        assert "Is the docker daemon running" in down.output.replace("\n", " ")
    assert not (tmp_path / "studies").exists()
    docker.up()
