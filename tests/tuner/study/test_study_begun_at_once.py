"""Several that begin in an empty database at once: its tables are made by one of them, and all go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tuner.study.database import engine_of, open_database
from tuner.study.store import study_names
from tuner.study.trials import Trials

AT_ONCE = 6
ROUNDS = {"sqlite": 8, "postgresql": 3}
"""As many as it takes to meet: one round in a hundred and less is where they come to a new file at the same moment."""


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
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    rounds = range(ROUNDS[request.param])
    if request.param == "sqlite":
        return [f"sqlite:///{tmp_path / f'{number}.db'}" for number in rounds]
    pytest.importorskip("psycopg")
    server = request.getfixturevalue("postgres_server")
    return [server.database() for _number in rounds]


def test_all_of_them_find_the_tables_made(fresh: list[str]) -> None:
    for url in fresh:
        assert begin(url) == ["Engine"] * AT_ONCE


def test_a_new_file_gets_its_log_while_others_give_it_one(tmp_path: Path) -> None:
    together = Barrier(AT_ONCE)

    def one(file: Path) -> str:
        together.wait()
        engine = engine_of(f"sqlite:///{file}")
        try:
            with engine.connect() as connection:
                return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
        finally:
            engine.dispose()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(200):
            assert list(pool.map(one, [tmp_path / f"{number}.db"] * AT_ONCE)) == ["wal"] * AT_ONCE
