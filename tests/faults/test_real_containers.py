"""Servers in real containers, by docker and by podman, whichever of them runs here."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import engine
from engine.cache import cache_dir
from engine.model.source import KNOWN, fetch
from engine.ops import native
from tests.faults import contained_study
from tests.faults.conftest import PATIENT, faulty_record
from tests.faults.real_runtime import IMAGE, Runtime, Unusable, find, interpreter, mounts
from tests.faults.test_faulty_servers import failing
from tests.tuner.study.test_study_resume import outcome
from tests.tuner.study.toy_study import space
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.engines.container import asking, contained
from tuner.errors import EnvironmentBroken
from tuner.launch import container
from tuner.launch.leftovers import leftovers
from tuner.launch.ports import free_port, is_free
from tuner.launch.processes import marker_of, marker_text, wait_until
from tuner.launch.reap import marked, reap
from tuner.launch.server import Server
from tuner.records import Candidate, LaunchRecord
from tuner.space.schema import ContainerSection
from tuner.study.engine import launch_record
from tuner.study.world import Machine

Launch = Callable[..., Server]


@pytest.fixture(scope="session", params=["docker", "podman"])
def real(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    try:
        runtime = find(request.param)
    except Unusable as error:
        pytest.skip(f"no working {request.param}: {error}")
    yield runtime
    runtime.end()


@pytest.fixture
def box(real: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime that works; nothing of its containers may be left after the test."""
    monkeypatch.chdir(tmp_path)
    for name, value in real.env.items():
        monkeypatch.setenv(name, value)
    before = set(real.ids())
    yield real
    left = [name for name in real.ids() if name not in before]
    for name in left:
        real.ask("rm", "--force", name, check=False)
    assert left == []


def record(box: Runtime, mode: str, *extra: str, env: dict[str, str | None] | None = None, **more: Any) -> LaunchRecord:
    """The misbehaving server in a container."""
    section = ContainerSection(image=IMAGE, runtime=box.name, mounts=mounts(), **more)
    inner = faulty_record(mode, *extra)
    argv = (interpreter(), *inner.argv[1:])
    if section.network == "bridge":
        argv = tuple("0.0.0.0" if word == inner.host else word for word in argv)
    pinned = container.image(box.name, IMAGE).pinned
    return contained(replace(inner, argv=argv, env=env or {}), section, pinned)


def ready(server: Server) -> Server:
    server.wait_ready()
    assert server.smoke(tokens=4).tokens == 4
    return server


def test_an_image_is_asked_in_a_container_that_is_gone_afterwards_also_when_it_never_answers(box: Runtime) -> None:
    section = ContainerSection(image=IMAGE, runtime=box.name, mounts=mounts())

    def said(*command: str, timeout_s: float = 60.0) -> str:
        return container.said_by(box.name, asking(section, IMAGE, command), timeout_s)

    program = "import sys; print(sys.argv[1:]); print('--a-flag N  text', file=sys.stderr)"
    assert said(interpreter(), "-c", program, "--help").strip() == "['--help']"
    assert said(interpreter(), "-c", "import sys; sys.exit('only an error')").strip() == "only an error"
    with pytest.raises(EnvironmentBroken, match="did not answer in 5 s"):
        said(interpreter(), "-c", "import time; time.sleep(600)", timeout_s=5.0)
    with pytest.raises(EnvironmentBroken):
        said("/no/such/program")


def test_a_server_in_a_real_container_goes_through_every_step_and_leaves_nothing(box: Runtime, launch: Launch) -> None:
    plan = record(box, "healthy", env={"COLOUR": "deep blue"}, shm_size="64m", devices=["/dev/full"])
    server = ready(launch(plan))
    echo = httpx.get(plan.base_url + "/echo", trust_env=False).json()
    assert echo["env"].items() >= {"FROM_IMAGE": "1", "COLOUR": "deep blue"}.items()
    assert "SPEC_TUNER_MARKER" not in echo["env"]
    assert box.ids() == [server._container.id]
    state = server._container.state()
    assert state is not None
    assert state.running
    assert state.marker == server.marker
    assert [process.pid for process in server._contained()], "its processes are seen"
    assert marker_of(state.pid) is None
    assert server.cpu_s() > 0
    inside = box.ask("exec", server._container.id, "/bin/sh", "-c", "df -k /dev/shm | tail -1; ls /dev/full")
    assert inside.split()[1] == str(64 << 10)
    assert inside.split()[-1] == "/dev/full"
    assert "listening on" in server.log_tail(), "the output of a container is in the log of its launch"
    report = server.stop()
    assert (report.clean, report.escalated) == (True, False)
    assert report.seconds < PATIENT.grace_s + 3


