"""Hub ids: fetched where a hub answers, from the cache where it does not, else a clear word."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.model.hub import is_hub_id

ROOT = Path(__file__).parents[2]
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "pytorch_model.bin": b"no"}
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of a hub's HTTP as one download needs; it knows owner/model, and owner/empty without weights."""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        status, data, headers = 404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"}
        for repository, names in (("owner/model", list(FILES)), ("owner/empty", ["config.json"])):
            files = [{"type": "file", "path": name, "oid": "0" * 40, "size": len(FILES[name])} for name in names]
            about = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if path.startswith(f"/api/models/{repository}/tree"):
                status, data, headers = 200, json.dumps(files).encode(), {}
            elif path.startswith(f"/api/models/{repository}"):
                status, data, headers = 200, json.dumps(about).encode(), {}
            for name in names:
                if path == f"/{repository}/resolve/{COMMIT}/{name}":
                    etag = hashlib.sha256(FILES[name]).hexdigest()
                    status, data, headers = 200, FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *told: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def resolve(model: str, endpoint: str, home: Path) -> str:
    """What a fresh process says: the hub library reads its environment when it is imported."""
    code = (
        "import sys; from engine.errors import EngineError; from engine.model.source import resolve\n"
        "try: found = resolve(sys.argv[1]); names = sorted(path.name for path in found.path.iterdir())\n"
        "except EngineError as error: print(type(error).__name__, error)\n"
        "else: print(found.kind, found.name, names)"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code, model], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_repository_is_fetched_once_and_then_served_from_the_cache(hub: str, tmp_path: Path) -> None:
    found = resolve("owner/model", hub, tmp_path)
    assert found == "hf model ['config.json', 'model.safetensors', 'tokenizer.json']\n"
    assert resolve("owner/model", "http://127.0.0.1:1", tmp_path) == found


def test_what_cannot_be_had_is_said_clearly(hub: str, tmp_path: Path) -> None:
    assert "DownloadFailed model: the hub does not give 'owner/other'" in resolve("owner/other", hub, tmp_path)
    assert "UnsupportedModel" in resolve("owner/empty", hub, tmp_path)
    unreached = resolve("owner/model", "http://127.0.0.1:1", tmp_path)
    assert "DownloadFailed model: 'owner/model' is no file or folder here, and the hub cannot be reached" in unreached
    assert "HF_ENDPOINT" in unreached


def test_paths_are_not_taken_for_hub_ids() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_id, ("/a/b", "./a/b", "a/b/c", "a", "", "../b", "a/..")))
