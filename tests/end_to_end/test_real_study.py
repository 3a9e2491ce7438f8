"""What a new user does, on the real model: tune, be killed, go on, read the decision, deploy what was measured."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
SPACE = """
name: small
engine: {kind: bundled, model: smollm2-135m}
workload: {prompts: mixed, max_tokens: 24, concurrency: [1, 2]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {choices: [4], when: speculation != 'none'}
budget: {launches: 2, candidates: 1}
profile: short
"""


def tuner(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "STARTED_FROM": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == status, text
    return text


def run_to_the_end(folder: Path) -> str:
    """`tuner run`, repeated where neighbours on the machine spoiled the measurement: exit 3, and it can go on."""
    for _ in range(4):
        process = tuner(folder, "run", "space.yaml")
        text, _ = process.communicate(timeout=300)
        if process.returncode != 3:
            break
    assert process.returncode == 0, text
    return text


def until(true: Callable[[], bool], patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def blocks(folder: Path) -> list[tuple[int, str]]:
    with sqlite3.connect(folder / "studies" / "small" / "study.db") as database:
        return database.execute("select id, block from tuner_blocks where valid order by id").fetchall()


def servers(text: str) -> list[int]:
    """Processes whose environment holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended, or is not ours
    return found


@pytest.mark.timeout(600)
def test_a_killed_study_goes_on_and_its_decision_can_be_deployed(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    first = tuner(tmp_path, "run", "space.yaml", "--quiet")
    database = tmp_path / "studies" / "small" / "study.db"
    until(lambda: database.exists() and "tuner_blocks" in tables(database) and len(blocks(tmp_path)) >= 1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = blocks(tmp_path)

    text = run_to_the_end(tmp_path)
    after = blocks(tmp_path)
    assert after[: len(before)] == before, "a measured block was lost or measured twice"
    # Two of the candidate, and its baseline's on the same server; what the killed server had measured is kept beside.
    assert 4 <= len(after) <= 6, text
    assert "keep the baseline" in text
    assert "interval)" not in text, "no interval from fewer than four pairs"
    assert "not separated" in text or "none came near the baseline" in text
    assert not servers(f"STARTED_FROM={tmp_path}")

    again = finish(tuner(tmp_path, "run", "space.yaml"))
    assert blocks(tmp_path) == after, "a finished study measures nothing more"
    assert "keep the baseline" in again
    decision = json.loads(finish(tuner(tmp_path, "recommend", "small", "--json")))
    assert decision["overall"]["winner"] is None
    report = finish(tuner(tmp_path, "report", "small"))
    assert report.count("speculation=ngram") >= 1
    derived = finish(tuner(tmp_path, "recompute", "small"))
    assert "blocks from requests" in derived
    assert " 0 blocks from requests" not in derived, "throughput and latencies follow from the requests themselves"

    finish(tuner(tmp_path, "export", "small", "--format", "shell", "--output", "out"))
    port = free_port()
    server = subprocess.Popen([str(tmp_path / "out" / "run.sh")], env={**os.environ, "PORT": str(port)})
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        answer = ""

        def answers() -> bool:
            nonlocal answer
            try:
                reply = client.chat.completions.create(
                    model="smollm2-135m",
                    messages=[{"role": "user", "content": "What is the capital of France?"}],
                    max_tokens=24,
                    temperature=0,
                )
            except openai.APIConnectionError:
                assert server.poll() is None, "the exported server ended"
                return False
            answer = reply.choices[0].message.content or ""
            return True

        until(answers)
        assert "Paris" in answer
        measured = finish(
            tuner(tmp_path, "bench", f"http://127.0.0.1:{port}", "--concurrency", "1", "--max-tokens", "16", "--json")
        )
        assert '"tokens_per_s"' in measured
    finally:
        server.terminate()
        assert server.wait(30) == 0


def tables(database: Path) -> set[str]:
    with sqlite3.connect(database) as connection:
        return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