def test_a_real_container_that_does_not_heed_sigterm_is_killed_after_the_grace_time(
    box: Runtime, launch: Launch
) -> None:
    server = ready(launch(record(box, "ignores_sigterm")))
    report = server.stop()
    assert report.escalated
    assert report.clean
    assert PATIENT.grace_s <= report.seconds < PATIENT.grace_s + 5


@pytest.mark.slow
def test_the_first_process_of_a_container_is_deaf_to_sigterm_without_an_init(box: Runtime, launch: Launch) -> None:
    server = ready(launch(record(box, "healthy", init=False)))
    report = server.stop()
    assert (report.clean, report.escalated) == (True, True)


def test_a_crash_in_a_real_container_shows_its_exception_and_status(box: Runtime, launch: Launch) -> None:
    failure, _ = failing(launch(record(box, "crashes_at_start")).wait_ready)
    assert (failure.kind, failure.exit_status) == ("startup_crash", 1)
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.message


@pytest.mark.slow
def test_a_server_that_ends_in_a_real_container_is_noticed_at_once(box: Runtime, launch: Launch) -> None:
    server = ready(launch(record(box, "healthy")))
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.record.base_url + "/bye", trust_env=False)
    failure = server.failure(wait_s=3)
    assert failure is not None
    assert (failure.kind, failure.exit_status) == ("died_mid_bench", 0)


@pytest.mark.slow
def test_a_kill_from_inside_or_by_somebody_is_not_held_against_the_candidate(box: Runtime, launch: Launch) -> None:
    for end in (
        lambda s: os.kill(s._container.state().pid, signal.SIGKILL),
        lambda s: box.ask("kill", s._container.id),
    ):
        server = ready(launch(record(box, "healthy")))
        end(server)
        failure = server.failure(wait_s=5)
        assert failure is not None
        assert (failure.kind, failure.blame) == ("killed_externally", "environment")
        assert server.stop().clean


@pytest.mark.slow
def test_memory_that_runs_out_in_a_real_container_is_the_class(box: Runtime, launch: Launch) -> None:
    if not box.groups:
        pytest.skip("no control groups, so no limit: rootless podman wants those of version 2")
    plan = record(box, "eats_memory", run_args=["--memory", "64m"])
    server = launch(plan)
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert (failure.kind, failure.blame) == ("oom_under_load", "candidate")
    assert "memory" in failure.message, "podman does not always say so itself; then the kernel does"
    assert server.stop().clean
    assert not Path("oom").exists(), "nothing is left where the tuner was started"
    assert not [path for path in server.log_path.parent.iterdir() if path.suffix == ".run"]


@pytest.mark.slow
@pytest.mark.parametrize("init", [True, False])
def test_a_program_that_an_image_does_not_have_is_the_machines_fault(box: Runtime, init: bool, launch: Launch) -> None:
    plan = record(box, "healthy", init=init)
    missing = replace(plan, argv=tuple("/nowhere/python" if word == interpreter() else word for word in plan.argv))
    failure, seconds = failing(launch(missing).wait_ready)
    assert (failure.kind, failure.blame) == ("env_broken", "environment")
    assert "exec" in failure.message
    assert seconds < 10


@pytest.mark.slow
def test_a_device_that_is_not_there_is_the_machines_fault(box: Runtime, launch: Launch) -> None:
    failure, _ = failing(launch(record(box, "healthy", devices=["/dev/nowhere"])).wait_ready)
    assert (failure.kind, failure.blame) == ("env_broken", "environment")
    assert "/dev/nowhere" in failure.message


def test_an_image_that_a_real_runtime_does_not_have_is_found_before_a_launch(box: Runtime) -> None:
    assert container.image(box.name, IMAGE).variables >= {"FROM_IMAGE"}
    with pytest.raises(EnvironmentBroken, match=f"{box.name} pull nowhere.invalid/fake:2"):
        container.image(box.name, "nowhere.invalid/fake:2")


def test_a_client_of_a_real_runtime_that_is_killed_does_not_leave_its_container(box: Runtime, launch: Launch) -> None:
    server = ready(launch(record(box, "healthy")))
    os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: not server.alive, 2)
    assert server.stop().clean
    assert box.ids() == []


@pytest.mark.slow
def test_a_real_container_that_was_stopped_before_it_had_begun_is_gone(box: Runtime, launch: Launch) -> None:
    for wait_s in (0.0, 0.05, 0.1, 0.2, 0.4):
        server = launch(record(box, "healthy"))
        time.sleep(wait_s)
        assert server.stop().clean
        assert box.ids() == []


