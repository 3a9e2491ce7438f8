"""A real tuner with a real server, interrupted and killed while it measures: nothing is left, and it can go on."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.launch.processes import marker_text
from tuner.launch.reap import marked, reap

ROOT = Path(__file__).parents[3]
SERVER = Path(__file__).with_name("paced_server.py")
SPACE = {
    "name": "real",
    "engine": {
        "kind": "command",
        "model": "fake",
        "args": {
            "command": [sys.executable, "-I", str(SERVER), "--port", "{port}", "--num-steps", "{num_steps?}"],
        },
    },
    "workload": {"concurrency": [1]},
    "baseline": {},
    "parameters": {"num_steps": {"low": 1, "high": 4}},
    "profile": "short",
}


class Tuner:
    """A tuner at work in a folder of its own."""

    def __init__(
        self, folder: Path, *arguments: str, terminal: int | None = None, hangup: signal.Handlers = signal.SIG_DFL
    ) -> None:
        self.folder = folder
        (folder / "real.yaml").write_text(json.dumps(SPACE))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuner", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
            # The tests themselves may run where SIGHUP is ignored (nohup), and a child would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )

    def wait_for_block(self, launch: int = 1) -> None:
        """Until the server of a launch is ready and its first block is under way."""
        query = f"select count(*) from tuner_launches where id = {launch} and ready_at and ended_at is null"
        self._until(lambda: self._count(query))
        time.sleep(0.5)

    def _until(self, done: object) -> None:
        deadline = time.monotonic() + 60
        while not done():  # type: ignore[operator]
            assert time.monotonic() < deadline, "the tuner did not come so far"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)

    def _count(self, query: str) -> int:
        try:
            with sqlite3.connect(f"file:{self.folder}/studies/real/study.db?mode=ro", uri=True) as connection:
                return connection.execute(query).fetchone()[0]
        except sqlite3.OperationalError:
            return 0

    def uid(self) -> str:
        """The study's, which all its processes carry."""
        with sqlite3.connect(self.folder / "studies/real/study.db") as connection:
            return connection.execute("select uid from tuner_studies").fetchone()[0]

    def servers(self) -> list[int]:
        """Pids of the study's servers."""
        return [process.pid for process in marked(marker_text({"study": self.uid()}))]

    def end(self, number: int) -> tuple[int, str]:
        """Signals it; its exit code and all that it said."""
        self.process.send_signal(number)
        output = self.process.communicate(timeout=60)[0]
        return self.process.returncode, output


@pytest.fixture
def tuner(tmp_path):
    started: list[Tuner] = []

    def start(*arguments: str, **settings: object) -> Tuner:
        started.append(Tuner(tmp_path, *arguments, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
    if (tmp_path / "studies/real/study.db").exists():
        reap(marker_text({"study": started[0].uid()}), grace_s=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_tuner_stops_its_server_and_says_how_to_go_on(tuner, number, code):
    run = tuner("run", "real.yaml")
    run.wait_for_block()
    assert run.servers()
    second = tuner("resume", "real")
    refused = second.process.communicate(timeout=60)[0]
    assert second.process.returncode == 2
    assert f"process {run.process.pid}" in refused
    assert run.end(number)[0] == code
    assert run.servers() == []
    status = tuner("status", "real").process.communicate(timeout=60)[0]
    assert re.search(r"state: +interrupted", status)


def test_a_tuner_whose_terminal_is_closed_stops_its_server(tuner, tmp_path):
    ours, theirs = os.openpty()
    told = tmp_path / "told"
    hook = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())", str(told)]
    run = tuner("run", "real.yaml", "--set", f"notify={json.dumps({'command': hook})}", terminal=theirs)
    os.close(theirs)
    run.wait_for_block()
    assert run.servers()
    os.close(ours)
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(60) == 129
    assert run.servers() == []
    assert json.loads(told.read_text())["event"] == "stopped"


def test_nohup_is_heeded(tuner):
    run = tuner("run", "real.yaml", hangup=signal.SIG_IGN)
    run.wait_for_block()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None
    assert run.end(signal.SIGTERM)[0] == 143


def test_after_kill_9_the_same_command_ends_the_orphan_and_goes_on(tuner):
    run = tuner("run", "real.yaml")
    run.wait_for_block()
    run.end(signal.SIGKILL)
    orphans = run.servers()
    assert orphans
    assert "killed; go on with" in tuner("status", "real").process.communicate(timeout=60)[0]
    again = tuner("run", "real.yaml")
    again.wait_for_block(2)
    assert not set(orphans) & set(again.servers())
    code, output = again.end(signal.SIGINT)
    assert code == 130
    assert "that an earlier run had left" in output
    assert "tuner resume real" in output
    assert "Traceback" not in output
    assert run.servers() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_study_of_a_real_server_finds_what_is_faster(tuner):
    run = tuner("run", "real.yaml", "--launches", "11", "--quiet")
    output = run.process.communicate(timeout=550)[0]
    assert run.process.returncode == 0, output
    found = json.loads(tuner("recommend", "real", "--json").process.communicate(timeout=60)[0])
    winner = found["overall"]["winner"]
    assert winner is not None, output
    assert run.servers() == []
    status = tuner("status", "real").process.communicate(timeout=60)[0]
    assert re.search(r"launches: +11 of 11", status)
