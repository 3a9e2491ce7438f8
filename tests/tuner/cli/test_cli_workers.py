"""Two real tuners with real servers on one study in PostgreSQL; one of them is killed with its server running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.launch.processes import marker_text
from tuner.launch.reap import marked, reap
from tuner.study.data import StudyData
from tuner.study.place import hostname
from tuner.study.store import open_study, study_exists

ROOT = Path(__file__).parents[3]
SERVER = Path(__file__).with_name("paced_server.py")
COMMAND = [sys.executable, "-I", str(SERVER), "--port", "{port}", "--num-steps", "{num_steps?}"]
SPACE = {
    "name": "shared",
    "engine": {"kind": "command", "model": "fake", "args": {"command": COMMAND}},
    "workload": {"concurrency": [1]},
    "baseline": {},
    "parameters": {"num_steps": {"low": 1, "high": 2}},
    "profile": "short",
    "budget": {"launches": 8},
}


def worker(folder: Path, storage: str, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tuner", "run", "shared.yaml", "--storage", storage, "--devices", device]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def workers(tmp_path: Path, postgres: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    (tmp_path / "shared.yaml").write_text(json.dumps(SPACE))
    started: list[subprocess.Popen[str]] = []

    def start(device: str) -> subprocess.Popen[str]:
        started.append(worker(tmp_path, postgres, device))
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            each.kill()
            each.communicate()
    if study_exists("shared", postgres):
        reap(marker_text({"study": records(postgres).uid}), grace_s=0)


def records(storage: str) -> StudyData:
    store = open_study("shared", storage)
    try:
        return store.data()
    finally:
        store.close()


def until(storage: str, done: Callable[[StudyData], bool], seconds: float = 120) -> StudyData:
    deadline = time.monotonic() + seconds
    while not (study_exists("shared", storage) and done(found := records(storage))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def measuring(data: StudyData, device: str) -> bool:
    at = data.at(f"{hostname()}/{device}")
    return any(launch.ready_at is not None and launch.ended_at is None for launch in at)


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(600)
def test_what_a_killed_worker_was_at_is_measured_by_the_other_and_nothing_is_lost(
    workers: Callable[[str], subprocess.Popen[str]], postgres: str
) -> None:
    first = workers("0")
    until(postgres, lambda data: bool(data.launches))
    second = workers("1")
    before = until(postgres, lambda data: measuring(data, "1"), 240)
    time.sleep(1)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    output = first.communicate(timeout=400)[0]
    assert first.returncode == 0, output
    data = records(postgres)
    assert data.state == "done"
    assert before.blocks.items() <= data.blocks.items(), "a block was lost"
    assert {launch.place for launch in data.launches} == {f"{hostname()}/0", f"{hostname()}/1"}
    valid = [b for b in data.blocks.values() if b.block.valid]
    assert set(Counter((b.candidate_id, b.concurrency, b.role, b.repetition) for b in valid).values()) == {1}
    place = {launch.id: launch.place for launch in data.launches}
    for pair in data.pairs:
        one, other = data.blocks[pair.baseline_block], data.blocks[pair.candidate_block]
        assert place[one.launch_id] == place[other.launch_id]
    assert not any(trial.running for trial in data.trials)
    assert all(launch.ended_at is not None for launch in data.launches)
    assert marked(marker_text({"study": data.uid})) == [], "the dead worker's server is gone as well"
