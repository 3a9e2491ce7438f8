"""Servers that fail in ways that nobody has reported yet: odd processes, odd logs, odd streams, odd addresses."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unicodedata import category

import pytest

from tests.faults.conftest import QUICK, faulty_record
from tests.faults.test_faulty_servers import alive, bench, failing
from tuner.bench.block import BlockOutcome
from tuner.errors import LaunchFailed
from tuner.launch import logs, pump
from tuner.launch.processes import look, marker_of, sockets, wait_until
from tuner.launch.server import Server
from tuner.records import LaunchRecord
from tuner.study.interrupt import Interrupts

Launch = Callable[..., Server]
Faulty = Callable[..., LaunchRecord]
PATIENT = replace(QUICK, stall_s=10, startup_s=40, smoke_s=10)


def up(server: Server) -> Server:
    server.wait_ready()
    server.smoke()
    return server


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_server_whose_first_thread_has_ended_is_alive_and_its_port_is_its_own(launch: Launch) -> None:
    server = up(launch("headless"))
    process = look(server.pid)
    assert process is not None
    assert not process.zombie
    assert sockets(server.pid)
    assert server.alive
    assert bench(server).block is not None
    assert server.stop().clean
    assert not alive(server.pid)


def test_processes_that_start_one_another_anew_are_all_ended(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    server = up(launch("respawns", "--pid-file", str(file)))
    assert wait_until(lambda: file.exists() and len(file.read_text().split()) >= 2, 5)
    time.sleep(1.2)  # past a look at the family
    report = server.stop()
    assert report.clean
    time.sleep(0.3)
    assert [pid for pid in map(int, file.read_text().split()) if alive(pid)] == []


def test_a_server_that_has_overwritten_its_environment_is_ended_all_the_same(launch: Launch) -> None:
    server = up(launch("overwrites_environment"))
    assert marker_of(server.pid) is None
    assert server.stop().clean
    assert not alive(server.pid)


def test_a_worker_that_signals_its_parent_once_the_server_is_dead_does_not_end_the_tuner(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We take up orphans, so that their signals come to us."""
    monkeypatch.setattr("os.isatty", lambda _fd: False)
    interrupts = Interrupts()
    with interrupts.installed():
        server = up(launch("signals_its_parent"))
        os.kill(server.pid, signal.SIGKILL)
        assert server.failure(wait_s=3) is not None
        time.sleep(0.3)
        interrupts.check()
        assert server.stop().clean


def test_a_server_that_closes_every_file_it_has_is_served_and_ended(launch: Launch) -> None:
    server = up(launch("closes_files"))
    assert bench(server).block is not None
    os.kill(server.pid, signal.SIGABRT)
    failure = server.failure(wait_s=3)
    assert failure is not None
    assert failure.kind == "died_mid_bench"


def test_a_dead_worker_behind_a_healthy_front_is_a_hung_decode(launch: Launch) -> None:
    server = launch("dead_worker")
    server.wait_ready()
    failure, seconds = failing(server.smoke)
    assert failure.kind == "hung_decode"
    assert seconds < 4


def test_launches_one_after_another_leave_no_file_thread_or_process_of_ours(launch: Launch) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    up(launch("healthy")).stop()
    before = held()
    for mode in ("healthy", "dies_on_first_decode", "crashes_at_start", "healthy"):
        server = launch(mode)
        with suppress(LaunchFailed):
            up(server)
        server.stop()
    assert held() == before


# -- addresses and health ---------------------------------------------------------------------------------------------


def test_a_server_that_listens_somewhere_else_is_told_where(launch: Launch, faulty: Faulty) -> None:
    record = faulty("other_address")
    failure, _ = failing(launch(record).wait_ready)
    assert (failure.kind, failure.blame) == ("startup_hang", "candidate")
    assert f"it listens on 127.0.0.2:{record.port}" in failure.message


def test_health_that_comes_and_goes_is_not_asked_once_it_was_there(launch: Launch) -> None:
    server = up(launch("flaps"))
    assert bench(server).block is not None


