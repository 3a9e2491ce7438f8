"""The file of a block's requests: all of them or none, whenever the tuner ends."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.study.recompute import _traces

REQUESTS = 400

WRITER = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from tuner.bench.trace import Trace
from tuner.study.world import Machine

curve = tuple((i, float(i)) for i in range(64))
trace = Trace(0, "p", 64, 0, 1, None, False, "final", 64, curve, (1, 2), "stop", "x" * 256)
outcome = SimpleNamespace(traces=[trace] * {REQUESTS})
print("ready", flush=True)
for number in range(10_000):
    Machine.keep_requests(None, outcome, Path(sys.argv[1]) / f"block-{{number}}.jsonl.gz")
"""


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.11, 0.23])
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path, after_s: float) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    for path in tmp_path.glob("block-*.jsonl.gz"):
        rows = gzip.decompress(path.read_bytes()).decode().splitlines()
        assert len(rows) == REQUESTS
        assert json.loads(rows[0])["tokens"] == 64
        assert len(list(_traces(path))) == REQUESTS


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    """As earlier versions could leave one, killed between opening it and writing to it."""
    path = tmp_path / "block-1.jsonl.gz"
    path.touch()
    with pytest.raises(EOFError, match="the tuner ended while it was being written"):
        list(_traces(path))
