"""From a container section to the whole command line, and what cannot be in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.engines.base import get_engine, version_of
from tuner.engines.container import OURS, contained, container_problems
from tuner.errors import UsageError
from tuner.export.provenance import Provenance, record_hash
from tuner.export.shell import render_shell
from tuner.records import Candidate, LaunchRecord
from tuner.space import Outside, SpaceProblems, parse_space
from tuner.space.schema import ContainerSection
from tuner.study.engine import launch_record
from tuner.study.session import changes, fingerprint

IMAGE = "lmsysorg/sglang@sha256:" + "0123456789abcdef" * 4

SPACE = """\
name: contained
engine:
  kind: command
  model: /models/m
  args:
    command: [server, --host, "{host}", --port, "{port}", --model, "{model}", --steps, "{num_steps?}"]
  env: {NCCL_DEBUG: WARN}
  api_key_env: MY_KEY
  container:
    image: lmsysorg/sglang:v1
    mounts: ["/tmp:/models:ro", "/tmp:/cache"]
    gpus: [0, 2]
    devices: [/dev/infiniband]
    shm_size: 32g
    run_args: [--ulimit, memlock=-1, -e, HF_TOKEN]
workload: {concurrency: [1]}
baseline: {}
parameters:
  num_steps: {low: 1, high: 4}
  env.TUNED: {choices: [unset, "1"]}
