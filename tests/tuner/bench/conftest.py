from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_harness import Server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A block's figures are about time, all of them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timing)


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