@pytest.mark.slow
def test_removal_at_once_gives_no_grace_time(box: Runtime, launch: Launch) -> None:
    server = ready(launch(record(box, "ignores_sigterm")))
    began = time.monotonic()
    assert container.remove(box.name, server._container.id)
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_paused_real_container_is_ended_too(box: Runtime, launch: Launch) -> None:
    if not box.groups:
        pytest.skip("no control groups, so no pause: rootless podman wants those of version 2")
    server = ready(launch(record(box, "healthy")))
    box.ask("pause", server._container.id)
    report = server.stop()
    assert report.clean
    assert report.seconds < 15


@pytest.mark.slow
def test_a_grandchild_in_a_real_container_goes_with_it(box: Runtime, launch: Launch) -> None:
    server = ready(launch(record(box, "grandchild")))
    inside = {process.pid for process in server._contained()}
    assert len(inside) >= 2
    assert server.stop().clean
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_flood_from_a_real_container_does_not_stop_it(box: Runtime, launch: Launch) -> None:
    server = launch(record(box, "half_built_and_floods"), limits=replace(PATIENT, startup_s=60.0))
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert failure.kind == "partial_init"
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.message


@pytest.mark.slow
def test_a_published_port_of_a_real_container_is_its_own(box: Runtime, launch: Launch) -> None:
    if not box.bridge:
        pytest.skip("no bridge: a daemon of our own has none, and rootless podman wants /dev/net/tun")
    server = ready(launch(record(box, "healthy", network="bridge")))
    assert server.record.port in server._container.state().ports


@pytest.mark.slow
def test_a_taken_port_is_said_and_not_blamed_on_the_candidate(box: Runtime, launch: Launch) -> None:
    plan = record(box, "never_listens")
    server = launch(plan)
    index = plan.argv.index("never_listens")
    argv = [*plan.argv[plan.argv.index(interpreter()) : index], "healthy", *plan.argv[index + 1 :]]
    stranger = subprocess.Popen(argv)
    try:
        failure, _ = failing(server.wait_ready)
        assert (failure.kind, failure.blame) == ("port_conflict", "environment")
    finally:
        stranger.kill()
        stranger.wait()


OWNER = """
import json, sys, time
from pathlib import Path
from tuner.launch.server import Server
from tuner.records import LaunchRecord
record = LaunchRecord.from_dict(json.loads(sys.argv[1]))
server = Server.start(record, marker={"study": sys.argv[2], "launch": "3"}, log_path=Path(sys.argv[3]))
server.wait_ready()
print(server._container.id, flush=True)
time.sleep(3600)
"""


def owned(box: Runtime, study: str, folder: Path, mode: str = "healthy") -> tuple[subprocess.Popen[bytes], str]:
    """A tuner with a server in a container: its process, and the container's id."""
    plan = json.dumps(record(box, mode).to_dict())
    argv = [sys.executable, "-c", OWNER, plan, study, str(folder / "log")]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert owner.stdout is not None
    return owner, owner.stdout.readline().decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["healthy", "ignores_sigterm"])