"""


def record(*overrides: str, **settings: Any) -> LaunchRecord:
    space = parse_space(SPACE, source="s.yaml", overrides=overrides)
    return launch_record(space, get_engine("command"), Candidate(settings), host="127.0.0.1", port=31234, image=IMAGE)


def test_the_whole_command_is_in_the_record() -> None:
    found = record(num_steps=3, **{"env.TUNED": "1"})
    assert list(found.argv) == [
        *("docker", "run", "--log-driver", "none", "--pull=never", "--init", "--network", "host"),
        *("--shm-size", "32g", "--gpus", '"device=0,2"', "--device", "/dev/infiniband"),
        *("--mount", "type=bind,source=/tmp,target=/models,readonly", "--mount", "type=bind,source=/tmp,target=/cache"),
        *("--env", "NCCL_DEBUG=WARN", "--env", "TUNED=1", "--env", "MY_KEY"),
        *("--ulimit", "memlock=-1", "-e", "HF_TOKEN", IMAGE),
        *("server", "--host", "127.0.0.1", "--port", "31234", "--model", "/models/m", "--steps", "3"),
    ]
    assert found.env == {}
    assert found.container is not None
    assert (found.container.runtime, found.container.image, found.container.network) == ("docker", IMAGE, "host")
    assert found.engine_version == f"unknown in {IMAGE}"
    assert LaunchRecord.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_podman_has_its_own_words() -> None:
    found = record("engine.container.runtime=podman", "engine.container.init=false", **{"env.TUNED": "unset"})
    argv = list(found.argv)
    assert argv[:7] == ["podman", "run", "--log-driver", "none", "--pull=never", "--network", "host"]
    assert argv[argv.index("nvidia.com/gpu=0") - 1] == "--device"
    assert "nvidia.com/gpu=2" in argv
    assert argv[argv.index("--unsetenv") + 1] == "TUNED"


def test_a_network_of_its_own_publishes_the_port_on_loopback_and_listens_everywhere() -> None:
    found = record("engine.container.network=bridge")
    argv = list(found.argv)
    assert argv[argv.index("--publish") + 1] == "127.0.0.1:31234:31234"
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    assert found.base_url == "http://127.0.0.1:31234"


def test_all_gpus_and_none() -> None:
    argv = list(record("engine.container.gpus=all").argv)
    assert argv[argv.index("--gpus") + 1] == "all"
    assert "--gpus" not in record("engine.container.gpus=null").argv


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client here")
def test_the_real_client_takes_the_command_as_far_as_the_daemon(tmp_path: Path) -> None:
    """A flag that it did not know would be refused before it looks for a daemon, which is none here."""
    found = record("engine.container.devices=[]", num_steps=3)  # it asks the daemon what a device is
    argv = (*found.argv[:2], "--cidfile", str(tmp_path / "cid"), "--label", "spec-tuner.marker=x=1;", *found.argv[2:])
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    answer = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=30)
    assert answer.returncode == 125
    assert "Cannot connect to the Docker daemon" in answer.stderr, answer.stderr


@pytest.mark.parametrize("network", ["host", "bridge"])
def test_the_exported_script_runs_what_was_measured_and_moves_with_its_port(tmp_path: Path, network: str) -> None:
    found = record(f"engine.container.network={network}", num_steps=2)
    stub = tmp_path / "docker"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    stub.chmod(0o755)
    provenance = Provenance("s", 1, "c", "d", record_hash(found), "command", "1", "2026", {}, ())
    script = tmp_path / "run.sh"
    script.write_text(render_shell(found, provenance)["run.sh"])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    same = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment, check=True)
    assert same.stdout.splitlines() == list(found.argv[1:])
    moved = subprocess.run(
        ["sh", str(script)], capture_output=True, text=True, env={**environment, "PORT": "8000"}, check=True
    )
    assert moved.stdout.splitlines() == [word.replace("31234", "8000") for word in found.argv[1:]]


def problems(**section: Any) -> list[tuple[tuple[str | int, ...], str]]:
    return container_problems("command", ContainerSection(**{"image": "i", **section}))


@pytest.mark.parametrize(
    ("section", "where", "said"),
    [
        ({"image": "--privileged"}, ("image",), "is not the name of an image"),
        ({"mounts": ["models:/models"]}, ("mounts", 0), "whole paths on both sides"),
        ({"mounts": ["/nowhere/at/all:/models"]}, ("mounts", 0), "does not exist"),
        ({"mounts": ["/tmp:/a", "/tmp:/b:rx"]}, ("mounts", 1), "is not HOST:CONTAINER"),
        ({"gpus": []}, ("gpus",), "lists none"),
        ({"gpus": [0, 0]}, ("gpus",), "each once"),
        ({"devices": ["kfd"]}, ("devices", 0), "begins with '/'"),
        ({"shm_size": "32 gigs"}, ("shm_size",), "is not a size"),
        ({"run_args": ["--rm"]}, ("run_args", 0), "the tuner removes it"),
        ({"run_args": ["--name", "x"]}, ("run_args", 0), "by their id"),
        ({"run_args": ["--shm-size=1g"]}, ("run_args", 0), "it is container.shm_size"),
        ({"run_args": ["-it"]}, ("run_args", 0), "there is no terminal"),
        ({"run_args": ["server"]}, ("run_args", 0), "would be taken for the image"),
        ({"run_args": ["--env", "HF_TOKEN=hf_x"]}, ("run_args", 1), "give its name alone"),
        ({"run_args": ["--ipc", "host"], "shm_size": "1g"}, ("run_args", 1), "would change nothing"),
    ],
)
def test_what_cannot_be_in_a_container_is_said(section: dict, where: tuple, said: str) -> None:
    ((place, message),) = problems(**section)
    assert place == where
    assert said in message


@pytest.mark.parametrize("flag", sorted(OURS))
def test_every_argument_of_the_tuners_own_is_refused_also_with_a_value(flag: str) -> None:
    assert problems(run_args=[flag])
    assert problems(run_args=[f"{flag}=x"])


def test_extra_arguments_that_are_the_users_are_let_through() -> None:
    assert problems(run_args=["--ulimit", "memlock=-1", "--ipc=host", "-eHF_TOKEN", "--cap-add=SYS_PTRACE"]) == []


def test_problems_of_a_container_are_listed_at_once_with_their_lines() -> None:
    text = SPACE.replace("shm_size: 32g", "shm_sise: 32g").replace("gpus: [0, 2]", "gpus: none")
    text = text.replace("image: lmsysorg/sglang:v1", "image: a b").replace("api_key_env: MY_KEY", "api_key_env: MY-KEY")
    with pytest.raises(SpaceProblems) as found:
        parse_space(text, source="s.yaml", outside=Outside(container_problems=container_problems))
    said = str(found.value)
    assert "s.yaml:14: engine.container.shm_sise: 'shm_sise' is unknown; did you mean 'shm_size'?" in said
    assert "s.yaml:12: engine.container.gpus: must be all or a list of indices such as [0, 1], not 'none'" in said
    assert "s.yaml:8: engine.api_key_env: names the variable" in said
    with pytest.raises(SpaceProblems, match=r"s.yaml:10: engine.container.image: 'a b' is not the name of an image"):
        parse_space(
            SPACE.replace("image: lmsysorg/sglang:v1", "image: a b"),
            source="s.yaml",
            outside=Outside(container_problems=container_problems),
        )


def test_the_bundled_engine_is_not_started_in_a_container() -> None:
    ((_, message),) = container_problems("bundled", ContainerSection(image="i"))
    assert "kind: command" in message


def test_another_image_of_the_same_name_is_another_engine() -> None:
    space = parse_space(SPACE, source="s.yaml")
    then, now = (fingerprint(space, "1", {}, f"i@sha256:{digest}") for digest in "ab")

    data: Any = SimpleNamespace(space=space, fingerprint=then, sampler={})
    assert changes(data, space, now) == ["engine version: was 1 in i@sha256:a, is now 1 in i@sha256:b"]


def test_a_container_changes_what_a_study_means_and_waiting_longer_or_a_key_does_not() -> None:
    base = parse_space(SPACE, source="s")
    other = parse_space(SPACE, source="s", overrides=["engine.container.shm_size=1g"])
    assert base.fingerprint != other.fingerprint
    patient = parse_space(SPACE, source="s", overrides=["engine.launch.stall_s=900", "engine.api_key_env=OTHER"])
    assert base.fingerprint == patient.fingerprint
    with pytest.raises(UsageError, match="above 0"):
        parse_space(SPACE, source="s", overrides=["engine.launch.grace_s=0"])


def test_a_record_without_a_container_is_written_as_ever() -> None:
    plain = get_engine("command").record(
        model="m", args={"command": ["x", "{port}"]}, env={}, settings={}, host="127.0.0.1", port=1
    )
    assert "container" not in plain.to_dict()
    assert "log_rules" not in plain.to_dict()
    assert LaunchRecord.from_dict(plain.to_dict()) == plain
    assert contained(plain, ContainerSection(image="i"), "i").argv[-3:] == ("i", "x", "1")


def test_what_only_the_trial_needs_is_named_without_a_value_and_files_are_mounted() -> None:
    plain = get_engine("command").record(
        model="m", args={"command": ["x", "{port}"]}, env={}, settings={}, host="127.0.0.1", port=1
    )
    record = replace(plain, trial_env={"DEV_MODE": "1"}, files={"/tmp/steps.json": "{}"})
    inside = contained(record, ContainerSection(image="i"), "i")
    assert inside.argv[inside.argv.index("DEV_MODE") - 1] == "--env"
    assert "type=bind,source=/tmp/steps.json,target=/tmp/steps.json,readonly" in inside.argv
    assert inside.trial_env == {"DEV_MODE": "1"}, "the client has the value, and passes it on"


@pytest.mark.parametrize("kind", ["sglang", "vllm", "llama_server"])
def test_the_version_in_an_image_is_not_that_of_what_is_installed_here(kind: str) -> None:
    engine = get_engine(kind)
    assert version_of(engine, {}, contained=True) == "unknown"
    assert version_of(engine, {"version": "1.2"}, contained=True) == "1.2"
