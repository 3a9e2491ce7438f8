"""A real tuner process, killed with SIGKILL at random moments of a study, again and again.

Once with a toy for a server, and once with the misbehaving HTTP server, started and spoken to as any server is.

After each kill: a sound database in which no block is lost or doubled; once the next run has begun, no process of the
earlier one. In the end: the target, and the decision of a run that nobody disturbed.

`FUZZ_KILLS=200` kills so often, `FUZZ_SERVER_KILLS=50` those with a real server; `FUZZ_SEED` draws other moments.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tuner.study.test_study_resume import flaky, outcome
from tests.tuner.study.toy_study import SPACE, Outcome, ToyMachine, ToyServer, controller, space, study
from tuner.engines.base import get_engine
from tuner.errors import StudyStopped
from tuner.launch import ports
from tuner.launch.processes import MARKER, marker_text
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server
from tuner.records import Failure, LaunchRecord
from tuner.study.controller import Controller
from tuner.study.journal import Journal
from tuner.study.lease import hold
from tuner.study.policy import Policy
from tuner.study.progress import Silent
from tuner.study.store import StudyStore

KILLS = int(os.environ.get("FUZZ_KILLS", "20"))
SERVER_KILLS = int(os.environ.get("FUZZ_SERVER_KILLS", "4"))
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


QUICK = LaunchLimits(stall_s=5.0, startup_s=20.0, smoke_s=5.0, info_s=2.0, grace_s=0.5, gone_s=10.0)
HTTP_SPACE = f"""
name: toy
engine:
  kind: command
  model: fake
  args:
    command: [{sys.executable}, -I, {Path(__file__).parents[2] / "faults" / "misbehaving_server.py"},
              --host, "{{host}}", --port, "{{port}}", --mode, "{{mode}}"]
    info_path: /server_info
workload: {{concurrency: [1, 8], max_tokens: 64}}
baseline: {{mode: healthy}}
parameters:
  mode: {{choices: [grandchild, dies_mid_stream, half_built]}}
budget: {{launches: 8, candidates: 3}}
profile: short
"""
MODE_SPEED = {"healthy": 100.0, "grandchild": 120.0}


class Served(ToyMachine):
    """A real server behind every launch, asked for real tokens; only how fast it is said to be is a toy's."""

    def __init__(self) -> None:
        super().__init__(speed=lambda settings, level: MODE_SPEED[settings["mode"]] * level)

    def free_port(self) -> int:
        return ports.free_port()

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> Any:
        return Server.start(record, marker=marker, log_path=log_path, limits=QUICK)

    def measure(self, server: Any, record: LaunchRecord, **given: Any) -> Any:
        body = {"model": "fake", "prompt": "x", "max_tokens": 8, "stream": True}
        try:
            with httpx.Client(trust_env=False, timeout=5) as client:
                text = client.post(record.base_url + "/v1/completions", json=body).text
            if "[DONE]" not in text:
                raise httpx.ReadError("the stream was cut")
        except httpx.HTTPError as error:
            found = server.failure(wait_s=5) or Failure("bad_protocol", "bench", str(error))
            return Outcome(None, replace(found, evidence=""))
        return super().measure(server, record, **given)

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        return [*reap(marker_text(marker), grace_s=0.5)]


class Begun(Silent):
    """Tells the test when the study has been taken up."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe: Connection | None = pipe

    def state(self, data: Any) -> None:
        if self.pipe is not None:
            self.pipe.send("begun")
            self.pipe = None


def work_of(folder: Path, kind: str) -> tuple[StudyStore, Controller]:
    """A study of the toy's, or of the server's."""
    if kind == "toy":
        store = study(folder, space(*THE_SPACE))
        return store, controller(store, Marked(fails=flaky), policy=POLICY)
    store = study(folder, space(HTTP_SPACE))
    return store, controller(store, Served(), get_engine("command"), policy=POLICY)


def tune(folder: Path, kind: str, pipe: Connection) -> None:
    """What the child does: the study, from wherever it stands."""
    store, work = work_of(folder, kind)
    with hold(store.engine, store.name):
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

    def __init__(self, folder: Path, rng: random.Random, kind: str = "toy", most_s: float = 0.4) -> None:
        self.folder = folder
        self.kind = kind
        self.most_s = most_s
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
        process = self.processes.Process(target=tune, args=(self.folder, self.kind, theirs))
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
            time.sleep(self.rng.uniform(0, self.most_s))
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


def campaigns(folder: Path, kills: int, expected: Any, kind: str = "toy", most_s: float = 0.4) -> Iterator[Campaign]:
    """Studies that are killed until so many kills are used up; each is then brought to its end."""
    rng, done, studies = random.Random(SEED), 0, 0
    while done < kills:
        place = folder / str(studies)
        place.mkdir()
        studies += 1
        campaign = Campaign(place, rng, kind, most_s)
        while done < kills and campaign.run(kill=True):
            done += 1
        while one(place, "state") != "done":
            campaign.run(kill=False)
        data = study(place).data()
        assert outcome(data) == outcome(expected)
        assert len(data.blocks) == len(expected.blocks)
        assert campaign.orphans() == []
        assert not [launch for launch in data.launches if launch.ended_at is None]
        yield campaign
    print(json.dumps({"kind": kind, "kills": done, "studies": studies}))


@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_tuner_killed_at_random_moments_loses_nothing_and_decides_the_same(tmp_path, undisturbed):
    for _ in campaigns(tmp_path, KILLS, undisturbed):
        pass


@pytest.mark.timeout(120 + 20 * SERVER_KILLS)
def test_a_tuner_killed_with_a_real_misbehaving_server_leaves_no_process_and_no_port_and_decides_the_same(tmp_path):
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    store, work = work_of(folder, "server")
    expected = work.run()
    kinds = {launch.failure.kind for launch in expected.launches if launch.failure}
    assert kinds == {"partial_init", "died_mid_bench"}, "the servers do misbehave"
    assert expected.confirmations
    store.close()
    for campaign in campaigns(tmp_path, SERVER_KILLS, expected, "server", most_s=2.5):
        data = study(campaign.folder).data()
        assert all(ports.is_free(launch.record.port) for launch in data.launches if launch.record)
