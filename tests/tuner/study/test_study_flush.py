"""Before every block the server's prefix cache is emptied; one that does not do so is not measured."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tuner.engines.bundled import BundledEngine
from tuner.records import LaunchRecord
from tuner.study.world import flush


@pytest.fixture
def record() -> Iterator[LaunchRecord]:
    """Of a server that empties its cache at /flush_cache, and knows nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200 if self.path == "/flush_cache" else 404)
            self.end_headers()

        def log_message(self, *told: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield BundledEngine().record(
        model="smollm2-135m", args={}, env={}, settings={}, host="127.0.0.1", port=server.server_port
    )
    server.shutdown()
    server.server_close()


def test_the_bundled_engine_is_flushed_and_a_refusal_is_told(record: LaunchRecord) -> None:
    assert flush(record) is None
    assert "status 404" in str(flush(dataclasses.replace(record, flush_path="/other")))
    assert "ConnectError" in str(flush(dataclasses.replace(record, port=1)))
    assert flush(dataclasses.replace(record, port=1, flush_path=None)) is None
