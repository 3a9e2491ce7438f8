"""CUDA graphs are captured whole or not at all, and what failed is said: the capture itself is played here."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.build import build
from engine.config import EngineConfig
from engine.errors import InvalidConfig
from engine.graphs import Bucket, GraphCaptureError, GraphSet, buckets


class Played:
    """Replays count; captures fail where they are told to, and memory shrinks with each."""

    def __init__(self, fail_at: tuple[str, int] | None = None, in_warm_up: bool = False) -> None:
        self.fail_at, self.in_warm_up = fail_at, in_warm_up
        self.done: list[tuple[str, str, int]] = []
        self.held = 0

    def warm_up(self, phase: str, bucket: Bucket) -> None:
        self.done.append(("warm", phase, bucket.requests))
        if (phase, bucket.requests) == self.fail_at and self.in_warm_up:
            raise MemoryError("out of memory")

    def capture(self, phase: str, bucket: Bucket) -> Played:
        self.done.append(("capture", phase, bucket.requests))
        if (phase, bucket.requests) == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.held += 1
        return self

    def replay(self) -> None: ...

    def discard(self) -> None:
        self.held = 0

    def free_bytes(self) -> int:
        return (100 - self.held) * 2**20


WANTED = {"verify": [Bucket(n) for n in (1, 2, 4, 8)], "extend": [Bucket(1), Bucket(8)]}


def test_each_shape_runs_eagerly_before_it_is_captured_and_large_ones_come_first() -> None:
    played = Played()
    GraphSet("required", played).capture(WANTED)
    assert played.done[:4] == [(what, "verify", n) for n in (8, 4) for what in ("warm", "capture")]
    assert len(played.done) == 2 * 6


def test_a_batch_takes_the_smallest_graph_that_holds_it_and_larger_ones_are_counted_as_misses() -> None:
    graphs = GraphSet("required", Played())
    graphs.capture(WANTED)
    assert [graphs.size(n) for n in (1, 3, 8, 9)] == [1, 4, 8, None]
    assert graphs.size(1, "another kind") is None
    assert graphs.find("verify", Bucket(4)) is not None
    assert graphs.find("extend", Bucket(8)) is not None
    assert graphs.find("verify", Bucket(9)) is None
    assert graphs.find("draft", Bucket(1)) is None
    assert (graphs.hits, dict(graphs.misses)) == (2, {"verify": 1, "draft": 1})
    assert graphs.paths()["graphs.verify"] == {"state": "active", "detail": "4 graphs for up to 8 requests"}


@pytest.mark.parametrize("in_warm_up", [True, False])
def test_required_refuses_to_come_up_with_phase_bucket_stage_memory_and_cause(in_warm_up: bool) -> None:
    played = Played(("verify", 2), in_warm_up)
    graphs = GraphSet("required", played)
    with pytest.raises(GraphCaptureError, match="verify for 2 requests") as caught:
        graphs.capture(WANTED)
    error = caught.value
    assert (error.phase, error.bucket.requests, error.stage) == ("verify", 2, "warm-up" if in_warm_up else "capture")
    assert (error.free_before, error.free_now) == (100 * 2**20, 98 * 2**20)
    assert isinstance(error.__cause__, MemoryError if in_warm_up else RuntimeError)
    assert "--cuda-graphs off" in str(error)
    assert played.held == 0
    assert graphs.find("verify", Bucket(8)) is None, "no half a set is ever put to use"


def test_preferred_falls_back_to_none_at_all_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    played = Played(("extend", 1))
    graphs = GraphSet("preferred", played)
    graphs.capture(WANTED)
    assert played.held == 0
    assert graphs.find("verify", Bucket(8)) is None
    for phase in WANTED:
        told = graphs.paths()[f"graphs.{phase}"]
        assert told["state"] == "fell_back"
        assert "extend for 1 requests" in told["detail"]
        assert "not permitted when stream is capturing" in told["detail"]
    assert "without CUDA graphs" in caplog.text


def test_off_touches_nothing() -> None:
    played = Played()
    graphs = GraphSet("off", played)
    graphs.capture(WANTED)
    assert not played.done
    assert graphs.paths()["graphs.verify"] == {"state": "off", "detail": "asked for"}


def test_without_a_device_required_is_refused_and_preferred_says_why_there_are_none() -> None:
    with pytest.raises(GraphCaptureError, match="the model is on the CPU"):
        GraphSet("required", None).capture(WANTED)
    graphs = GraphSet("preferred", None)
    graphs.capture(WANTED)
    assert graphs.paths()["graphs.draft"]["state"] == "off"
    assert "CPU" in graphs.paths()["graphs.draft"]["detail"]


def test_required_is_refused_where_there_is_nothing_to_capture() -> None:
    with pytest.raises(GraphCaptureError, match="no round with this drafter stays on the device"):
        GraphSet("required", Played()).capture({})
    graphs = GraphSet("preferred", Played())
    graphs.capture({})
    assert graphs.paths()["graphs.verify"]["state"] == "off"


@pytest.mark.parametrize("policy", ["required", "preferred"])
def test_one_rank_that_fails_stops_all_of_them_at_the_same_bucket(policy: str) -> None:
    barrier = threading.Barrier(3, timeout=10)
    said: list[str] = [""] * 3
    outcomes: list[object] = [None] * 3

    def rank(number: int) -> None:
        def agree(problem: str) -> list[str]:
            said[number] = problem
            barrier.wait()
            everywhere = list(said)
            barrier.wait()
            return everywhere

        played = Played(("verify", 2) if number == 1 else None)
        graphs = GraphSet(policy, played, agree)
        try:
            graphs.capture(WANTED)
            outcomes[number] = (graphs.paths()["graphs.verify"]["state"], played.done[-1])
        except GraphCaptureError as error:
            outcomes[number] = (str(error), played.done[-1])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, outcome in enumerate(outcomes):
        told, last = outcome  # type: ignore[misc]
        assert last == ("capture", "verify", 2)
        assert told == "fell_back" if policy == "preferred" else ("on rank 1" in told) == (number != 1)


def test_close_may_come_at_any_time_and_twice() -> None:
    graphs = GraphSet("required", Played())
    graphs.close()
    graphs.capture(WANTED)
    graphs.close()
    graphs.close()
    assert graphs.find("verify", Bucket(1)) is None


@given(st.integers(1, 4096))
def test_buckets_rise_to_the_most_there_can_be(most: int) -> None:
    sizes = buckets(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(later <= max(earlier + 1, 1.34 * earlier) for earlier, later in itertools.pairwise(sizes))


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(tiny_model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidConfig, match="device: 'cuda' cannot be used: torch sees no NVIDIA GPU"):
        build(EngineConfig(str(tiny_model), device="cuda"))
