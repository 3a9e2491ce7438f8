"""The log of a launch under a flood, a killed tuner and a killed pump: the server goes on, the evidence stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.errors import LaunchFailed
from tuner.launch import logs, pump
from tuner.launch.processes import look, marker_text, wait_until
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server

Launch = Callable[..., Server]

OWNER = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from conftest import faulty_record
from tuner.launch.server import Server
server = Server.start(faulty_record("never_ready"), marker={{"study": {study!r}}}, log_path=Path({log!r}))
print(server.pid, flush=True)
time.sleep(3600)
"""


def disk_use(path: Path) -> int:
    return sum(file.stat().st_size for _, file in pump.segments(path))


def alive(pid: int) -> bool:
    process = look(pid)
    return process is not None and not process.zombie


def test_a_server_that_floods_its_log_keeps_running_and_its_first_error_is_found(launch: Launch) -> None:
    server = launch("half_built_and_floods", limits=LaunchLimits(stall_s=10, startup_s=60, grace_s=1, gone_s=5))
    server.wait_ready()
    assert server.alive
    assert pump.size(server.log_path) > 200_000_000
    assert disk_use(server.log_path) <= logs.HEAD + 2 * logs.SEGMENT
    with pytest.raises(LaunchFailed) as caught:
        server.smoke()
    assert caught.value.failure.kind == "partial_init"
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in caught.value.failure.evidence
    assert "AttributeError" in server.log_tail(), "the end of the log is kept as well"
    server.stop()
    assert disk_use(server.log_path) <= logs.HEAD + 2 * logs.SEGMENT


def test_a_tuner_that_is_killed_neither_blocks_nor_ends_its_server_and_loses_nothing_of_its_log(tmp_path: Path) -> None:
    study, log = f"orphan {os.getpid()}", tmp_path / "launch.log"
    here = Path(__file__).parent
    code = OWNER.format(root=str(here.parent.parent), here=str(here), study=study, log=str(log))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    mine = marker_text({"study": study})
    try:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        at_death = pump.size(log)
        assert wait_until(lambda: pump.size(log) > at_death + 100, 5), "the log goes on"
        assert alive(server)
        os.kill(server, signal.SIGKILL)
        assert wait_until(lambda: marked(mine) == [], 5), "the pump ends with the server"
        assert logs.read(log).startswith("starting in mode never_ready")
    finally:
        owner.kill()
        reap(mine, grace_s=0)


def test_a_pump_that_is_killed_is_started_again_and_the_server_does_not_notice(launch: Launch) -> None:
    server = launch("never_ready")
    assert wait_until(lambda: pump.size(server.log_path) > 0, 5)
    first = server._log.pump_pid
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not alive(first), 2)
    at_death = pump.size(server.log_path)
    assert wait_until(lambda: server.alive and pump.size(server.log_path) > at_death + 100, 5)
    assert server._log.pump_pid != first


def test_the_last_words_of_a_server_are_in_the_log_when_its_death_is_noticed(launch: Launch) -> None:
    server = launch("crashes_at_start")
    while server.alive:
        time.sleep(0.001)
    assert "RuntimeError: draft head" in server.log_tail(3)
