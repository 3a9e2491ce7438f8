"""A real tuner process, killed with SIGKILL at random moments of a study, again and again.

After each kill: a sound database in which no block is lost or doubled; once the next run has begun, no process of the
earlier one. In the end: the target, and the decision of a run that nobody disturbed.

`FUZZ_KILLS=200` kills so often; `FUZZ_SEED` draws other moments.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.test_study_resume import flaky, outcome
from tests.tuner.study.toy_study import SPACE, ToyMachine, ToyServer, controller, space, study
from tuner.errors import StudyStopped
from tuner.launch.processes import MARKER, marker_text
from tuner.launch.reap import marked, reap
from tuner.records import LaunchRecord
from tuner.study.journal import Journal
from tuner.study.lease import hold
from tuner.study.planner import Policy
from tuner.study.progress import Silent

KILLS = int(os.environ.get("FUZZ_KILLS", "20"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
POLICY = Policy(pairs=2)
THE_SPACE = (SPACE, "budget.launches=8")
STEP_S = 0.01
"""Of a start, a block and an end: long beside a write, so that kills fall into all of them."""


class Marked(ToyMachine):
    """The toy, with a real process for every server, found and ended as any server is."""

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> ToyServer:
        server = super().start(record, marker=marker, log_path=log_path)
        environment = {**os.environ, MARKER: marker_text(marker)}
        process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
        server.pid = process.pid
        stop = server.stop

        def stopped() -> Any:
            process.kill()
            process.wait()
            return stop()

        server.stop = stopped  # type: ignore[method-assign]
        time.sleep(STEP_S)
        return server

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(STEP_S)
        found = super().measure(*args, **kwargs)
        time.sleep(STEP_S)
        return found

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        super().reap(marker)
        return [*reap(marker_text(marker), grace_s=1)]


class Begun(Silent):
    """Tells the test when the study has been taken up."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe: Connection | None = pipe

    def state(self, data: Any) -> None:
        if self.pipe is not None:
            self.pipe.send("begun")
            self.pipe = None


def tune(folder: Path, pipe: Connection) -> None:
    """What the child does: the study, from wherever it stands."""
    store = study(folder, space(*THE_SPACE))
    with hold(store.engine, store.name):
        work = controller(store, Marked(fails=flaky), policy=POLICY)
        work.observer = Begun(pipe)
        try:
            work.run()
        except StudyStopped as stopped:  # killed three times at one place: what a user would start again
            if "ended because the tuner itself did" not in str(stopped):
                raise
            pipe.send("stopped")


def rows(folder: Path) -> dict[int, tuple[Any, ...]]:
    """The blocks as they lie in the database, which must be sound and hold none twice."""
    with sqlite3.connect(folder / "study.db") as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        names = {name for (name,) in connection.execute("select name from sqlite_master")}
        if "tuner_blocks" not in names:
            return {}
        found = connection.execute(
            "select id, candidate, concurrency, role, repetition, attempt, valid, block from tuner_blocks"
        ).fetchall()
    valid = [row[1:5] for row in found if row[6]]
    assert len(valid) == len(set(valid)), "a block was measured twice"
    return {row[0]: row[1:] for row in found}


def one(folder: Path, column: str) -> Any:
    """A fact of the study."""
    with sqlite3.connect(folder / "study.db") as connection:
        return connection.execute(f"select {column} from tuner_studies").fetchone()[0]


def recorded(folder: Path) -> set[tuple[Any, ...]]:
    """The blocks in the write-ahead record."""
    entries = Journal(folder, one(folder, "uid")).entries()
    return {(e.slot.candidate_id, e.block.concurrency, e.slot.role, e.slot.repetition, e.attempt) for e in entries}


class Campaign:
    """One study, begun and killed until the kills are used up or it is done."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["tests.tuner.study.test_study_fuzz"])
        self.before: dict[int, tuple[Any, ...]] = {}
        self.promised: set[tuple[Any, ...]] = set()

    def orphans(self) -> list[int]:
        return [process.pid for process in marked(marker_text({"study": one(self.folder, "uid")}))]

    def run(self, *, kill: bool) -> bool:
        """One run; whether it was killed before its end."""
        left = self.orphans() if self.before else []
        ours, theirs = self.processes.Pipe()
        process = self.processes.Process(target=tune, args=(self.folder, theirs))
        process.start()
        theirs.close()
        assert ours.poll(60), "the tuner did not begin"
        try:
            said = ours.recv()
        except EOFError:  # it was done before it began
            said = "done"
        if left:
            assert not set(self.orphans()) & set(left), "a process outlived the next run's beginning"
        if kill and said == "begun":
            time.sleep(self.rng.uniform(0, 0.4))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        self.check()
        assert process.exitcode in (0, -signal.SIGKILL), f"the tuner ended with {process.exitcode}"
        return process.exitcode != 0

    def check(self) -> None:
        now = rows(self.folder)
        assert self.before.items() <= now.items(), "a block was lost or changed"
        kept = {row[:5] for row in now.values()}
        assert self.promised <= kept, "a block of the record was not taken over"
        self.before, self.promised = now, recorded(self.folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return controller(study(folder, space(*THE_SPACE)), ToyMachine(fails=flaky), policy=POLICY).run()


@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_tuner_killed_at_random_moments_loses_nothing_and_decides_the_same(tmp_path, undisturbed):
    rng, kills, studies = random.Random(SEED), 0, 0
    while kills < KILLS:
        folder = tmp_path / str(studies)
        folder.mkdir()
        studies += 1
        campaign = Campaign(folder, rng)
        while kills < KILLS and campaign.run(kill=True):
            kills += 1
        while one(folder, "state") != "done":
            campaign.run(kill=False)
        data = study(folder).data()
        assert outcome(data) == outcome(undisturbed)
        assert len(data.blocks) == len(undisturbed.blocks)
        assert campaign.orphans() == []
        assert not [launch for launch in data.launches if launch.ended_at is None]
    print(json.dumps({"kills": kills, "studies": studies}))
