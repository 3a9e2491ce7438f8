from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.engines.base import get_engine
from tuner.engines.container import contained
from tuner.launch.ports import free_port, is_free
from tuner.launch.processes import MARKER, marker_text
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server
from tuner.records import LaunchRecord, Setting
from tuner.space.schema import ContainerSection

SCRIPT = Path(__file__).with_name("misbehaving_server.py")
QUICK = LaunchLimits(stall_s=1.0, startup_s=6.0, smoke_s=1.0, info_s=0.5, grace_s=1.0, gone_s=5.0)

PATIENT = replace(QUICK, stall_s=10.0, startup_s=30.0, smoke_s=10.0)
"""With a runtime in between, which is several programs more to start."""


def faulty_record(mode: str, *extra: str, settings: dict[str, Setting] | None = None, **env: str) -> LaunchRecord:
    """A launch record of the misbehaving server, by the engine that users have for their own servers."""
    command = [sys.executable, "-I", str(SCRIPT), "--host", "{host}", "--port", "{port}", "--mode", "{mode}"]
    return get_engine("command").record(
        model="fake",
        args={"command": [*command, "--num-steps", "{num_steps?}", *extra], "info_path": "/server_info", "mode": mode},
        env=env,
        settings=settings or {},
        host="127.0.0.1",
        port=free_port(),
    )


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Starts servers, and asserts after the test that nothing of any of them is left."""
    marker = {"study": f"test {os.getpid()} {request.node.name}"}
    servers: list[Server] = []

    def start(
        record: LaunchRecord | str, *extra: str, limits: LaunchLimits | None = None, api_key: str | None = None
    ) -> Server:
        record = faulty_record(record, *extra) if isinstance(record, str) else record
        limits = limits or (QUICK if record.container is None else PATIENT)
        log = tmp_path / f"launch-{len(servers)}.log"
        mine = {**marker, "launch": str(len(servers))}
        server = Server.start(record, marker=mine, log_path=log, limits=limits, api_key=api_key)
        servers.append(server)
        return server

    group = os.getpgrp()
    yield start
    try:
        for server in servers:
            report = server.stop()
            assert report.clean, report
            assert is_free(server.record.port)
        assert marked(marker_text(marker)) == []
        assert os.getpgrp() == group
        assert MARKER not in os.environ
    finally:
        reap(marker_text(marker), grace_s=0)


class FakeDocker:
    """A runtime of the name `docker` in front of the PATH, with one image; `rules` make its daemon misbehave."""

    IMAGE = "registry.example.org/fake:1"
    PINNED = "registry.example.org/fake@sha256:" + "ab" * 32

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "bin" / "docker"
        program.parent.mkdir()
        fake = str(Path(__file__).with_name("fake_docker.py"))
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {fake} "$@"\n')
        program.chmod(0o755)
        self.program = str(program)
        image = {"Id": "sha256:" + "cd" * 32, "RepoDigests": [self.PINNED], "Env": ["FROM_IMAGE=1"]}
        (folder / "images.json").write_text(json.dumps({self.IMAGE: image}))
        self.daemon: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        self.daemon = subprocess.Popen([self.program, "daemon"], stdout=subprocess.PIPE)
        assert self.daemon.stdout is not None
        assert self.daemon.stdout.readline() == b"up\n"

    def down(self) -> None:
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()

    def rules(self, **rules: object) -> None:
        (self.folder / "rules.json").write_text(json.dumps(rules))

    def ask(self, *arguments: str) -> str:
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def ids(self) -> list[str]:
        return self.ask("ps", "-aq", "--filter", "label=spec-tuner.marker").split()

    def record(self, mode: str, *extra: str, env: dict[str, str | None] | None = None, **section: Any) -> LaunchRecord:
        """The misbehaving server in a container."""
        space = ContainerSection(image=self.IMAGE, **section)
        inner = faulty_record(mode, *extra)
        if space.network == "bridge":
            argv = tuple("0.0.0.0" if word == inner.host else word for word in inner.argv)
            inner = replace(inner, argv=argv)
        return contained(replace(inner, env=env or {}), space, self.PINNED)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    """A fake runtime that is up; nothing of its containers may be left after the test."""
    fake = FakeDocker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{fake.folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(fake.folder))
    fake.up()
    try:
        yield fake
    finally:
        fake.rules()
        for name in fake.ids():
            fake.ask("rm", "--force", name)
        fake.down()


@pytest.fixture
def faulty() -> Callable[..., LaunchRecord]:
    return faulty_record