# -- logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prints_garbage", "prints_one_line"])
def test_the_cause_is_found_behind_megabytes_of_nonsense(launch: Launch, mode: str) -> None:
    failure, seconds = failing(launch(mode, "--megabytes", "8", limits=PATIENT).wait_ready)
    assert failure.kind == "startup_crash"
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.message + failure.evidence
    assert not [sign for sign in failure.evidence + failure.message if category(sign) == "Cc" and sign not in "\n\t"]
    assert len(failure.evidence) < 50_000
    assert seconds < 15


@pytest.mark.slow
def test_a_hundred_megabytes_without_a_line_end_neither_block_the_server_nor_hide_its_last_words(
    launch: Launch,
) -> None:
    server = launch("prints_one_line", "--megabytes", "100", limits=replace(PATIENT, startup_s=120))
    failure, _ = failing(server.wait_ready)
    assert "RuntimeError: draft head" in failure.message + failure.evidence
    assert sum(file.stat().st_size for _, file in pump.segments(server.log_path)) <= logs.HEAD + 2 * logs.SEGMENT


def test_a_log_that_is_removed_under_a_running_server_goes_on_and_its_last_words_are_kept(launch: Launch) -> None:
    server = launch("dies_on_first_decode")
    server.wait_ready()
    server.log_path.unlink()
    failure, _ = failing(server.smoke)
    assert failure.kind == "crash_on_first_decode"
    assert "no kernel image is available" in failure.evidence
    assert "are not kept" in logs.read(server.log_path)


def test_a_folder_of_logs_that_is_removed_costs_evidence_and_nothing_else(tmp_path: Path) -> None:
    record, log = faulty_record("dies_on_first_decode"), tmp_path / "logs" / "a.log"
    with Server.start(record, marker={"study": f"gone {os.getpid()}"}, log_path=log, limits=QUICK) as server:
        server.wait_ready()
        shutil.rmtree(tmp_path / "logs")
        os.kill(server._log.pump_pid, signal.SIGKILL)  # the next pump has nowhere to write
        failure, _ = failing(server.smoke)
        assert failure.kind == "crash_on_first_decode"
        assert server.log_tail() == ""
        assert server.stop().clean


def test_a_folder_that_takes_no_file_any_more_loses_output_and_never_stops_the_pump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError

    sink = pump.Sink(tmp_path / "log", 10, 10)
    sink.write(b"x" * 35)
    monkeypatch.setattr(pump, "_open", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    sink.write(b"y" * 40)
    assert (sink.total, sink.lost) == (40, 35), "a file that was open is filled to its end"


# -- streams ----------------------------------------------------------------------------------------------------------


def outcome(launch: Launch, mode: str, *extra: str) -> tuple[BlockOutcome, float]:
    server = up(launch(mode, *extra))
    began = time.monotonic()
    return bench(server), time.monotonic() - began


@pytest.mark.parametrize(
    ("mode", "extra", "kinds"),
    [
        ("error_in_stream", (), {"bad_protocol"}),
        ("error_in_mid_stream", (), {"bad_protocol"}),
        ("drips", ("--seconds", "0.7"), {"not_warm", "too_few_requests", "no_tokens", "hung_decode"}),
        ("drips_nothing", ("--seconds", "0.3"), {"bad_protocol", "hung_decode"}),
    ],
)
def test_a_stream_that_is_none_ends_a_block_in_bounded_time(
    launch: Launch, mode: str, extra: tuple[str, ...], kinds: set[str]
) -> None:
    found, seconds = outcome(launch, mode, *extra)
    failed = {found.failure.kind} if found.failure else {g.name for g in found.block.gates if not g.ok}  # type: ignore[union-attr]
    assert failed & kinds, (found.failure, found.block and found.block.gates)
    assert seconds < 15
    if mode.startswith("error"):
        assert found.failure is not None
        assert "EngineDeadError: core 0" in found.failure.message + found.failure.evidence
