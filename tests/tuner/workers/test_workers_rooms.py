"""Where workers fit on a cluster, when one is begun, and what becomes of one that ends: no cluster is needed for it."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.study.toy_study import SPACE as TOY
from tests.tuner.study.toy_study import space
from tuner.errors import EnvironmentBroken, StudyStopped, UsageError
from tuner.workers import drive
from tuner.workers.drive import Drive
from tuner.workers.ray_cluster import Ended, Happening, Lost, Placed, Said
from tuner.workers.rooms import Needs, Node, Room, gpus_of_launch, passed_on, require_room, rooms

BIG, SMALL = Node("n1", "big", 8, 64), Node("n2", "small", 2, 16)


def test_a_node_has_as_many_rooms_as_launches_fit_and_few_workers_spread_over_hosts() -> None:
    found = rooms([BIG, SMALL], Needs(gpus=2))
    assert [(room.host, room.number) for room in found] == [
        ("big", 0),
        ("small", 0),
        ("big", 1),
        ("big", 2),
        ("big", 3),
    ]
    assert {(room.host, room.cpus) for room in found} == {("big", 16), ("small", 16)}
    assert [room.host for room in rooms([BIG, SMALL], Needs(gpus=2, at_most=2))] == ["big", "small"]
    assert len(rooms([BIG], Needs(gpus=2, cpus=40))) == 1, "cores bound it too"


def test_without_gpus_a_worker_has_its_host_to_itself() -> None:
    found = rooms([BIG, SMALL, Node("n3", "small", 0, 4)], Needs())
    assert [(room.host, room.cpus, room.gpus) for room in found] == [("big", 64, 0), ("small", 16, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 64)), max_size=5),
    st.integers(0, 9),
    st.none() | st.integers(1, 70),
)
def test_no_node_is_given_more_than_it_has(sizes: list[tuple[int, int]], gpus: int, cpus: int | None) -> None:
    nodes = [Node(str(i), f"host{i}", *size) for i, size in enumerate(sizes)]
    found = rooms(nodes, Needs(gpus, cpus))
    assert len(set(found)) == len(found)
    for node in nodes:
        mine = [room for room in found if room.node == node.id]
        assert sum(room.gpus for room in mine) <= node.gpus
        assert sum(room.cpus for room in mine) <= max(node.cpus, len(mine))
        assert all(room.gpus == gpus for room in mine)


def test_too_little_for_one_launch_is_said_before_anything_is_started() -> None:
    with pytest.raises(EnvironmentBroken, match=r"no node .* has 16 GPUs.*big: 8 GPUs, 64 cores"):
        require_room([BIG], Needs(gpus=16))
    with pytest.raises(UsageError, match="--gpus -1"):
        Needs(gpus=-1)


def test_the_gpus_of_a_launch_are_the_largest_that_the_space_asks_for() -> None:
    assert gpus_of_launch(space()) == 0, "a command says nothing of GPUs"
    assert gpus_of_launch(space(TOY, "engine.devices=[2, 3]")) == 2


def test_only_what_workers_need_is_passed_on() -> None:
    here = {"PGPASSWORD": "pw", "PGPASSFILE": "/f", "PATH": "/bin", "MY_KEY": "k", "HF_TOKEN": "t", "HOME": "/root"}
    found = passed_on(["MY_KEY", "NOT_SET"], here, "sqlite:///x")
    assert found == {"PGPASSWORD": "pw", "MY_KEY": "k", "HF_TOKEN": "t", "TUNER_STORAGE": "sqlite:///x"}


class Script:
    """A cluster that does nothing but note what it is asked for; `then` says what happens after a start."""

    def __init__(self, nodes: list[Node], then: Any) -> None:
        self.happenings: queue.Queue[Happening] = queue.Queue()
        self.there, self.then = nodes, then
        self.started: list[tuple[Room, str]] = []
        self.stopped: list[Room] = []
        self.killed: list[Room] = []

    def nodes(self) -> list[Node]:
        return self.there

    def start(self, room: Room, task: Mapping[str, Any]) -> None:
        self.started.append((room, task["name"]))
        for happening in self.then(len(self.started), room):
            if isinstance(happening, BaseException):
                raise happening
            self.happenings.put(happening)

    def stop(self, room: Room) -> None:
        self.stopped.append(room)
        self.happenings.put(Ended(room, 143))

    def kill(self, room: Room) -> None:
        self.killed.append(room)


def driven(cluster: Script, state: Any, gpus: int = 1) -> tuple[Drive, list[str]]:
    told: list[str] = []
    done = Drive(
        cluster,
        Needs(gpus),
        first={"name": "first"},
        later={"name": "later"},
        state=state,
        said=lambda place, line: told.append(f"{place}: {line}"),
        tell=told.append,
    )
    return done, told


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "LOOK_EVERY_S", 0.0)


def test_the_first_worker_makes_the_study_and_the_others_join_it() -> None:
    states = ["", "new", "running", "running"]

    def then(number: int, room: Room) -> list[Happening]:
        return [Placed(room, (str(room.number),)), Said(room, "works")]

    cluster = Script([SMALL], then)
    drive_, told = driven(cluster, lambda: states.pop(0) if len(states) > 1 else states[0])
    drive_._fill()
    drive_._fill()
    assert [name for _, name in cluster.started] == ["first"], "the study is not there yet"
    drive_._fill()
    drive_._fill()
    assert [name for _, name in cluster.started] == ["first", "later"]
    for _ in range(4):
        drive_._next(0)
    assert "a worker begins at small/0" in told
    assert "small/1: works" in told


def test_a_worker_that_is_gone_is_begun_anew_and_not_for_ever() -> None:
    cluster = Script([Node("n", "one", 1, 1)], lambda number, room: [Placed(room, ("0",)), Lost(room, "node died")])
    found, told = driven(cluster, lambda: "running")
    with pytest.raises(EnvironmentBroken, match="no worker is left"):
        found.run()
    assert len(cluster.started) == drive.MOST_DEATHS
    assert "is gone (node died). What it has measured is kept" in told[1]


def test_a_node_that_comes_later_gets_a_worker_and_an_ended_study_none() -> None:
    cluster = Script([Node("n", "one", 1, 1)], lambda number, room: [Placed(room, ("0",))])
    found, _ = driven(cluster, lambda: "running")
    found._fill()
    cluster.there.append(Node("m", "two", 1, 1))
    found._fill()
    assert [room.host for room, _ in cluster.started] == ["one", "two"]
    found._over(Ended(cluster.started[0][0], 0))
    found._fill()
    assert len(cluster.started) == 2, "a worker that ended well has seen the study end"


def test_a_host_that_is_refused_is_left_out_and_the_others_go_on() -> None:
    def then(number: int, room: Room) -> list[Happening]:
        if room.host == "odd":
            return [Placed(room, ("0",)), Said(room, "hardware, cpu: was a, is now b"), Ended(room, 2)]
        return [Placed(room, ("0",)), *([] if number == 1 else [Ended(room, 0)])]

    cluster = Script([Node("n", "good", 1, 1), Node("m", "odd", 1, 1)], then)
    found, told = driven(cluster, lambda: "running")
    found._fill()
    while cluster.happenings.qsize():
        found._next(0)
    found._fill()
    assert [room.host for room, _ in cluster.started] == ["good", "odd"]
    assert any("odd/0 has ended with 2: nothing more is started there" in line for line in told)


@pytest.mark.parametrize(("status", "kind"), [(2, UsageError), (3, EnvironmentBroken), (1, StudyStopped)])
def test_what_the_workers_said_last_is_why_the_study_did_not_end(status: int, kind: type[Exception]) -> None:
    cluster = Script(
        [Node("n", "one", 1, 1)],
        lambda number, room: [Placed(room, ("0",)), Said(room, "because of this"), Ended(room, status)],
    )
    found, _ = driven(cluster, lambda: "")
    with pytest.raises(kind, match="because of this"):
        found.run()
    assert len(cluster.started) == 1


def test_an_interruption_ends_workers_in_order_and_withdraws_those_that_wait() -> None:
    cluster = Script([BIG], lambda number, room: [Placed(room, ("0",))] if number == 1 else [])
    found, told = driven(cluster, lambda: "running")
    found._fill()
    found._next(0)

    def interrupted(_timeout: float) -> None:
        raise KeyboardInterrupt

    found._next = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert [room.number for room in cluster.stopped] == [0]
    assert [room.number for room in cluster.killed] == list(range(1, 8))
    assert "stopping 1 worker and their servers" in told
