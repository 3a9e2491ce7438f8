"""Faults of the storage as a user meets them: a message, exit code 2 or 3, no traceback, and every block intact."""

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import time
from contextlib import suppress

import pytest
import sqlalchemy as sa

from tests.tuner.cli.test_cli_commands import machine, tuner  # noqa: F401
from tuner.study.controller import Controller
from tuner.study.store import StudyStore

DATABASE = "studies/toy/study.db"


def blocks():
    with sqlite3.connect(DATABASE) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        return connection.execute("select candidate, concurrency, role, repetition, block from tuner_blocks").fetchall()


def fault(result, code, *says):
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for each in says:
        assert each in result.output.replace("\n", " "), result.output


def at_block(number, monkeypatch, act):
    """Calls `act` on the store right before block `number` is kept."""
    keep = Controller._keep

    def watched(self, entry):
        if len(self.store.data().blocks) == number:
            act(self.store)
        return keep(self, entry)

    monkeypatch.setattr(Controller, "_keep", watched)


def process_ends():
    """The tests' process lives on, and its lease with it, unlike a tuner that could not give its own back."""
    with sqlite3.connect(DATABASE) as connection:
        connection.execute("delete from tuner_workers")


def goes_on(machine, before):  # noqa: F811
    process_ends()
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 0, result.output
    after = blocks()
    assert set(before) <= set(after), "a block was lost"
    assert len(after) == len({row[:4] for row in after}) == 2 * 5
    assert len(machine.measured) == 10, "a block was lost or measured twice"


def ends(before):
    """The same command ends the study, and every block of before is still there."""
    process_ends()
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 0, result.output
    assert set(before) <= set(blocks())


