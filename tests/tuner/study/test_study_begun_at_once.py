"""Several that begin in an empty database at once: its tables are made by one of them, and all go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tuner.study.database import open_database
from tuner.study.store import study_names
from tuner.study.trials import Trials

AT_ONCE = 6


def begin(url: str) -> list[str]:
    """What each of them finds."""
    together = Barrier(AT_ONCE)

    def one(_number: int) -> str:
        together.wait()
        engine = open_database(url, create=True)
        trials = Trials(url, "begun", engine)
        try:
            assert study_names(engine) == []
            return type(trials.engine).__name__
        finally:
            trials.close()
            engine.dispose()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(AT_ONCE)))


@pytest.fixture(params=["sqlite", "postgresql"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    if request.param == "sqlite":
        return lambda number: f"sqlite:///{tmp_path / f'{number}.db'}"
    pytest.importorskip("psycopg")
    server = request.getfixturevalue("postgres_server")
    return lambda _number: server.database()


def test_all_of_them_find_the_tables_made(fresh: Callable[[int], str]) -> None:
    for number in range(3):
        assert begin(fresh(number)) == ["Engine"] * AT_ONCE