def test_a_real_container_of_a_killed_tuner_is_listed_and_cleared_by_its_label(
    box: Runtime, mode: str, tmp_path: Path
) -> None:
    study = f"contained {os.getpid()} {mode}"
    owner, name = owned(box, study, tmp_path, mode)
    mine = marker_text({"study": study})
    try:
        assert box.ids() == [name]
        assert [left for left in leftovers() if left.study == study] == [], "its tuner lives"
        owner.kill()
        owner.wait()
        (left,) = [left for left in leftovers() if left.study == study]
        assert left.containers == ((box.name, name),)
        shown = CliRunner().invoke(app, ["doctor"])
        assert f"{box.name} container {name[:12]}" in " ".join(shown.output.split())
        assert CliRunner().invoke(app, ["doctor", "--clean", "--json"]).exit_code in (0, 3)
        assert box.ids() == []
        assert wait_until(lambda: marked(mine) == [], 5)
    finally:
        owner.kill()
        container.reap(mine, (box.name,), grace_s=0)
        reap(mine, grace_s=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_in_real_containers_whose_tuner_is_killed_goes_on_and_leaves_nothing(
    box: Runtime, tmp_path: Path
) -> None:
    """Killed in the search and in the confirmation; it ends as one of plain processes that nobody disturbed."""
    plain, folder = tmp_path / "plain", tmp_path / "contained"
    plain.mkdir()
    folder.mkdir()
    expected = contained_study.run(plain, contained_study.text())
    given = (box.name, IMAGE, interpreter(), json.dumps(mounts()))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.faults.contained_study", str(folder), *given]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for blocks in (2, len(expected.blocks) - 1):
        tuner = subprocess.Popen(command, cwd=root, env=environment)
        try:
            assert wait_until(lambda: len(_blocks(folder)) >= blocks and box.ids() != [], 240)  # noqa: B023
        finally:
            tuner.kill()
            tuner.wait()
        before = _blocks(folder)
    assert subprocess.run(command, cwd=root, env=environment, check=False, timeout=400).returncode == 0
    store = contained_study.opened(folder, contained_study.text(*given[:3], mounts()))
    data = store.data()
    assert before <= _blocks(folder), "no block is lost"
    assert outcome(data) == outcome(expected)
    assert box.ids() == []
    assert marked(marker_text({"study": data.uid})) == []
    assert not [launch for launch in data.launches if launch.ended_at is None]
    assert all(is_free(launch.record.port) for launch in data.launches if launch.record)


ENGINE = """
name: contained-engine
engine:
  kind: command
  model: smollm2-135m
  args:
    command: [{python}, -m, engine, serve, --model, "{{model}}", --host, "{{host}}", --port, "{{port}}",
              --context-length, "512", --speculation, "{{speculation}}", --num-steps, "{{num_steps?}}"]
    info_path: /server_info
  env: {{PYTHONPATH: "{path}", SPEC_TUNER_CACHE: /cache, XDG_CACHE_HOME: /tmp}}
  container: {{runtime: {runtime}, image: "{image}", shm_size: 256m, mounts: {mounts}}}
workload: {{concurrency: [1], max_tokens: 32}}
baseline: {{speculation: none}}
parameters:
  speculation: {{choices: [ngram]}}
  num_steps: {{choices: [3], when: speculation != 'none'}}
budget: {{launches: 4, candidates: 1}}
profile: short
"""


def engine_space(box: Runtime) -> Any:
    """The bundled engine as anybody's server: its interpreter, package, libraries and model are mounted read-only."""
    libraries, package, cache = sysconfig.get_paths()["purelib"], Path(engine.__file__).parent, cache_dir()
    native.build()
    fetch(KNOWN["smollm2-135m"])
    # A compiler is asked for its version, and stands behind a link there.
    inside = [*mounts(), *(f"{each}:{each}:ro" for each in (libraries, package, "/etc/alternatives"))]
    inside += [f"{cache / each}:/cache/{each}:ro" for each in ("models", "kernels")]
    path = f"{package.parent}:{libraries}"
    text = ENGINE.format(python=interpreter(), path=path, runtime=box.name, image=IMAGE, mounts=json.dumps(inside))
    return space(text)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bundled_engine_in_a_real_container_is_launched_measured_and_ended(box: Runtime, tmp_path: Path) -> None:
    the_space = engine_space(box)
    machine = Machine(the_space)
    candidate = Candidate({"speculation": "ngram", "num_steps": 3})
    plan = launch_record(the_space, get_engine("command"), candidate, host="127.0.0.1", port=free_port())
    server = machine.start(plan, marker={"study": f"engine {os.getpid()}"}, log_path=tmp_path / "log")
    try:
        server.wait_ready()
        server.smoke()
        info = server.server_info()
        assert info is not None
        assert (info["effective"]["speculation"], info["effective"]["num_steps"]) == ("ngram", 3)
        assert get_engine("command").mismatches(plan, info) == []
        outcome = machine.measure(
            server, plan, concurrency=1, role="screen", seed=1, on_progress=lambda _progress: None, share=0.5
        )
        assert outcome.failure is None
        assert outcome.block is not None
        assert outcome.block.tokens > 32
        assert outcome.block.counters["server_verify_steps"] > 0
        assert server.cpu_s() > 1, "what it computes is counted as its own"
    finally:
        report = server.stop()
    assert report.unclean == ()  # type: ignore[comparison-overlap]
    assert box.ids() == []


def _blocks(folder: Path) -> set[tuple[Any, ...]]:
    """The blocks of a study as they lie in its database."""
    file = folder / "study.db"
    if not file.exists():
        return set()
    with sqlite3.connect(file) as connection:
        names = {name for (name,) in connection.execute("select name from sqlite_master")}
        if "tuner_blocks" not in names:
            return set()
        return set(connection.execute("select id, candidate, concurrency, role, repetition, block from tuner_blocks"))
