"""Several workers on one study: nothing is measured twice, pairs stay within a place, a lost worker loses nothing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import sqlalchemy as sa

from tests.tuner.study.toy_study import SPACE as TOY
from tests.tuner.study.toy_study import ToyMachine, controller, space, study
from tuner.errors import EnvironmentBroken, UsageError
from tuner.export.choose import choose
from tuner.records import Candidate, Failure
from tuner.space import Space
from tuner.study.data import Budget, StudyData
from tuner.study.decide import recommendation
from tuner.study.lease import acquire, working
from tuner.study.place import Place, hostname
from tuner.study.places import shares
from tuner.study.session import read_space
from tuner.study.simulated_fleet import FleetRun, run_fleet
from tuner.study.store import create_study, open_study
from tuner.study.tables import workers

ENV = "environment"
SPACES = Path(__file__).parents[3] / "search_spaces"
LAUNCHES = 64


def simulated(folder: Path, launches: int = LAUNCHES, *overrides: str) -> tuple[str, Space]:
    the_space = read_space(
        str(SPACES / "pcie_blackwell.yaml"),
        ("engine.kind=simulated", "simulation.clock=virtual", "budget.candidates=200", *overrides),
    )
    url = f"sqlite:///{folder / 'study.db'}"
    create_study(
        "fleet",
        space=the_space,
        space_text="",
        fingerprint={},
        seed=3,
        budget=Budget(launches, 200, None),
        storage=url,
    ).close()
    return url, the_space


def fleet(folder: Path, speeds: list[float], launches: int = LAUNCHES, *overrides: str) -> FleetRun:
    folder.mkdir(exist_ok=True)
    url, _ = simulated(folder, launches, *overrides)
    return run_fleet(lambda: open_study("fleet", url), folder, speeds)


def places(data: StudyData) -> dict[int, str]:
    return {launch.id: launch.place for launch in data.launches}


def kind_of(winner: Candidate | None) -> dict[str, object]:
    assert winner is not None
    return {name: winner.settings.get(name) for name in ("speculation", "topk", "spec_version", "allreduce")}


def check_one_place_each(data: StudyData) -> None:
    """All blocks of a slot, of a pair, and of what a candidate is compared with are of one place."""
    at = places(data)
    seen = Counter((b.candidate_id, b.concurrency, b.role, b.repetition) for b in data.blocks.values())
    assert set(seen.values()) == {1}, "nothing was measured twice"
    for slot, blocks in data.by_slot.items():
        assert len({at[block.launch_id] for block in blocks}) == 1, slot
    for pair in data.pairs:
        baseline, candidate = data.blocks[pair.baseline_block], data.blocks[pair.candidate_block]
        assert at[baseline.launch_id] == at[candidate.launch_id]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_workers_take_at_most_three_tenths_of_the_time_and_decide_the_same(tmp_path: Path) -> None:
    alone = fleet(tmp_path / "one", [1.0])
    four = fleet(tmp_path / "four", [1.0, 0.9, 1.1, 1.0])
    assert four.makespan_s <= 0.3 * alone.makespan_s, four.makespan_s / alone.makespan_s
    assert len([x for x in four.data.launches if x.state == "done"]) <= LAUNCHES
    check_one_place_each(four.data)
    assert set(places(four.data).values()) == {"host1", "host2", "host3", "host4"}
    one, other = recommendation(alone.data).overall, recommendation(four.data).overall
    assert kind_of(one.winner) == kind_of(other.winner)
    # Which of several that are equally good is found hangs on the order of the search.
    assert one.verdict.low <= other.verdict.speedup <= one.verdict.high
    assert other.verdict.low <= one.verdict.speedup <= other.verdict.high
    print(f"makespan of four workers / of one: {four.makespan_s / alone.makespan_s:.3f}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hosts_of_different_speed_share_a_short_study(tmp_path: Path) -> None:
    found = fleet(tmp_path / "three", [1.0, 0.7, 1.3], 16, "profile=short", "parameters.allreduce.choices=[custom]")
    assert found.data.state == "done"
    check_one_place_each(found.data)
    assert len({launch.place for launch in found.data.launches}) == 3
    assert sum(launch.state == "done" for launch in found.data.launches) <= 16
    winner = recommendation(found.data).overall
    assert winner.verdict is not None
    assert winner.verdict.speedup is not None
    baselines = {b.block.tokens_per_s for b in found.data.blocks.values() if b.candidate_id == found.data.baseline.id}
    assert max(baselines) > 1.5 * min(baselines), "hosts differ far more than candidates do, and it does not show"


A, B = Place("a"), Place("b")


class Ended(Exception):
    """What a killed worker leaves behind, without the end of the process."""


def ends_at(store, number: int):
    """A world whose process is gone right before block `number` is measured."""
    world = ToyMachine()
    measure = world.measure

    def until(*args, **kwargs):
        if len(store.data().blocks) == number:
            raise Ended
        return measure(*args, **kwargs)

    world.measure = until  # type: ignore[method-assign]
    return world


def worker(store, place: Place, others: frozenset[str] = frozenset(), world=None, **more):
    machine = world or ToyMachine()
    return controller(store, machine, place=place, others=lambda: others, **more)


def abandoned_by_a(tmp_path: Path, blocks: int, launches: int = 14):
    """A study that the worker at A has left without a word after so many blocks."""
    store = study(tmp_path, space(TOY.replace("launches: 14", f"launches: {launches}")))
    one = worker(store, A, world=ends_at(store, blocks))
    end = one._end

    def unless_killed(*args, interrupted: bool = False, **more):
        if not interrupted:
            end(*args, **more)

    one._end = unless_killed  # type: ignore[method-assign]
    with pytest.raises(Ended):
        one.run()
    return store


@pytest.mark.parametrize("blocks", range(1, 18, 2))
def test_a_worker_that_dies_anywhere_is_taken_over_elsewhere_and_nothing_is_lost(tmp_path: Path, blocks: int) -> None:
    store = abandoned_by_a(tmp_path, blocks)
    before = store.data()
    data = worker(store, B).run()
    assert data.state == "done"
    check_one_place_each(data)
    assert before.blocks.items() <= data.blocks.items(), "nothing is lost"
    assert all(launch.ended_at is not None for launch in data.launches)
    assert not any(trial.running for trial in data.trials)
    assert recommendation(data).overall.winner is not None
    done = {p.index for p in data.pairs if p.role == "confirm"}
    assert len(done) >= 4, "a pair that was left half done is made up for"


def test_what_another_worker_is_at_is_left_to_it(tmp_path: Path) -> None:
    store = abandoned_by_a(tmp_path, 3)
    before = store.data()
    running = next(trial for trial in before.trials if trial.running)
    waited: list[float] = []

    class Enough(Exception):
        pass

    def pause(seconds: float) -> None:
        waited.append(seconds)
        raise Enough

    two = worker(store, B, frozenset({"a"}), pause=pause)
    with pytest.raises(Enough):
        two.run()
    data = store.data()
    assert data.trials[running.number].place == "a"
    assert data.trials[running.number].running, "nobody took it over"
    assert not data.confirmations, "the finalists are not chosen before the last candidate is measured"
    mine = [launch for launch in data.launches if launch.place == "b"]
    assert mine[0].slot.candidate_id == data.baseline.id, "its own baseline came first"
    assert {launch.slot.candidate_id for launch in mine}.isdisjoint({running.candidate_id})
    assert [launch.state for launch in data.launches if launch.place == "a"][-1] == "running"


def test_a_worker_that_comes_back_goes_on_with_its_own(tmp_path: Path) -> None:
    store = abandoned_by_a(tmp_path, 3)
    data = worker(store, A).run()
    assert {launch.place for launch in data.launches} == {"a"}
    assert not any(trial.repetition for trial in data.trials)


def test_a_broken_machine_stops_its_worker_and_not_the_study(tmp_path: Path) -> None:
    store = abandoned_by_a(tmp_path, 6, launches=24)
    broken = ToyMachine(fails=lambda phase, settings, count: Failure("port_conflict", "ready", "taken", blame=ENV))
    store.set_state("running")
    with pytest.raises(EnvironmentBroken):
        worker(store, B, frozenset({"a"}), world=broken).run()
    assert store.data().state == "running"
    data = worker(store, A).run()
    assert data.state == "done"
    check_one_place_each(data)


def test_two_workers_on_one_host_need_devices_of_their_own(tmp_path: Path) -> None:
    store = study(tmp_path)
    host = hostname()
    first = acquire(store.engine, "toy", place=Place(host, ("0", "1")))
    for place in (Place(host), Place(host, ("1", "2")), Place(host, ("0", "1"))):
        with pytest.raises(UsageError, match="--devices 0,1"):
            acquire(store.engine, "toy", place=place)
    second = acquire(store.engine, "toy", place=Place(host, ("2", "3")))
    assert first.others() == {f"{host}/2,3"}
    assert second.others() == {f"{host}/0,1"}
    assert len(first.sibling_pids()) == 1
    first.release()
    assert [each.place.devices for each in working(store.engine, "toy")] == [("2", "3")]


def test_a_file_is_not_shared_between_hosts(tmp_path: Path) -> None:
    store = study(tmp_path)
    acquire(store.engine, "toy", place=Place("elsewhere"))
    with store.engine.begin() as connection:
        connection.execute(sa.update(workers).values(host="elsewhere"))
    with pytest.raises(UsageError, match="SQLite cannot be shared between hosts"):
        acquire(store.engine, "toy")


def test_devices_are_part_of_a_launch_and_not_of_the_study(tmp_path: Path) -> None:
    the_space = space()
    with_devices = space(TOY, "engine.devices=[2, 3]")
    assert with_devices.fingerprint == the_space.fingerprint
    assert with_devices.devices == ("2", "3")
    data = worker(study(tmp_path), Place("a", ("2", "3"))).run()
    assert {launch.record.env["CUDA_VISIBLE_DEVICES"] for launch in data.launches if launch.record} == {"2,3"}
    assert {launch.place for launch in data.launches} == {"a/2,3"}
    both = TOY.replace("model: toy}", "model: toy, env: {CUDA_VISIBLE_DEVICES: '1'}, devices: [0]}")
    with pytest.raises(UsageError, match="must not be set otherwise"):
        space(both)
    for bad in ("[0, 0]", "[]", "[a b]", "'3-1'", "true"):
        with pytest.raises(UsageError, match="devices"):
            space(TOY, f"engine.devices={bad}")


def measured_by_two(tmp_path: Path, *, gain_at_b: float, speed_at_b: float = 1.0):
    """A study that A and B have measured, one after the other; at B the server gains otherwise, and is slower."""
    store = abandoned_by_a(tmp_path, 26, launches=20)
    other, baseline = ToyMachine(), dict(store.data().baseline.settings)
    measure = other.measure

    def differently(server, record, **more):
        outcome = measure(server, record, **more)
        block = outcome.block
        if block is None:
            return outcome
        factor = speed_at_b * (1.0 if dict(record.settings) == baseline else gain_at_b)
        return replace(outcome, block=replace(block, tokens_per_s=block.tokens_per_s * factor))

    other.measure = differently  # type: ignore[method-assign]
    return worker(store, B, world=other).run()


def test_who_measured_what_is_told_place_by_place(tmp_path: Path) -> None:
    from tuner.report.content import report
    from tuner.report.html import html
    from tuner.report.markdown import markdown
    from tuner.report.view import study_view

    data = measured_by_two(tmp_path, gain_at_b=1.0)
    found = {share.name: share for share in shares(data)}
    assert set(found) == {"a", "b"}
    assert sum(share.blocks for share in found.values()) == len(data.blocks)
    assert sum(share.launches for share in found.values()) == len(data.launches)
    assert sum(share.pairs for share in found.values()) == sum(pair.role == "confirm" for pair in data.pairs)
    assert all(share.baseline for share in found.values()), "each place has a baseline of its own"
    document = report(study_view(data))
    for text in (markdown(document), html(document)):
        assert "Where it was measured" in text
        assert "cannot be held against one another" in text
    said = markdown(document)
    assert "| `a` |" in said
    together = f"| **together** | {len(data.launches)} | – | {sum(b.block.valid for b in data.blocks.values())} |"
    assert together in said
    assert f"Launches: {len(data.launches)} begun (" in said


def test_absolute_figures_of_two_places_are_never_pooled(tmp_path: Path) -> None:
    """B serves everything at half A's speed: the gain is the same, no alarm is raised, an export has one place's."""
    data = measured_by_two(tmp_path, gain_at_b=1.0, speed_at_b=0.5)
    found = recommendation(data)
    alone = recommendation(measured_by_two(fresh(tmp_path), gain_at_b=1.0))
    assert found.overall.winner is not None
    assert found.overall.winner == alone.overall.winner
    assert found.overall.verdict.speedup == pytest.approx(alone.overall.verdict.speedup, rel=0.01)
    assert not [note for note in found.advice if "not quiet" in note or "Places differ" in note]
    at = places(data)
    for pair in data.pairs:
        ends = {at[data.blocks[block].launch_id] for block in (pair.baseline_block, pair.candidate_block)}
        assert len(ends) == 1, "each place has its own baseline"
    chosen = choose(data)
    assert "the figures are those of b" in chosen.note
    for level, figure in zip(chosen.reference.levels, chosen.provenance.figures, strict=True):
        mine, base = (
            [
                b.block.tokens_per_s
                for b in data.blocks.values()
                if (b.candidate_id, b.role, b.concurrency) == (whose, "confirm", level.concurrency)
                and at[b.launch_id] == "b"
            ]
            for whose in (found.overall.winner.id, data.baseline.id)
        )
        assert level.tokens_per_s == tuple(mine)
        assert figure.tokens_per_s == pytest.approx(fmean(mine))
        assert figure.baseline_tokens_per_s == pytest.approx(fmean(base))


def fresh(folder: Path) -> Path:
    made = folder / "fresh"
    made.mkdir()
    return made


def test_a_gain_that_hangs_on_the_place_is_said_in_the_recommendation(tmp_path: Path) -> None:
    (tmp_path / "alike").mkdir()
    (tmp_path / "unlike").mkdir()
    alike = recommendation(measured_by_two(tmp_path / "alike", gain_at_b=1.0))
    unlike = recommendation(measured_by_two(tmp_path / "unlike", gain_at_b=0.8))
    assert not any("Places differ" in note for note in alike.advice)
    notes = [note for note in unlike.advice if "Places differ" in note]
    assert notes
    assert " at a, " in notes[0]
    assert " at b" in notes[0]
    assert re.search(r"a beside b: \+\d+\.\d % \(95 % interval \+\d+\.\d % to \+\d+\.\d %\)", notes[0])


@pytest.mark.parametrize(("dead", "ended"), [(Place("a", ("0",)), True), (Place("b"), False)])
def test_the_server_of_a_dead_worker_is_ended_by_another_on_its_host(tmp_path: Path, dead: Place, ended: bool) -> None:
    store = study(tmp_path, space(TOY))
    gone = worker(store, dead, world=ends_at(store, 1))
    gone._end = lambda *_args, **_more: None  # type: ignore[method-assign]
    with pytest.raises(Ended):
        gone.run()
    (open_,) = [launch for launch in store.data().launches if launch.ended_at is None]
    machine = ToyMachine()
    one = worker(store, Place("a", ("1",)), world=machine, siblings=lambda: True)
    one._tidied(store.data())
    assert ({"study": store.data().uid, "launch": str(open_.id)} in machine.reaped) == ended
    assert store.data().launch[open_.id].ended_at is not None
