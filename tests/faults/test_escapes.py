"""What a server starts is ended with it, even if it keeps nothing of the server; what the tuner starts is let be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.launch import notes
from tuner.launch.leftovers import clean, leftovers
from tuner.launch.processes import look, marker_of, marker_text, wait_until
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server

Launch = Callable[..., Server]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

OWNER = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from conftest import faulty_record
from tuner.launch.server import Server
record = faulty_record("sheds_environment")
server = Server.start(record, marker={{"study": {study!r}, "launch": "7"}}, log_path=Path({log!r}))
server.wait_ready()
print(server.pid, flush=True)
time.sleep(3600)
"""


def alive(pid: int) -> bool:
    process = look(pid)
    return process is not None and not process.zombie


@pytest.mark.parametrize("mode", ["daemon", "daemon_on_sigterm"])
def test_a_daemon_that_keeps_nothing_of_its_server_is_ended(launch: Launch, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "pid"
    server = launch(mode, "--pid-file", str(file))
    server.wait_ready()
    report = server.stop()
    pid = int(file.read_text())
    assert not alive(pid)
    assert pid in report.killed
    assert report.clean


def test_what_the_tuner_starts_meanwhile_in_a_session_of_its_own_is_let_be(launch: Launch) -> None:
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    before = subprocess.Popen(code, start_new_session=True, env={})
    server = launch("healthy")
    hook = subprocess.Popen(code, start_new_session=True)
    try:
        server.wait_ready()
        time.sleep(1.2)  # past a look at the family
        assert server.stop().clean
        assert before.poll() is None
        assert hook.poll() is None
    finally:
        for process in (before, hook):
            process.kill()
            process.wait()


def test_a_title_is_not_to_erase_the_marker_unless_the_user_says_so(launch: Launch, faulty: Callable) -> None:
    server = launch("healthy")
    assert b"SPT_NOENV=1" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    mine = launch(faulty("healthy", SPT_NOENV="0"))
    assert b"SPT_NOENV=0" in Path(f"/proc/{mine.pid}/environ").read_bytes().split(b"\0")


def owner_of_one_without_marker(study: str, log: Path) -> int:
    here = Path(__file__).parent
    code = OWNER.format(root=str(here.parent.parent), here=str(here), study=study, log=str(log))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    return pid


def test_a_server_that_has_lost_the_marker_is_found_after_its_tuner_was_killed(tmp_path: Path) -> None:
    study = f"shed {os.getpid()}"
    pid = owner_of_one_without_marker(study, tmp_path / "log")
    try:
        assert marker_of(pid) is None
        assert pid in [process.pid for process in marked(marker_text({"study": study}))]
        assert pid in reap(marker_text({"study": study}), grace_s=1)
        assert not alive(pid)
        assert [note for note in notes.notes() if study.replace(" ", "%20") in note.marker] == []
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_and_doctor_finds_and_ends_it_too(tmp_path: Path) -> None:
    study = f"shed2 {os.getpid()}"
    pid = owner_of_one_without_marker(study, tmp_path / "log")
    try:
        (left,) = [left for left in leftovers() if left.study == study]
        assert pid in left.pids
        assert clean([left], grace_s=1) == []
        assert not alive(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_time_in_which_the_tuner_was_stopped_does_not_count_against_the_server(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = f"""
import sys
sys.path[:0] = [{str(here.parent.parent)!r}, {str(here)!r}]
from pathlib import Path
from conftest import faulty_record
from tuner.launch.server import LaunchLimits, Server
record = faulty_record("slow_start", "--seconds", "9")
limits = LaunchLimits(stall_s=3, startup_s=7, grace_s=1, gone_s=5)
with Server.start(record, marker={{"study": "stopped {os.getpid()}"}}, log_path=Path({str(tmp_path / "log")!r}),
                  limits=limits) as server:
    print("up", flush=True)
    server.wait_ready()
    print("ready", flush=True)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.send_signal(signal.SIGSTOP)
        time.sleep(8)
        owner.send_signal(signal.SIGCONT)
        assert owner.stdout.readline() == b"ready\n"
        assert owner.wait(20) == 0
    finally:
        owner.kill()
        owner.wait()
        reap(marker_text({"study": f"stopped {os.getpid()}"}), grace_s=0)


def test_time_in_which_the_client_was_stopped_is_no_silence_and_invalidates_what_it_fell_into(tmp_path: Path) -> None:
    """Stopped in the short first request, and in the window: the server was idle, and nobody hung."""
    code = f"""
import sys
from pathlib import Path
from tests.faults.conftest import faulty_record
from tests.faults.test_faulty_servers import bench
from tuner.launch.server import LaunchLimits, Server
record = faulty_record("drips", "--seconds", "0.1")
with Server.start(record, marker={{"study": "halted {os.getpid()}"}}, log_path=Path({str(tmp_path / "log")!r}),
                  limits=LaunchLimits(grace_s=1)) as server:
    server.wait_ready()
    server.smoke()
    print("probe", flush=True)
    outcome = bench(server, on_progress=lambda p: p.phase == "window" and print("window", flush=True))
    print(outcome.failure, [g.name for g in outcome.block.gates if not g.ok] if outcome.block else "")
"""
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert owner.stdout is not None
        for phase in ("probe\n", "window\n"):
            assert owner.stdout.readline() == phase
            time.sleep(0.1)
            owner.send_signal(signal.SIGSTOP)
            time.sleep(3)
            owner.send_signal(signal.SIGCONT)
        said = [line for line in owner.stdout.read().splitlines() if line != "window"]
        assert owner.wait(20) == 0
        assert said[-1].startswith("None ")
        assert "client_stopped" in said[-1]
    finally:
        owner.kill()
        owner.wait()
        reap(marker_text({"study": f"halted {os.getpid()}"}), grace_s=0)


def test_the_note_of_a_launch_is_gone_once_it_has_ended_cleanly(launch: Launch) -> None:
    server = launch("healthy", limits=LaunchLimits(grace_s=1, gone_s=5))
    assert server.marker in [note.marker for note in notes.notes()]
    server.stop()
    assert wait_until(lambda: server.marker not in [note.marker for note in notes.notes()], 1)