def test_a_database_that_stays_locked(machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tuner.study.database.LOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr("tuner.study.trials.LOCK_TIMEOUT_S", 0.3)
    others = []

    def lock(store):
        if not others:
            others.append(sqlite3.connect(DATABASE, isolation_level=None))
            others[0].execute("begin immediate")

    with monkeypatch.context() as patched:
        at_block(3, patched, lock)
        fault(tuner("run", "toy.yaml"), 3, "locked: another program holds it", "tuner resume toy")
        assert not machine.running
        assert tuner("status", "toy").exit_code == 0, "a reader does not wait for a writer"
    others[0].close()
    before = blocks()
    assert len(before) == 3
    goes_on(machine, before)


def test_a_database_that_is_locked_when_it_is_opened(machine, monkeypatch):  # noqa: F811
    tuner("run", "toy.yaml", "--launches", 3)
    monkeypatch.setattr("tuner.study.database.LOCK_TIMEOUT_S", 0.2)
    other = sqlite3.connect(DATABASE, isolation_level=None)
    other.execute("pragma locking_mode = exclusive")
    other.execute("begin immediate")
    for command in (["run", "toy.yaml"], ["resume", "toy"], ["status", "toy"], ["report", "toy"]):
        fault(tuner(*command), 3, "locked: another program holds it")
    other.close()
    assert tuner("status", "toy").exit_code == 0


def test_a_full_disk(machine, monkeypatch):  # noqa: F811
    def fill(store):
        for engine in (store.engine, store.trials._storage.engine):

            @sa.event.listens_for(engine, "begin")
            def no_more_pages(connection):
                pages = connection.connection.execute("pragma page_count").fetchone()[0]
                connection.connection.execute(f"pragma max_page_count = {pages}")

    with monkeypatch.context() as patched:
        at_block(3, patched, fill)
        fault(tuner("run", "toy.yaml"), 3, "full", "tuner resume toy")
    assert not machine.running
    goes_on(machine, blocks())


def test_a_block_that_could_be_kept_nowhere_is_named(machine, monkeypatch):  # noqa: F811
    def fill(store):
        @sa.event.listens_for(store.engine, "begin")
        def query_only(connection):
            connection.connection.execute("pragma query_only = on")

        def full(self, entry):
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr("tuner.study.journal.Journal.append", full)

    with monkeypatch.context() as patched:
        at_block(1, patched, fill)
        result = tuner("run", "toy.yaml")
    fault(
        result, 3, "the last block, of the baseline at concurrency", "is lost", "before it is kept", "tuner resume toy"
    )
    assert "Everything measured is kept" not in result.output
    assert len(blocks()) == 1


def test_a_study_that_is_deleted_while_it_runs_is_no_success(machine, monkeypatch):  # noqa: F811
    def delete(store):
        shutil.rmtree("studies/toy")

    with monkeypatch.context() as patched:
        at_block(3, patched, delete)
        fault(tuner("run", "toy.yaml"), 3, "study.db", "is gone")
    assert not machine.running


def test_files_may_not_grow_any_more(machine, monkeypatch):  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(store):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    with monkeypatch.context() as patched:
        at_block(3, patched, limit)
        try:
            result = tuner("run", "toy.yaml")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fault(result, 3)
    assert not machine.running
    before = blocks()
    assert len(before) >= 3
    process_ends()
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 0, result.output
    assert set(before) <= set(blocks())


def test_a_database_that_may_only_be_read(machine, monkeypatch):  # noqa: F811
    def protect(store):
        @sa.event.listens_for(store.engine, "begin")
        def query_only(connection):
            connection.connection.execute("pragma query_only = on")

    with monkeypatch.context() as patched:
        at_block(3, patched, protect)
        fault(tuner("run", "toy.yaml"), 3, "cannot be written", "readonly", "tuner resume toy")
    goes_on(machine, blocks())


def test_a_folder_that_cannot_be_made(machine, tmp_path):  # noqa: F811
    (tmp_path / "studies").write_text("a file")
    fault(tuner("run", "toy.yaml"), 3, "cannot be made")
    fault(tuner("run", "toy.yaml", "--storage", "sqlite:////proc/none/study.db"), 3, "cannot be made")
    assert machine.starts == []


@pytest.mark.parametrize("keep", [0, 10, 100, 5000])
def test_a_truncated_database(machine, tmp_path, keep):  # noqa: F811
    tuner("run", "toy.yaml")
    with sqlite3.connect(DATABASE) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        connection.execute("pragma journal_mode = delete")
    started = len(machine.starts)
    file = tmp_path / DATABASE
    file.write_bytes(file.read_bytes()[:keep])
    commands = (["status", "toy"], ["resume", "toy"], ["report", "toy"], ["recommend", "toy"])
    for command in commands:
        fault(tuner(*command), 2)
    if keep:
        fault(tuner("run", "toy.yaml"), 2)
        assert len(file.read_bytes()) == keep, "it was changed"
    assert len(machine.starts) == started


def test_another_programs_file(machine, tmp_path):  # noqa: F811
    (tmp_path / "studies/toy").mkdir(parents=True)
    (tmp_path / DATABASE).write_bytes(b"GIF89a" * 1000)
    for command in (["run", "toy.yaml"], ["status", "toy"], ["list"]):
        result = tuner(*command)
        assert result.exit_code in (0, 2)
        assert "Traceback" not in result.output
    assert (tmp_path / DATABASE).read_bytes() == b"GIF89a" * 1000
    assert machine.starts == []


@pytest.mark.parametrize(
    "change",
    [
        "alter table tuner_launches drop column forgiven",
        "alter table tuner_confirmations drop column spares",
        "drop table tuner_verdicts",
        "update tuner_schema set version = 0",
        "update tuner_schema set version = 99",
        "update alembic_version set version_num = 'v99.0.0'",
    ],
)
def test_a_study_of_another_version(machine, change):  # noqa: F811
    tuner("run", "toy.yaml", "--launches", 3)
    started, before = len(machine.starts), blocks()
    with sqlite3.connect(DATABASE) as connection:
        connection.execute(change)
    for command in (["run", "toy.yaml"], ["resume", "toy"], ["status", "toy"]):
        fault(tuner(*command), 2, "another version", "--study NAME")
    assert len(machine.starts) == started
    assert blocks() == before


def test_a_tuner_that_slept_while_another_took_its_study_over_stops_and_leaves_it_alone(machine, monkeypatch):  # noqa: F811
    def taken_over(store: StudyStore):
        with store.engine.begin() as connection:
            connection.exec_driver_sql("update tuner_workers set token = 'of another'")

    with monkeypatch.context() as patched:
        at_block(3, patched, taken_over)
        fault(tuner("run", "toy.yaml"), 1, "another tuner has taken over")
    assert not machine.running
    assert len(blocks()) == 3
    with sqlite3.connect(DATABASE) as connection:
        assert connection.execute("select token from tuner_workers").fetchall() == [("of another",)]
        connection.execute("delete from tuner_workers")
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 0, result.output


def test_known_crashes_are_beside_the_studies_and_can_be_ignored(machine):  # noqa: F811
    from tuner.records import Failure

    crash = Failure("startup_crash", "ready", "boom")
    machine.fails = lambda phase, settings, count: (
        crash if phase == "ready" and settings.get("num_steps", 0) >= 3 else None
    )
    tuner("run", "toy.yaml", "--launches", 14)
    crashed = [settings for settings in machine.starts if settings.get("num_steps", 0) >= 3]
    assert crashed
    machine.starts.clear()
    result = tuner("run", "toy.yaml", "--study", "again", "--launches", 14)
    assert "known crash of study toy" in result.output
    anew = [settings for settings in machine.starts if settings.get("num_steps", 0) >= 3]
    assert not any(settings in crashed for settings in anew)
    assert len({str(settings) for settings in anew}) <= 1, "one of its own closes a region that others have found"
    tuner("run", "toy.yaml", "--study", "third", "--launches", 14, "--no-crash-memory")
    assert any(settings.get("num_steps", 0) >= 3 for settings in machine.starts)


def test_a_folder_in_the_place_of_the_database_is_said_and_nothing_is_written_into_it(machine, monkeypatch):  # noqa: F811
    def replaced(store):
        os.rename(DATABASE, f"{DATABASE}.kept")
        os.mkdir(DATABASE)

    with monkeypatch.context() as patched:
        at_block(3, patched, replaced)
        fault(tuner("run", "toy.yaml"), 3, "study.db", "is gone")
    assert not machine.running
    for command in (["run", "toy.yaml"], ["resume", "toy"], ["status", "toy"]):
        result = tuner(*command)
        assert result.exit_code in (2, 3), result.output
        assert "Traceback" not in result.output
        assert "study.db" in result.output.replace("\n", "")
        assert "Everything measured is kept" not in result.output.replace("\n", " ")
    assert os.listdir(DATABASE) == []
    os.rmdir(DATABASE)
    os.rename(f"{DATABASE}.kept", DATABASE)
    before = blocks()
    assert len(before) == 3
    ends(before)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes in the place of `studies`."""
    folder = tmp_path / "studies"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full_costs_no_block_that_was_kept(machine, small_disk, monkeypatch):  # noqa: F811
    filler = small_disk / "filler"

    def fill(store):
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 512):
                pass
        assert shutil.disk_usage(small_disk).free < 4096

    with monkeypatch.context() as patched:
        at_block(3, patched, fill)
        fault(tuner("run", "toy.yaml"), 3, "full")
    assert not machine.running
    filler.unlink()
    before = blocks()
    assert len(before) == 3
    ends(before)


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_that_is_put_right_in_mid_study_takes_nothing_from_its_hours(machine, monkeypatch, jump_s):  # noqa: F811
    real = time.time

    with monkeypatch.context() as patched:
        at_block(1, patched, lambda _store: patched.setattr("time.time", lambda: real() + jump_s))
        result = tuner("run", "toy.yaml", "--hours", "1")
        for command in ("status", "report"):
            assert tuner(command, "toy").exit_code == 0
    assert result.exit_code == 0, result.output
    assert len(blocks()) == 2 * 5
    with sqlite3.connect(DATABASE) as connection:
        took = connection.execute("select ended_at - started_at from tuner_launches").fetchall()
    assert all(0 <= seconds < 60 for (seconds,) in took)
