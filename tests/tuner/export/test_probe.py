"""A probe of an export is a real completion: ready once a token was made, and not before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.tuner.export.test_export import launch
from tuner.export.workload import probe


class Engine(HTTPServer):
    status = 200
    asked: list[dict]
    keys: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append({"path": self.path, **json.loads(body)})
        self.server.keys.append(self.headers.get("authorization"))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Silent."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine(("127.0.0.1", 0), Handler)
    server.asked, server.keys = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def without_curl(folder: Path) -> str:
    for name in ("sh", "python3"):
        (folder / name).symlink_to(sys.executable if name == "python3" else str(shutil.which(name)))
    return str(folder)


@pytest.mark.parametrize("by", ["curl", "python"])
@pytest.mark.parametrize("key", [None, "API_KEY"])
def test_a_probe_makes_a_token_and_fails_while_it_cannot(
    engine: Engine, by: str, key: str | None, tmp_path: Path
) -> None:
    if by == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl")
    record = launch(served_model='it\'s $a "model"')
    command = probe(record, engine.server_address[1], key)
    env = {"PATH": os.environ["PATH"] if by == "curl" else without_curl(tmp_path), "API_KEY": "a $b"}
    assert subprocess.run(command, env=env, capture_output=True).returncode == 0
    assert engine.asked == [
        {"path": "/v1/completions", "model": 'it\'s $a "model"', "prompt": "1 2 3", "max_tokens": 1}
    ]
    assert engine.keys == [f"Bearer {env['API_KEY']}" if key else None]
    engine.status = 503
    assert subprocess.run(command, env=env, capture_output=True).returncode != 0
