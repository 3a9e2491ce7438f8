"""Tuners that are killed while settings of running servers change, and the changes fail too.

`FUZZ_CHANGE_KILLS=30` kills so often for each fault; `FUZZ_SEED` draws other moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.changing import POLICY, SPACE, ChangingEngine, ChangingMachine, changing_study, orphans
from tests.tuner.study.test_study_fuzz import rows
from tests.tuner.study.toy_study import controller, space, study
from tuner.launch import ports
from tuner.study.decide import recommendation
from tuner.study.lease import hold
from tuner.study.place import Place, hostname
from tuner.study.turn import turn

KILLS = int(os.environ.get("FUZZ_CHANGE_KILLS", "2"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MOST_S = 6.0
PATIENCE_S = 600
"""For the end of a study of some 20 launches: a machine may be busy."""
FAULTS = ["dies_with_heir", "keeps_old", "never_answers", "stops_decoding"]
PLACES = [Place(hostname(), (number,)) for number in ("0", "1")]


def work(folder: Path, fault: str, place: Place | None) -> None:
    """What a worker's process does: the study, from wherever it stands."""
    the_space = space(SPACE, f"engine.args.change={fault}")
    store = study(folder, the_space)
    with hold(store.engine, store.name, time.time, place) as lease:
        machine = ChangingMachine(the_space)
        more: dict[str, Any] = {}
        if place is not None:
            more = {
                "place": place,
                "others": lease.others,
                "siblings": lambda: bool(lease.sibling_pids()),
                "turn": lambda: turn(store.engine, store.name),
                "pause": lambda _s: time.sleep(0.2),
            }
        controller(store, machine, ChangingEngine(), policy=POLICY, **more).run()
        assert machine.wrong == [], machine.wrong


def begin(folder: Path, fault: str, place: Place | None = None) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=work, args=(folder, fault, place))
    process.start()
    return process


def check(folder: Path, before: dict[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    """The blocks now; none is lost, changed or doubled."""
    now = rows(folder) if (folder / "study.db").exists() else {}
    assert before.items() <= now.items()
    return now


def check_end(folder: Path, fault: str) -> None:
    """The target is reached, with the recommendation of a study that nobody disturbed, and nothing is left."""
    store, _ = changing_study(folder, f"engine.args.change={fault}")
    data = store.data()
    assert data.state == "done"
    assert sorted(data.settings_of(trial.candidate_id)["num_steps"] for trial in data.measured) == [1, 2, 3, 4, 5, 6]
    assert all(trial.constraints["launch"] <= 0 for trial in data.measured), "a change's fault is nobody's"
    winner = recommendation(data).overall.winner
    assert winner is not None
    assert winner.settings["num_steps"] == 3
    assert orphans(data.uid) == []
    assert not [launch for launch in data.launches if launch.ended_at is None]
    assert all(ports.is_free(launch.record.port) for launch in data.launches if launch.record)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60 * KILLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tuner_killed_while_changes_fail_loses_nothing_and_recommends_the_same(tmp_path: Path, fault: str) -> None:
    rng = random.Random(SEED)
    before: dict[int, tuple[Any, ...]] = {}
    for _ in range(KILLS):
        process = begin(tmp_path, fault)
        process.join(2.0 + rng.uniform(0, MOST_S))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        before = check(tmp_path, before)
    process = begin(tmp_path, fault)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    check(tmp_path, before)
    check_end(tmp_path, fault)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S + 60 * KILLS)
@pytest.mark.parametrize("fault", ["works", *FAULTS])
def test_two_workers_of_which_one_is_killed_while_changes_fail_lose_nothing(tmp_path: Path, fault: str) -> None:
    rng = random.Random(SEED)
    study(tmp_path, space(SPACE, f"engine.args.change={fault}")).close()
    workers = [begin(tmp_path, fault, place) for place in PLACES]
    before: dict[int, tuple[Any, ...]] = {}
    for _ in range(KILLS):
        number = rng.randrange(2)
        workers[number].join(2.0 + rng.uniform(0, MOST_S))
        if workers[number].exitcode is None:
            os.kill(workers[number].pid, signal.SIGKILL)
        workers[number].join(30)
        before = check(tmp_path, before)
        workers[number] = begin(tmp_path, fault, PLACES[number])
    for process in workers:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in workers] == [0, 0]
    check(tmp_path, before)
    check_end(tmp_path, fault)
