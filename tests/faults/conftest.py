from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.engines.base import get_engine
from tuner.launch.ports import free_port, is_free
from tuner.launch.processes import MARKER, marker_text
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server
from tuner.records import LaunchRecord, Setting

SCRIPT = Path(__file__).with_name("misbehaving_server.py")
QUICK = LaunchLimits(stall_s=1.0, startup_s=6.0, smoke_s=1.0, info_s=0.5, grace_s=1.0, gone_s=5.0)


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

    def start(record: LaunchRecord | str, *extra: str, limits: LaunchLimits = QUICK) -> Server:
        record = faulty_record(record, *extra) if isinstance(record, str) else record
        log = tmp_path / f"launch-{len(servers)}.log"
        server = Server.start(record, marker={**marker, "launch": str(len(servers))}, log_path=log, limits=limits)
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


@pytest.fixture
def faulty() -> Callable[..., LaunchRecord]:
    return faulty_record
