from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench_harness import Server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.reset()
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that may die."""
    server = Server()
    yield server
    server.stop()
