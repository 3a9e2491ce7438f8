"""CUDA graphs are captured whole or not at all, and what failed is said: the capture itself is played here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig
from engine.cuda import Work
from engine.errors import InvalidConfig
from engine.graphs import GraphCaptureError, GraphSet, buckets
from tests.engine.conftest import generate


class Played:
    """Replays count; captures fail where they are told to, and memory shrinks with each."""

    def __init__(self, fail_at: tuple[str, int] | None = None, in_warm_up: bool = False) -> None:
        self.fail_at, self.in_warm_up = fail_at, in_warm_up
        self.done: list[tuple[str, str, int]] = []
        self.held = 0

    def warm_up(self, phase: str, bucket: int) -> None:
        self.done.append(("warm", phase, bucket))
        if (phase, bucket) == self.fail_at and self.in_warm_up:
            raise MemoryError("out of memory")

    def capture(self, phase: str, bucket: int) -> Played:
        self.done.append(("capture", phase, bucket))
        if (phase, bucket) == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.held += 1
        return self

    def replay(self) -> None: ...

    def discard(self) -> None:
        self.held = 0

    def free_bytes(self) -> int:
        return (100 - self.held) * 2**20


WANTED = {"verify": [1, 2, 4, 8], "extend": [1, 8]}


def test_each_shape_runs_eagerly_before_it_is_captured_and_large_ones_come_first() -> None:
    played = Played()
    GraphSet("required", played).capture(WANTED)
    assert played.done[:4] == [(what, "verify", n) for n in (8, 4) for what in ("warm", "capture")]
    assert len(played.done) == 2 * 6


def test_a_batch_takes_the_smallest_graph_that_holds_it_and_larger_ones_are_counted_as_misses() -> None:
    graphs = GraphSet("required", Played())
    graphs.capture(WANTED)
    sizes = [graphs.find("verify", n) for n in (1, 3, 8)]
    assert [found[1] for found in sizes if found] == [1, 4, 8]
    assert graphs.find("verify", 9) is None
    assert graphs.find("draft", 1) is None
    assert (graphs.hits, dict(graphs.misses)) == (3, {"verify": 1, "draft": 1})
    assert graphs.paths()["graphs.verify"] == {"state": "active", "detail": "4 batch sizes up to 8"}


@pytest.mark.parametrize("in_warm_up", [True, False])
def test_required_refuses_to_come_up_with_phase_bucket_stage_memory_and_cause(in_warm_up: bool) -> None:
    played = Played(("verify", 2), in_warm_up)
    graphs = GraphSet("required", played)
    with pytest.raises(GraphCaptureError, match="verify for 2 requests") as caught:
        graphs.capture(WANTED)
    error = caught.value
    assert (error.phase, error.bucket, error.stage) == ("verify", 2, "warm-up" if in_warm_up else "capture")
    assert (error.free_before, error.free_now) == (100 * 2**20, 98 * 2**20)
    assert isinstance(error.__cause__, MemoryError if in_warm_up else RuntimeError)
    assert "--cuda-graphs off" in str(error)
    assert played.held == 0
    assert graphs.find("verify", 8) is None, "no half a set is ever put to use"


def test_preferred_falls_back_to_none_at_all_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    played = Played(("extend", 1))
    graphs = GraphSet("preferred", played)
    graphs.capture(WANTED)
    assert played.held == 0
    assert graphs.find("verify", 8) is None
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
    assert graphs.find("verify", 1) is None


@given(st.integers(1, 4096))
def test_buckets_rise_to_the_most_there_can_be(most: int) -> None:
    sizes = buckets(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(later <= max(earlier + 1, 1.34 * earlier) for earlier, later in itertools.pairwise(sizes))


class Eager(Played):
    """Captures on the CPU what a GPU would: a call that reads and writes the same memory each time."""

    def __init__(self, work: Work, fail_at: tuple[str, int] | None = None) -> None:
        super().__init__(fail_at)
        self._work = work

    def warm_up(self, phase: str, bucket: int) -> None:
        super().warm_up(phase, bucket)
        self._work(phase, bucket)()

    def capture(self, phase: str, bucket: int) -> Eager:
        super().capture(phase, bucket)
        made = Eager(self._work)
        made.replay = self._work(phase, bucket)  # type: ignore[method-assign]
        return made


PROMPTS = [[1, 2, 3], [9, 8], [4], [5, 6, 7, 8], [3]]


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle3", "tree"])
def test_a_batch_filled_up_with_nobody_comes_out_as_without_graphs(
    make_core: Callable[..., Core], tiny_model: Path, head_file: Path, drafter: str
) -> None:
    name, steps, topk, rows = {
        "none": ("none", 0, 1, 1),
        "ngram": ("ngram", 2, 1, 3),
        "eagle3": ("eagle3", 2, 1, 3),
        "tree": ("eagle3", 2, 2, 5),
    }[drafter]
    spec = SpecConfig(name, steps, topk, rows, draft_head=str(head_file))
    wanted = generate(make_core(), PROMPTS, max_tokens=12)
    config = EngineConfig(str(tiny_model), dtype="float32", page_size=4, threads=1, max_running_requests=5, spec=spec)
    core = build(config, capturer=Eager)
    assert generate(core, PROMPTS, max_tokens=12) == wanted
    assert core.graphs.hits > 3
    assert core.info()["paths"]["graphs.verify"]["state"] == "active"
    assert core.effective()["cuda_graphs"] == "preferred"
    assert core.counters()['engine_graphs_active{phase="verify"}'] == 1
    assert core.counters()["engine_graph_replays_total"] == core.graphs.hits


def test_a_server_whose_capture_fails_at_a_bucket_says_what_it_fell_back_to(tiny_model: Path) -> None:
    config = EngineConfig(str(tiny_model), dtype="float32", page_size=4, threads=1, max_running_requests=4)
    core = build(config, capturer=lambda work: Eager(work, ("verify", 2)))
    assert len(generate(core, PROMPTS, max_tokens=5)) == len(PROMPTS)
    told = core.info()["paths"]["graphs.verify"]
    assert told["state"] == "fell_back"
    assert "verify for 2 requests" in told["detail"]
    assert core.counters()['engine_graphs_active{phase="verify"}'] == 0


def test_a_server_that_requires_graphs_does_not_come_up_without_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(tiny_model), dtype="float32", page_size=4, threads=1, cuda_graphs="required")
    assert config.problems() == [
        "cuda_graphs: 'required' needs a GPU (device 'cuda'); valid with device 'cpu': preferred, off"
    ]
    monkeypatch.setattr(EngineConfig, "problems", lambda self: [])
    with pytest.raises(GraphCaptureError, match="verify for 32 requests"):
        build(config, capturer=lambda work: Eager(work, ("verify", 32)))


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(tiny_model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidConfig, match="device: 'cuda' cannot be used: torch sees no NVIDIA GPU"):
        build(EngineConfig(str(tiny_model), device="cuda"))
