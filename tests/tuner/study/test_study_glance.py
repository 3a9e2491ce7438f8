"""`status` reads what it shows by counting in the database: the figures are those of all records, at any size."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import sqlalchemy as sa

from benchmarks import many_candidates
from tests.tuner.study.hot_toy import SPACE as HOT
from tests.tuner.study.hot_toy import HotEngine, HotMachine
from tests.tuner.study.test_study_workers import fleet
from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.records import Failure
from tuner.space import parse_space
from tuner.study import tables as t
from tuner.study.ahead import Scope
from tuner.study.glance import Glance, glance
from tuner.study.places import shares
from tuner.study.planner import budget_since
from tuner.study.policy import Policy
from tuner.study.store import StudyStore, open_study
from tuner.study.summary import scope, summary


def looked(store: StudyStore) -> Glance:
    with store.engine.connect() as connection:
        return glance(connection, store.name, store.trials.outline(), working=False)


def same(store: StudyStore) -> None:
    """A glance says what all records say."""
    fresh = open_study(store.name, str(store.engine.url))
    data = fresh.data()
    found, told = looked(fresh), summary(data, working=False)
    for name in type(told).__dataclass_fields__:
        here, there = getattr(found.summary, name), getattr(told, name)
        assert here == (pytest.approx(there) if isinstance(there, float) else there), name
    work = [(p.name, p.launches, p.blocks, p.pairs, p.failures, p.now) for p in found.places]
    assert work == [(p.name, p.launches, p.blocks, p.pairs, p.failures, p.now) for p in shares(data)]
    assert [p.last_at for p in found.places] == pytest.approx([p.last_at for p in shares(data)])
    fresh.close()


def crash(phase: str, settings: Any, count: int) -> Failure | None:
    if phase == "start" and settings.get("steps") == 3:
        return Failure("startup_crash", "start", "it ended")
    return None


def test_of_a_study_with_crashes_and_a_confirmation(tmp_path: Path) -> None:
    store = study(tmp_path)
    same(store)
    controller(store, ToyMachine(fails=crash)).run()
    same(store)


class Killed(Exception):
    pass


def killed(store: StudyStore, machine: ToyMachine, checks: int = 9, **given: Any) -> StudyStore:
    """The study, ended so many checks after its begin."""
    left = iter(range(checks))

    def die() -> None:
        if next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        controller(store, machine, check=die, **given).run()
    return store


def test_of_a_study_that_was_killed_within_a_launch(tmp_path: Path) -> None:
    same(killed(study(tmp_path), ToyMachine()))


@pytest.mark.parametrize("look", [0.0, 1 / 3])
def test_of_studies_that_were_killed_while_servers_stayed_up(tmp_path: Path, look: float) -> None:
    for checks in (9, 20, 40):
        folder = tmp_path / str(checks)
        folder.mkdir()
        store = study(folder, space(HOT, "budget.hours=2"))
        same(killed(store, HotMachine(), checks, engine=HotEngine(), policy=Policy(pairs=4, look=look)))


def test_a_slow_first_start_is_not_what_is_expected_of_all_that_follow(tmp_path: Path) -> None:
    """Some twelve launches of 20 s are left at most; one start of 300 s does not make them longer."""
    store = killed(study(tmp_path), ToyMachine(first_start_s=300.0), 20)
    same(store)
    left_s = looked(store).summary.left_s
    assert left_s is not None
    assert 0 < left_s < 300


def test_time_is_left_only_for_candidates_that_there_are(tmp_path: Path) -> None:
    three = ("parameters.disable_batch_threshold.choices=[never]", "parameters.num_steps.high=3", "rules=[]")
    left = []
    for more in ((), ("budget.candidates=3",)):
        folder = tmp_path / str(len(more))
        folder.mkdir()
        store = killed(study(folder, space(SPACE, "budget.launches=24", *three, *more)), ToyMachine())
        left.append(looked(store).summary.left_s)
    assert left[0]
    assert left[0] == left[1]


def test_a_larger_budget_is_searched_behind_an_open_round(tmp_path: Path) -> None:
    store = study(tmp_path, space(SPACE, "budget.launches=24", "budget.candidates=3"))

    def die() -> None:
        if store.data().confirmations:
            raise Killed

    with pytest.raises(Killed):
        controller(store, ToyMachine(), check=die).run()
    same(store)
    round_s = looked(store).summary.left_s
    store.set_budget(replace(store.data().budget, launches=60, candidates=6), "more")
    same(store)
    with_search_s = looked(store).summary.left_s
    controller(store, ToyMachine()).run()
    assert len(store.data().measured) == 6
    assert round_s
    assert with_search_s
    assert with_search_s > 1.5 * round_s


def test_what_a_study_decides_by_does_not_hang_on_the_wording_of_its_events(tmp_path: Path) -> None:
    store = killed(study(tmp_path), ToyMachine(), 20)
    store.set_budget(replace(store.data().budget, launches=20), "more")
    with store.engine.begin() as connection:
        connection.execute(sa.update(t.events).values(message="in other words"))
    data = study(tmp_path).data()
    assert scope(data).candidates == 7
    assert budget_since(data) == len(data.trials)
    same(store)


def test_a_study_from_before_events_had_facts_is_read_and_gets_them_with_its_next_run(tmp_path: Path) -> None:
    old = killed(study(tmp_path), ToyMachine(), 20)
    with old.engine.begin() as connection:
        t.event_facts.drop(connection)
    store = study(tmp_path)
    assert scope(store.data()) == Scope()
    same(store)
    controller(store, ToyMachine()).run()
    assert scope(store.data()).candidates == 7


def test_of_a_study_that_races_on_servers_that_stay_up(tmp_path: Path) -> None:
    store = study(tmp_path, space(HOT))
    controller(store, HotMachine(), engine=HotEngine(), policy=Policy(pairs=4, look=1 / 3)).run()
    assert looked(store).summary.looks
    same(store)


def test_of_a_study_of_several_workers(tmp_path: Path) -> None:
    run = fleet(tmp_path, [1.0, 0.8], 24)
    assert run.data.confirmations
    assert len(shares(run.data)) == 2
    store = open_study("fleet", f"sqlite:///{tmp_path / 'study.db'}")
    same(store)
    store.close()


def many(folder: Path, count: int) -> str:
    url = f"sqlite:///{folder / f'{count}.db'}"
    many_candidates.made(url, count, parse_space(many_candidates.SPACE, source="many.yaml")).close()
    return url


def test_no_more_statements_for_more_candidates(tmp_path: Path) -> None:
    counts: list[tuple[int, int, int]] = []
    for size in (20, 600):
        store = open_study(many_candidates.NAME, many(tmp_path, size))
        said: list[str] = []
        sa.event.listen(store.engine, "before_cursor_execute", lambda *a, said=said: said.append(a[2]))
        looked(store)
        glanced = len(said)
        store.data()
        whole = len(said) - glanced
        first = store.data()
        assert store.data() is first, "what has not changed is the same object"
        counts.append((glanced, whole, len(said)))
        store.close()
    assert counts[0] == counts[1]
    assert counts[0][0] < 40


LIGHT = """
import json, runpy, sys
sys.argv = ["tuner", "status", "many", "--storage", sys.argv[1]]
try:
    runpy.run_module("tuner", run_name="__main__")
except SystemExit:
    pass
print(json.dumps([name for name in ("optuna", "torch", "pandas", "plotly", "numpy", "scipy") if name in sys.modules]))
"""


def test_status_loads_no_library_of_figures(tmp_path: Path) -> None:
    url = many(tmp_path, 20)
    done = run([sys.executable, "-c", LIGHT, url], capture_output=True, text=True, check=True, env=_env())
    assert json.loads(done.stdout.splitlines()[-1]) == []


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.timing
def test_five_thousand_candidates_are_read_in_a_moment(tmp_path: Path) -> None:
    """`benchmarks/results/many_candidates.json` has the figures; this is far above them, for machines at work."""
    url = many(tmp_path, 5000)
    spent = _cpu_s([sys.executable, "-m", "tuner", "status", many_candidates.NAME, "--storage", url])
    assert spent < 2.0
    began = time.process_time()
    many_candidates.resumed(url, tmp_path)
    assert time.process_time() - began < 12.0


def _cpu_s(command: list[str]) -> float:
    before = os.times()
    run(command, check=True, capture_output=True, env=_env())
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
