"""Output that cannot be written costs the display, never the study."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tuner.study.store import open_study

ROOT = Path(__file__).parents[3]
SPACE = """
name: sim
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {}
parameters:
  num_steps: {low: 1, high: 5}
budget: {launches: 12}
simulation: {clock: virtual}
"""


def start(folder: Path, out: IO[bytes] | int, *more: str) -> subprocess.Popen[bytes]:
    (folder / "sim.yaml").write_text(SPACE)
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", "run", "sim.yaml", *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=out,
        stderr=subprocess.PIPE,
    )


def is_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.chdir(folder)
    store = open_study("sim")
    try:
        return store.data().state == "done"
    finally:
        store.close()


@pytest.mark.parametrize("more", [(), ("--json-log",)])
def test_a_reader_that_goes_away_does_not_end_the_study(tmp_path, monkeypatch, more):
    run = start(tmp_path, subprocess.PIPE, *more)
    run.stdout.readline()
    run.stdout.close()
    complaint = run.stderr.read().decode()
    assert run.wait(60) == 0, complaint
    assert is_done(tmp_path, monkeypatch)
    assert "Standard output could not be written (Broken pipe)" in complaint
    assert "Traceback" not in complaint
    assert "Exception" not in complaint


def test_a_full_disk_under_the_output_does_not_end_the_study(tmp_path, monkeypatch):
    with open("/dev/full", "wb") as full:
        run = start(tmp_path, full)
    complaint = run.stderr.read().decode()
    assert run.wait(60) == 0, complaint
    assert is_done(tmp_path, monkeypatch)
    assert "No space left" in complaint


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["report", "sim"],
        ["recommend", "sim", "--json"],
        ["export", "sim", "--format", "json", "--output", "out", "--allow-simulated"],
        ["check", "sim.yaml"],
    ],
)
def test_a_command_whose_answer_finds_no_room_says_so(arguments, finished):
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "tuner", *arguments],
            cwd=finished,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "standard output cannot be written: No space left on device" in run.stderr
    assert "a file of the study" not in run.stderr
    assert "Traceback" not in run.stderr
    assert run.returncode == 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished study."""
    folder = tmp_path_factory.mktemp("finished")
    with open(os.devnull, "wb") as nowhere:
        run = start(folder, nowhere)
        assert run.wait(60) == 0, run.stderr.read()
    return folder
