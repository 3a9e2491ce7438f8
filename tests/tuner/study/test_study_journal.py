"""The write-ahead record: what a lock, a full disk or a kill keeps from the database is taken over, once."""

import json
import sqlite3

import pytest

from tests.tuner.study.toy_study import SPACE, ToyMachine, block, controller, space, study
from tuner.errors import EnvironmentBroken
from tuner.study.data import Slot
from tuner.study.journal import FILE, Entry, Journal
from tuner.study.policy import Policy
from tuner.study.store import StudyStore

POLICY = Policy(pairs=1)
SMALL = (SPACE, "budget.launches=4")


def entry(level=8, attempt=0, rate=100.0):
    return Entry(1, Slot("c", "screen", 0), attempt, block(level, "screen", rate))


def test_what_is_written_comes_back_and_only_to_its_study(tmp_path):
    Journal(tmp_path, "a").append(entry(8))
    Journal(tmp_path, "b").append(entry(1))
    assert list(Journal(tmp_path, "a").entries()) == [entry(8)]
    assert list(Journal(tmp_path, "b").entries()) == [entry(1)]
    assert list(Journal(tmp_path / "none", "a").entries()) == []


def test_a_line_torn_anywhere_is_ignored_and_harms_no_later_one(tmp_path):
    journal = Journal(tmp_path, "a")
    journal.append(entry(1))
    journal.append(entry(8))
    whole = journal.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole), 97):
        journal.path.write_bytes(whole[:cut])
        assert list(journal.entries()) == [entry(1)]
        journal.append(entry(8, attempt=1))
        assert list(journal.entries()) == [entry(1), entry(8, attempt=1)]


def test_a_line_that_was_changed_is_not_believed(tmp_path):
    journal = Journal(tmp_path, "a")
    journal.append(entry(8, rate=100.0))
    journal.path.write_text(journal.path.read_text().replace("100.0", "999.0"))
    assert list(journal.entries()) == []
    journal.path.write_bytes(b'[1]\n"x"\n{}\n\xff\xfe\n' + json.dumps({"sum": "x"}).encode() + b"\n")
    assert list(journal.entries()) == []


def test_every_block_is_in_the_record_before_the_database_has_it(tmp_path, monkeypatch):
    put, ahead = StudyStore.put_block, []

    def watched(self, launch, slot, measured):
        ahead.append(len((tmp_path / FILE).read_text().splitlines()) - len(self.data().blocks))
        return put(self, launch, slot, measured)

    monkeypatch.setattr(StudyStore, "put_block", watched)
    data = controller(study(tmp_path, space(*SMALL)), ToyMachine(), policy=POLICY).run()
    assert ahead == [1] * len(data.blocks)


def test_a_block_that_the_database_refused_is_taken_over_once_and_not_measured_again(tmp_path, monkeypatch):
    put = StudyStore.put_block

    def locked(self, launch, slot, measured):
        if len(self.data().blocks) == 1:
            raise sqlite3.OperationalError("database is locked")
        return put(self, launch, slot, measured)

    machine = ToyMachine()
    with monkeypatch.context() as patched:
        patched.setattr(StudyStore, "put_block", locked)
        with pytest.raises(sqlite3.OperationalError):
            controller(study(tmp_path, space(*SMALL)), machine, policy=POLICY).run()
    assert len(machine.measured) == 2
    assert not machine.running
    store = study(tmp_path, space(*SMALL))
    assert len(store.data().blocks) == 1
    data = controller(store, machine, policy=POLICY).run()
    assert data.state == "done"
    assert [event.kind for event in data.events].count("taken_over") == 1
    assert len(machine.measured) == len(data.blocks)
    again = controller(study(tmp_path, space(*SMALL)), machine, policy=POLICY).run()
    assert again.blocks == data.blocks


def test_a_record_that_cannot_be_written_stops_the_study_and_the_database_has_the_block(tmp_path, monkeypatch):
    machine = ToyMachine()
    store = study(tmp_path, space(*SMALL))

    def full(self, entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(EnvironmentBroken, match="cannot be written: No space left"):
        controller(store, machine, policy=POLICY).run()
    assert len(store.data().blocks) == len(machine.measured) == 1
    assert not machine.running


def test_the_record_of_a_deleted_study_is_not_taken_over_by_its_successor(tmp_path):
    data = controller(study(tmp_path, space(*SMALL)), ToyMachine(), policy=POLICY).run()
    for path in tmp_path.glob("study.db*"):
        path.unlink()
    machine = ToyMachine()
    new = controller(study(tmp_path, space(*SMALL)), machine, policy=POLICY).run()
    assert new.uid != data.uid
    assert len(machine.measured) == len(new.blocks)
