"""Studies in a real PostgreSQL: every command, and what a user meets when the database does not do as it should."""

from __future__ import annotations

import socket
import threading
import time

import psycopg
import pytest

from tests.tuner.cli.test_cli_commands import machine, tuner  # noqa: F401
from tests.tuner.cli.test_cli_storage import at_block, fault
from tuner.study.address import VARIABLE


def password_of(url):
    return url.split("://")[1].split("@")[0].split(":")[1]


def rows(url, query):
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return connection.execute(query).fetchall()


def test_every_command_works_on_a_study_in_postgresql(machine, postgres, tmp_path):  # noqa: F811
    result = tuner("run", "toy.yaml", "--storage", postgres)
    assert result.exit_code == 0, result.output
    assert password_of(postgres) not in result.output, "commands shown for copying hide it"
    assert "--storage 'postgresql+psycopg://tuner:***@127.0.0.1" in result.output
    outputs = [result.output]
    for command in (
        ["status", "toy"],
        ["list"],
        ["report", "toy", "--output", "report.md"],
        ["recommend", "toy"],
        ["resume", "toy", "--more", 1],
        ["run", "toy.yaml"],
        ["export", "toy", "--format", "json", "--output", "out"],
    ):
        result = tuner(*command, "--storage", postgres)
        assert result.exit_code == 0, (command, result.output)
        outputs.append(result.output)
    assert "toy" in outputs[2]
    everything = "".join(outputs) + (tmp_path / "report.md").read_text()
    everything += "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    for table in [name for (name,) in rows(postgres, "select tablename from pg_tables where schemaname = 'public'")]:
        everything += str(rows(postgres, f'select * from "{table}"'))
    assert password_of(postgres) not in everything
    assert not (tmp_path / "studies/toy/study.db").exists()


def test_the_variable_stands_for_the_option(machine, postgres, monkeypatch):  # noqa: F811
    monkeypatch.setenv(VARIABLE, postgres)
    assert tuner("run", "toy.yaml", "--launches", 3).exit_code == 0
    assert "3 of 3" in tuner("status", "toy").output


def test_the_decision_is_the_same_as_in_a_file(machine, postgres):  # noqa: F811
    answers = []
    for storage in ([], ["--storage", postgres]):
        machine.starts.clear()
        answers.append((tuner("run", "toy.yaml", "--quiet", *storage).output, list(machine.starts)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("signs", ["wrong", "s%3Acret%40word", "%2Fp%3F%23"])
def test_a_wrong_password_is_not_echoed(machine, postgres, signs):  # noqa: F811
    from urllib.parse import unquote

    wrong = postgres.replace(password_of(postgres), signs)
    for command in (["run", "toy.yaml"], ["resume", "toy"], ["status", "toy"], ["list"], ["report", "toy"]):
        result = tuner(*command, "--storage", wrong)
        fault(result, 3, "does not let us in", "PGPASSWORD")
        assert signs not in result.output
        assert unquote(signs) not in result.output
    assert machine.starts == []
    assert rows(postgres, "select count(*) from pg_tables where schemaname = 'public'") == [(0,)], "half-written"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://tuner:s3cret@host:port/db",
        "postgresql+psycopg://tuner:s3cret/@host:12x/db",
        "postgresql+psycopg//tuner:s3cret@host",
        "postgresql+psycopg://tuner:a@s3cret@host:none/db",
        "mysql+nosuch://tuner:s3cret@host/db",
        "postgresql+psycopg://tuner@127.0.0.1:1/db?password=s3cret",
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_its_password(machine, url):  # noqa: F811
    for command in (["run", "toy.yaml"], ["status", "toy"], ["list"]):
        result = tuner(*command, "--storage", url)
        assert result.exit_code in (2, 3), result.output
        assert "s3cret" not in result.output
        assert "Traceback" not in result.output


def test_a_server_that_is_not_there_and_a_database_that_is_not(machine, postgres):  # noqa: F811
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = postgres.rsplit("@", 1)[0] + f"@127.0.0.1:{closed.getsockname()[1]}/study"
        began = time.monotonic()
        for command in (["run", "toy.yaml"], ["status", "toy"]):
            fault(tuner(*command, "--storage", nowhere), 3, "cannot be reached")
        assert time.monotonic() - began < 10, "who has never been connected is told at once"
    fault(tuner("run", "toy.yaml", "--storage", postgres + "x"), 3, "is not there", "createdb")
    assert machine.starts == []


def test_without_the_driver_it_is_said_what_to_install(machine, monkeypatch):  # noqa: F811
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    result = tuner("run", "toy.yaml", "--storage", "postgresql+psycopg://u:s3cret@127.0.0.1/x")
    fault(result, 2, "not installed", "spec-tuner[postgres]")
    assert "s3cret" not in result.output


def blocks(url):
    return rows(url, "select candidate, concurrency, role, repetition, block::text from tuner_blocks order by id")


def test_a_database_that_restarts_within_a_study_is_waited_for(machine, postgres_server, monkeypatch):  # noqa: F811
    url = postgres_server.database()
    back = []

    def restart(store):
        if not back:
            postgres_server.stop(at_once=True)
            back.append(threading.Timer(1.5, postgres_server.start))
            back[0].start()

    with monkeypatch.context() as patched:
        at_block(3, patched, restart)
        result = tuner("run", "toy.yaml", "--storage", url)
    back[0].join()
    assert result.exit_code == 0, result.output
    assert "the database has gone away" in result.output
    assert password_of(url) not in result.output
    assert len(blocks(url)) == 2 * 5
    assert len(machine.measured) == 10, "a block was lost or measured twice"


def test_a_database_that_stays_away_costs_no_block(machine, postgres_server, monkeypatch):  # noqa: F811
    url = postgres_server.database()
    monkeypatch.setattr("tuner.study.postgres.OUTAGE_S", 0.5)
    away = []

    def go_away(store):
        if not away:
            away.append(postgres_server.stop(at_once=True))

    try:
        with monkeypatch.context() as patched:
            at_block(3, patched, go_away)
            result = tuner("run", "toy.yaml", "--storage", url)
        fault(result, 3, "cannot be reached, or has gone away", "Everything measured is kept", "tuner resume toy")
        assert password_of(url) not in result.output
        assert not machine.running
    finally:
        postgres_server.start()
    before = blocks(url)
    assert len(before) == 3
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute("delete from tuner_workers")  # this process lives on, unlike a tuner that has ended
    result = tuner("run", "toy.yaml", "--storage", url)
    assert result.exit_code == 0, result.output
    assert set(before) <= set(blocks(url)), "a block was lost"
    assert len(blocks(url)) == 2 * 5
    assert len(machine.measured) == 10, "the block that could not be kept was taken over from the record"


def test_a_role_that_may_only_read(machine, postgres_server, postgres):  # noqa: F811
    with psycopg.connect(postgres.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("drop role if exists reader")
        connection.execute(f"create role reader login password '{postgres_server.password}'")
        connection.execute("revoke create on schema public from public")
    reader = postgres.replace("//tuner:", "//reader:")
    fault(tuner("run", "toy.yaml", "--storage", reader), 3, "cannot be written")
    assert machine.starts == []
