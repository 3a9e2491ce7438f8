"""Every way in which a server can fail us: its class, its evidence, how soon it is noticed, and that nothing stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.faults.conftest import PATIENT
from tuner.bench.block import BlockOutcome, measure_block
from tuner.bench.plan import WindowPlan
from tuner.bench.prompts import Prompt
from tuner.errors import LaunchFailed
from tuner.launch.processes import look, wait_until
from tuner.launch.server import LaunchLimits, Server
from tuner.launch.settle import settle
from tuner.records import Failure, LaunchRecord

Launch = Callable[..., Server]
Faulty = Callable[..., LaunchRecord]


def failing(call: Callable[[], object]) -> tuple[Failure, float]:
    """The failure of a call, and the seconds until it was noticed."""
    began = time.monotonic()
    with pytest.raises(LaunchFailed) as caught:
        call()
    return caught.value.failure, time.monotonic() - began


def alive(pid: int) -> bool:
    process = look(pid)
    return process is not None and not process.zombie


def leave(server: Server) -> None:
    """The server ends by itself, with status 0."""
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.record.base_url + "/bye", trust_env=False)


def stream(server: Server, tokens: int) -> list[bytes]:
    body = {"model": "fake", "prompt": "x", "max_tokens": tokens, "stream": True}
    url = server.record.base_url + "/v1/completions"
    chunks = []
    with httpx.Client(trust_env=False, timeout=0.5) as client, client.stream("POST", url, json=body) as response:
        for chunk in response.iter_bytes():
            chunks.append(chunk)
    return chunks


def test_a_healthy_server_goes_through_every_step(launch: Launch, faulty: Faulty) -> None:
    record = faulty("healthy", "--effective", '{{"num_steps": 3}}', settings={"num_steps": 3}, COLOUR="deep blue")
    server = launch(record)
    assert 0 < server.wait_ready() < 5
    smoke = server.smoke(tokens=8)
    assert (smoke.tokens, smoke.path) == (8, "/v1/completions")
    assert server.server_info() == {"effective": {"num_steps": 3}}
    echo = httpx.get(record.base_url + "/echo", trust_env=False).json()
    assert echo["argv"] == list(record.argv[2:])
    assert echo["env"]["COLOUR"] == "deep blue"
    assert echo["env"]["SPEC_TUNER_MARKER"] == server.marker
    assert os.getpgid(server.pid) == server.pid != os.getpgrp()
    assert server.failure() is None
    report = server.stop()
    assert (report.exit_status, report.escalated, report.killed) == (-signal.SIGTERM, False, ())
    assert report.seconds < 1
    assert server.stop() is report
    assert server.failure() is None, "a wanted stop is not a failure"


def test_a_crash_at_start_shows_its_exception(launch: Launch) -> None:
    failure, seconds = failing(launch("crashes_at_start").wait_ready)
    assert (failure.kind, failure.phase, failure.exit_status) == ("startup_crash", "ready", 1)
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.message
    assert "self.mode" not in failure.evidence
    assert "in __init__" in failure.evidence
    assert (failure.blame, failure.retryable) == ("candidate", False)
    assert seconds < 3


def test_out_of_memory_is_the_cause_even_when_clean_up_stumbles_after_it(launch: Launch) -> None:
    failure, _ = failing(launch("out_of_memory_at_start").wait_ready)
    assert failure.kind == "oom_startup"
    assert "CUDA out of memory" in failure.message


def test_a_refused_flag_is_an_invalid_configuration(launch: Launch) -> None:
    failure, _ = failing(launch("healthy", "--num-stepz", "3").wait_ready)
    assert (failure.kind, failure.exit_status) == ("invalid_config", 2)
    assert "unrecognized arguments: --num-stepz 3" in failure.message


def test_a_half_built_server_is_caught_at_its_first_completion_with_the_original_error(launch: Launch) -> None:
    server = launch("half_built")
    server.wait_ready()
    failure, seconds = failing(server.smoke)
    assert failure.kind == "partial_init"
    assert "RuntimeError: draft head: expected hidden size 576, got 960" in failure.evidence
    assert "AttributeError: 'HalfBuilt' object has no attribute 'head'" in failure.evidence
    assert seconds < 2


def test_a_half_built_server_that_lives_on_with_errors_is_caught_too(launch: Launch) -> None:
    server = launch("half_built_but_lives")
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert failure.kind == "partial_init"
    assert "RuntimeError: draft head" in failure.evidence
    assert "answered 500" in failure.message


def test_a_crash_on_the_first_decode_has_its_own_class(launch: Launch) -> None:
    server = launch("dies_on_first_decode")
    server.wait_ready()
    failure, seconds = failing(server.smoke)
    assert (failure.kind, failure.phase, failure.exit_status) == ("crash_on_first_decode", "smoke", 1)
    assert "no kernel image is available" in failure.evidence
    assert seconds < 1


def test_silence_at_start_is_a_hang_after_the_stall_limit(launch: Launch) -> None:
    failure, seconds = failing(launch("hangs_at_start").wait_ready)
    assert failure.kind == "startup_hang"
    assert 0.9 < seconds < 2.5


def test_a_slow_start_that_progresses_outlives_the_stall_limit(launch: Launch) -> None:
    server = launch("slow_start", "--seconds", "1.6")
    told: list[float] = []
    assert server.wait_ready(told.append) > 1.6
    assert told
    server.smoke()


def test_endless_progress_ends_at_the_hard_limit(launch: Launch) -> None:
    limits = LaunchLimits(stall_s=1.0, startup_s=2.0, grace_s=1.0, gone_s=5.0)
    failure, seconds = failing(launch("never_ready", limits=limits).wait_ready)
    assert failure.kind == "startup_timeout"
    assert 1.9 < seconds < 3


def test_a_server_that_never_becomes_healthy_tells_what_it_said(launch: Launch) -> None:
    failure, _ = failing(launch("unready_503").wait_ready)
    assert failure.kind == "startup_hang"
    assert "503" in failure.message


def test_ending_with_status_0_is_a_failure_when_nobody_asked(launch: Launch) -> None:
    server = launch("healthy")
    server.wait_ready()
    server.smoke()
    leave(server)
    failure = server.failure(wait_s=3)
    assert failure is not None
    assert (failure.kind, failure.phase, failure.exit_status) == ("died_mid_bench", "bench", 0)
    assert "status 0 without being asked" in failure.message


def test_a_grandchild_in_a_session_of_its_own_is_ended_with_the_server(launch: Launch, tmp_path: Path) -> None:
    pid_file = tmp_path / "grandchild"
    server = launch("grandchild", "--pid-file", str(pid_file))
    server.wait_ready()
    grandchild = int(pid_file.read_text())
    assert os.getsid(grandchild) != server.pid
    report = server.stop()
    assert not alive(grandchild)
    assert report.killed == (grandchild,)
    assert report.seconds < LaunchLimits().grace_s


def test_what_outlives_its_server_is_ended_too(launch: Launch, tmp_path: Path) -> None:
    pid_file = tmp_path / "grandchild"
    server = launch("grandchild", "--pid-file", str(pid_file))
    server.wait_ready()
    leave(server)
    assert wait_until(lambda: not server.alive, 5)
    grandchild = int(pid_file.read_text())
    assert alive(grandchild)
    server.stop()
    assert not alive(grandchild)


def test_a_crashed_server_of_three_processes_is_cleared_within_two_seconds_of_the_grace_time(
    launch: Launch, tmp_path: Path
) -> None:
    pid_file = tmp_path / "grandchild"
    server = launch("three_processes", "--pid-file", str(pid_file))
    server.wait_ready()
    assert len(server._family.living()) == 3
    failure, _ = failing(server.smoke)
    assert failure.kind == "crash_on_first_decode"
    report = server.stop()
    assert len(report.killed) == 2
    assert int(pid_file.read_text()) in report.killed
    assert report.clean
    assert report.seconds < server.limits.grace_s + 2


def test_shared_memory_of_a_killed_server_is_removed_and_nobody_elses(launch: Launch) -> None:
    mine, other = (Path(f"/dev/shm/spec-tuner-test-{name}-{os.getpid()}") for name in ("leak", "bystander"))
    server = launch("leaks_segments", "--segment", str(mine))
    server.wait_ready()
    other.touch()
    try:
        assert mine.exists()
        report = server.stop()
        assert report.segments_removed == (mine.name,)
        assert (report.segments_left, report.clean) == ((), True)
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()
        mine.unlink(missing_ok=True)


@pytest.mark.timing
@pytest.mark.parametrize("phase", ["ready", "bench"])
def test_a_dead_server_is_noticed_within_a_second(launch: Launch, phase: str) -> None:
    server = launch("never_ready" if phase == "ready" else "healthy")
    if phase == "ready":
        threading.Timer(0.3, os.kill, (server.pid, signal.SIGKILL)).start()
        _, seconds = failing(server.wait_ready)
        assert seconds < 1.3
    else:
        server.wait_ready()
        server.smoke()
        began = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        assert server.failure(wait_s=5) is not None
        assert time.monotonic() - began < 1


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace_time(launch: Launch) -> None:
    server = launch("ignores_sigterm")
    server.wait_ready()
    report = server.stop()
    assert (report.exit_status, report.escalated) == (-signal.SIGKILL, True)
    assert 1.0 <= report.seconds < 3.0


def test_a_healthy_front_over_a_dead_engine_is_seen_through(launch: Launch) -> None:
    server = launch("says_503")
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert failure.kind == "engine_dead_5xx"
    assert "engine is dead" in failure.message


def test_an_answer_that_never_comes_is_a_hung_decode(launch: Launch) -> None:
    server = launch("hangs_on_completion")
    server.wait_ready()
    failure, seconds = failing(server.smoke)
    assert failure.kind == "hung_decode"
    assert seconds < 4


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("headers_then_close", "bad_protocol"),
        ("not_json", "bad_protocol"),
        ("no_tokens", "short_output"),
        ("smoke_deep", "bad_protocol"),
        ("smoke_infinite_count", "bad_protocol"),
        ("smoke_compressed", "bad_protocol"),
    ],
)
def test_a_200_is_no_completion_by_itself(launch: Launch, mode: str, kind: str) -> None:
    server = launch(mode)
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert failure.kind == kind


def test_a_server_with_chat_alone_is_tried_by_chat(launch: Launch) -> None:
    server = launch("chat_only")
    server.wait_ready()
    assert server.smoke().path == "/v1/chat/completions"


def test_an_information_path_that_hangs_means_unknown_and_not_failed(launch: Launch) -> None:
    server = launch("info_hangs")
    server.wait_ready()
    assert server.server_info() is None
    assert server.alive


def test_information_that_cannot_be_kept_is_unknown_or_made_so_that_it_can(launch: Launch) -> None:
    server = launch("info_odd")
    server.wait_ready()
    assert server.server_info() == {"model": "\ufffd", "a": None, "b": None, "c": None}
    server = launch("info_deep")
    server.wait_ready()
    assert server.server_info() is None


@pytest.mark.parametrize("mode", ["smoke_endless", "info_endless"])
def test_an_endless_answer_is_cut_off_and_the_server_hung_up_on(launch: Launch, mode: str) -> None:
    server = launch(mode)
    server.wait_ready()
    if mode == "info_endless":
        assert server.server_info() is None
    else:
        failure, _ = failing(server.smoke)
        assert (failure.kind, "longer than 8 MiB" in failure.message) == ("bad_protocol", True)
    assert wait_until(lambda: "hung up on after" in server.log_tail(), 2.0)


def test_no_request_runs_on_after_it_was_given_up(launch: Launch) -> None:
    server = launch("hangs_on_completion")
    server.wait_ready()
    threads = threading.active_count()
    failing(server.smoke)
    assert threading.active_count() == threads
    ours = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    assert not [line for line in lines if _to(line, server) and f"socket:[{line.split()[9]}]" in ours]


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def _to(line: str, server: Server) -> bool:
    """Whether a line of /proc/net/tcp is a connection to the server."""
    return int(line.split()[2].partition(":")[2], 16) == server.record.port


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch, faulty: Faulty) -> None:
    record = faulty("healthy")
    with socket.create_server((record.host, record.port)):
        failure, _ = failing(lambda: launch(record))
    assert (failure.kind, failure.phase, failure.blame) == ("port_conflict", "start", "environment")
    assert failure.retryable


def test_somebody_elses_server_on_the_port_is_never_taken_for_ours(launch: Launch, faulty: Faulty) -> None:
    record = faulty("never_listens")
    server = launch(record)
    stranger = subprocess.Popen([*faulty("healthy").argv[:6], str(record.port)])
    try:
        failure, _ = failing(server.wait_ready)
        assert (failure.kind, failure.blame) == ("port_conflict", "environment")
        server._process.kill()
        server._process.wait()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_program_that_does_not_exist_is_the_machines_fault(launch: Launch, faulty: Faulty) -> None:
    failure, _ = failing(lambda: launch(replace(faulty("healthy"), argv=("/nowhere/server",))))
    assert (failure.kind, failure.blame) == ("env_broken", "environment")
    assert "/nowhere/server" in failure.message


def test_a_death_in_mid_stream_is_died_mid_bench_with_the_cause(launch: Launch) -> None:
    server = launch("dies_mid_stream")
    server.wait_ready()
    server.smoke()
    assert b"[DONE]" not in b"".join(stream(server, 16))
    failure = server.failure(wait_s=1)
    assert failure is not None
    assert failure.kind == "died_mid_bench"
    assert "IndexError: page 4096 is out of range" in failure.evidence


def test_a_stall_in_mid_stream_is_a_hung_decode(launch: Launch) -> None:
    server = launch("stalls_mid_stream")
    server.wait_ready()
    server.smoke()
    with pytest.raises(httpx.ReadTimeout):
        stream(server, 16)
    assert server.failure() is None
    failure = server.hung("no token for 0.5 s")
    assert (failure.kind, failure.phase) == ("hung_decode", "bench")
    assert "no token for 0.5 s" in failure.message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_somebody_else_ends_is_not_held_against_the_candidate(launch: Launch, number: int) -> None:
    server = launch("healthy")
    server.wait_ready()
    server.smoke()
    os.kill(server.pid, number)
    failure = server.failure(wait_s=2)
    assert failure is not None
    assert (failure.kind, failure.blame, failure.retryable) == ("killed_externally", "environment", True)


@pytest.mark.timing
def test_death_is_noticed_within_a_fifth_of_a_second(launch: Launch) -> None:
    server = launch("hangs_on_completion")
    server.wait_ready()
    died = 0.0

    def kill_soon() -> None:
        nonlocal died
        time.sleep(0.3)
        died = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_soon)
    thread.start()
    with pytest.raises(LaunchFailed):
        server.smoke()
    assert time.monotonic() - died < 0.2
    thread.join()


def test_a_bystander_keeps_running(launch: Launch) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # misbehaving_server"])
    try:
        server = launch("grandchild")
        server.wait_ready()
        server.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_leaving_the_with_block_stops_the_server_whatever_was_raised(launch: Launch) -> None:
    server = launch("healthy")
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert not server.alive


def bench(server: Server, **more: object) -> BlockOutcome:
    plan = WindowPlan(ramp_s=0, warmup_s=0.2, warmup_cap_s=2, steady_span_s=0.1, window_s=0.3, tail_s=0.5, stall_s=1)
    prompts = [Prompt(f"p{i}", "chat", f"question {i}") for i in range(4)]
    return measure_block(
        server.record.base_url,
        model="fake",
        prompts=prompts,
        concurrency=1,
        role="screen",
        max_tokens=12,
        temperature=0.0,
        plan=plan,
        seed=1,
        server_failure=server.failure,
        **more,  # type: ignore[arg-type]
    )


def test_once_it_is_ready_a_server_is_not_probed_any_more(launch: Launch) -> None:
    server = launch("probes_kill")
    server.wait_ready()
    probes = httpx.get(server.record.base_url + "/echo", trust_env=False).json()["probes"]
    server.smoke()
    server.server_info()
    assert bench(server).block is not None
    assert httpx.get(server.record.base_url + "/echo", trust_env=False).json()["probes"] == probes


def test_a_hang_is_hung_decode_though_the_servers_own_watchdog_aborts_it_later(launch: Launch) -> None:
    server = launch("stalls_then_aborts", "--seconds", "4")
    server.wait_ready()
    server.smoke()
    outcome = bench(server)
    assert outcome.failure is not None
    assert outcome.failure.kind == "hung_decode"
    assert "no output for 1 s" in outcome.failure.message


def test_a_port_that_somebody_holds_on_to_is_waited_for_and_said(launch: Launch, faulty: Faulty) -> None:
    record = faulty("holds_port")
    server = launch(record, limits=LaunchLimits(stall_s=1.0, startup_s=6.0, grace_s=1.0, gone_s=0.5))
    server.wait_ready()
    server.smoke()
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((record.host, record.port))
    holder.listen()
    try:
        report = server.stop()
        assert report.unclean == ("its port is still taken",)
        assert settle(report, timeout_s=0) == (), "the next launch has another port"
        failure, _ = failing(lambda: launch(record))
        assert failure.kind == "port_conflict"
    finally:
        holder.close()
        server._report = replace(report, port_free=True)


def test_a_key_opens_a_server_that_wants_one_and_is_in_no_message(
    launch: Launch, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEY", "sk-very-secret")
    server = launch(faulty("wants_key"), api_key="sk-very-secret")
    server.wait_ready()
    server.smoke()
    assert bench(server, api_key="sk-very-secret").block is not None
    other = launch(faulty("wants_key"), api_key="sk-another-secret")
    failure, _ = failing(other.wait_ready)
    assert "401" in failure.message
    assert "secret" not in failure.message + failure.evidence


def test_a_log_rule_of_the_users_decides_before_the_generic_ones(launch: Launch, faulty: Faulty) -> None:
    record = faulty("says_arena_is_full")
    failure, _ = failing(launch(record).wait_ready)
    assert failure.kind == "startup_crash"
    known = replace(record, log_rules=({"kind": "oom", "pattern": "arena is full"},))
    failure, _ = failing(launch(known).wait_ready)
    assert failure.kind == "oom_startup"
    assert "arena is full: 0 of 12 slots free" in failure.evidence


def test_what_a_server_was_doing_when_it_ended_is_told_apart(launch: Launch, faulty: Faulty) -> None:
    failure, _ = failing(launch(replace(faulty("runs_out_capturing_graphs"), engine="sglang")).wait_ready)
    assert (failure.kind, failure.stage) == ("oom_startup", "capturing CUDA graphs")
    assert "while capturing CUDA graphs" in failure.message


def test_what_a_server_prints_is_never_taken_for_a_result(launch: Launch) -> None:
    server = launch("prints_results")
    server.wait_ready()
    server.smoke()
    block = bench(server).block
    assert block is not None
    assert block.tokens_per_s < 1e6
    assert block.accept_length is None
    assert server.failure() is None


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Path]:
    """A control group with little memory."""
    version1 = Path("/sys/fs/cgroup/memory")
    group = (version1 if version1.is_dir() else Path("/sys/fs/cgroup")) / f"spec-tuner-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version1.is_dir() else "memory.max")).write_text(str(96 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), 5.0)
    group.rmdir()


def test_a_server_that_the_kernel_ends_in_a_group_of_its_own_has_run_out_of_memory(
    launch: Launch, faulty: Faulty, limited: Path
) -> None:
    """Nothing of it stands in the server's log, and the group's counter is not that of the tuner's own group."""
    record = faulty("eats_memory")
    enter = f'echo $$ > {limited}/cgroup.procs && exec "$@"'
    server = launch(replace(record, argv=("/bin/sh", "-c", enter, "sh", *record.argv)), limits=PATIENT)
    server.wait_ready()
    failure, _ = failing(server.smoke)
    assert (failure.kind, failure.phase, failure.blame) == ("oom_under_load", "smoke", "candidate")
    assert failure.exit_status == -signal.SIGKILL
    assert "the kernel has ended a process for want of memory" in failure.message
