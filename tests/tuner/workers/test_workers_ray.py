"""A real Ray on this host, with two GPUs in name only: real workers, a real PostgreSQL, real deaths."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tuner.launch.processes import marker_text
from tuner.launch.reap import marked
from tuner.study.store import open_study

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "tests" / "tuner" / "cli" / "paced_server.py"
SPACE = {
    "name": "real",
    "engine": {
        "kind": "command",
        "model": "fake",
        "api_key_env": "SERVER_KEY",
        "args": {"command": [sys.executable, "-I", str(SERVER), "--port", "{port}", "--num-steps", "{num_steps?}"]},
    },
    "workload": {"concurrency": [1], "prompts": "mine.jsonl"},
    "baseline": {},
    "parameters": {"num_steps": {"low": 1, "high": 2}},
    "profile": "short",
    "budget": {"launches": 7},
}
HOST = socket.gethostname()


def having(words: str) -> list[int]:
    """Processes whose command line holds these words."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and words.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which a cluster of one node is found; it has a token of its own."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "3"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", "0"]
    command += ["--node-ip-address", "127.0.0.2", "--num-gpus", "2", "--num-cpus", "2", "--include-dashboard", "false"]
    command += ["--object-store-memory", "80000000", "--temp-dir", folder]
    log = Path(folder, "started")
    with log.open("wb") as output:
        ray = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not (found := re.search(r"--address='([\d.]+:\d+)'", log.read_text())):
            assert ray.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield {**env, "RAY_ADDRESS": found[1]}
    finally:
        ray.terminate()
        ray.wait(60)
        for pid in having(folder):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """`tuner run --workers ray`, with its output as it comes."""

    def __init__(self, folder: Path, env: dict[str, str], storage: str, *more: str) -> None:
        (folder / "real.yaml").write_text(json.dumps(SPACE))
        lines = [json.dumps({"prompt": f"What is {n} times {n + 3}, and why is that so?"}) for n in range(40)]
        (folder / "mine.jsonl").write_text("\n".join(lines))
        self.storage, self.output = storage, folder / "output"
        command = [sys.executable, "-m", "tuner", "run", "real.yaml", "--workers", "ray", "--cpus", "1", *more]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**env, "TUNER_STORAGE": storage, "SERVER_KEY": "k3y-of-the-server"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.output.read_text()

    def until(self, done: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        try:
            with psycopg.connect(self.storage.replace("+psycopg", "")) as connection:
                return connection.execute(query.encode()).fetchall()
        except psycopg.errors.UndefinedTable:
            return []

    def tuners(self) -> list[int]:
        """The workers' processes at work on this study."""
        return [int(str(pid)) for (pid,) in self.rows("select pid from tuner_workers order by place")]

    def measuring(self, place: str) -> bool:
        """Whether a server is ready there, and one of its blocks under way."""
        query = "select count(*) from tuner_launches l join tuner_launch_places p on p.launch = l.id where "
        query += f"p.place = '{HOST}/{place}' and l.ready_at is not null and l.ended_at is null"
        return bool(self.rows(query) and self.rows(query)[0][0])

    def servers(self) -> list[int]:
        uid = self.rows("select uid from tuner_studies")
        return marked(marker_text({"study": str(uid[0][0])})) if uid else []


@pytest.fixture
def run(tmp_path: Path, cluster: dict[str, str], postgres: str) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*more: str) -> Run:
        started.append(Run(tmp_path, cluster, postgres, *more))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(30)


def actor_of(pid: int) -> int:
    """The Ray process in which a worker's tuner was started: its parent is a shell, and that one's the actor."""
    shell = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return int(Path(f"/proc/{shell}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_workers_share_a_study_and_one_that_is_killed_costs_nothing(run: Callable[..., Run]) -> None:
    it = run("--gpus", "1")
    it.until(lambda: it.measuring("1"), 200)
    it.until(lambda: len(it.tuners()) == 2)
    victim = it.tuners()[1]
    environment = Path(f"/proc/{victim}/environ").read_bytes()
    assert b"OMP_NUM_THREADS=3" in environment, "the node's own environment, not Ray's"
    assert b"k3y-of-the-server" not in environment
    os.kill(actor_of(victim), signal.SIGKILL)
    it.until(lambda: not Path(f"/proc/{victim}").exists(), 60)
    assert f"the worker at {HOST}/1 is gone" in it.said()
    it.until(lambda: it.said().count(f"a worker begins at {HOST}/1") == 2, 60)
    assert it.process.wait(400) == 0, it.said()
    assert "Recommendation of study real" in it.said()
    store = open_study("real", it.storage)
    data = store.data()
    store.close()
    assert data.state == "done"
    assert {launch.place for launch in data.launches} == {f"{HOST}/0", f"{HOST}/1"}
    valid = [b for b in data.blocks.values() if b.block.valid]
    assert set(Counter((b.candidate_id, b.concurrency, b.role, b.repetition) for b in valid).values()) == {1}
    assert {launch.record.env["CUDA_VISIBLE_DEVICES"] for launch in data.launches if launch.record} == {"0", "1"}
    password = it.storage.split("://")[1].split("@")[0].split(":")[1]
    for secret in (password, "k3y-of-the-server"):
        assert secret not in it.said()
        assert not having(secret), "on no command line"
    session = Path(os.path.dirname(next(iter(Path("/tmp").glob("ray-*/session_latest")))), "session_latest")
    for path in (path for path in session.rglob("*") if path.is_file() and "sockets" not in path.parts):
        assert password.encode() not in path.read_bytes(), path
        assert b"k3y-of-the-server" not in path.read_bytes(), path
    assert not it.servers()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_command_ends_workers_and_servers(
    run: Callable[..., Run], number: signal.Signals, status: int
) -> None:
    it = run("--gpus", "1", "--at-most", "1")
    it.until(lambda: it.measuring("0") or it.measuring("1"), 200)
    workers = it.tuners()
    assert it.servers()
    it.process.send_signal(number)
    assert it.process.wait(120) == status, it.said()
    it.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 60)
    assert not it.servers()
    assert it.rows("select state from tuner_studies") == [("interrupted",)]
    assert "Traceback" not in it.said()


def test_what_does_not_fit_or_is_not_there_is_said_and_nothing_is_started(
    run: Callable[..., Run], cluster: dict[str, str], tmp_path: Path
) -> None:
    it = run("--gpus", "3")
    assert it.process.wait(120) == 3
    assert "no node of the Ray cluster has 3 GPUs" in it.said()
    assert it.rows("select count(*) from tuner_studies") in ([], [(0,)])
    wrong = run("--gpus", "1", "--devices", "0")
    assert wrong.process.wait(120) == 2
    assert "Ray gives each worker its devices" in wrong.said()
