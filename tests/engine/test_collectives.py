"""Every backend that can run here adds up, gathers and sends the same; what goes wrong is said, and in time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import collectives
from engine.collectives.base import MODULES, Group, Place, backend, choose
from engine.config import ALLREDUCE
from engine.errors import CollectiveError, CollectiveTimeout, InvalidConfig, RankLost, RanksDisagree
from tests.engine.threads_as_ranks import ThreadCrew, on_ranks
from tuner.engines.base import get_engine

HERE = [name for name in MODULES if backend(name).unavailable(Place(2)) is None]
each = pytest.mark.parametrize("name", HERE)


def test_every_file_has_a_setting_and_every_setting_a_file() -> None:
    files = {file.stem for file in Path(collectives.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert set(MODULES) == files
    offered = get_engine("bundled").settings["allreduce"].choices
    assert tuple(offered) == ALLREDUCE, "what the tuner offers is what the engine has"
    for name in MODULES:
        assert backend(name).name == name


def test_shared_memory_and_gloo_run_here() -> None:
    assert HERE == ["shm", "gloo"]


@each
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_right_and_the_same_bits_on_every_rank(name: str, ranks: int, dtype: torch.dtype) -> None:
    shapes = [(1, 576), (7, 33), (64, 4096), (3, 1), (700, 2048)]
    parts = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(9 * r + i)).to(dtype)
            for i, shape in enumerate(shapes)
        ]
        for r in range(ranks)
    ]
    sums = on_ranks(ranks, lambda crew: [crew.group.all_reduce(x.clone()) for x in parts[crew.group.rank]], name)
    for i in range(len(shapes)):
        exact = torch.stack([parts[r][i].double() for r in range(ranks)]).sum(0)
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(sums[0][i].double(), exact, **close)
        assert all(torch.equal(sums[0][i], other[i]) for other in sums[1:])


@each
@pytest.mark.parametrize("widths", [(5, 3), (16, 16, 1), (400_000, 300_000)])
def test_gathered_parts_of_unequal_width_stand_side_by_side(name: str, widths: tuple[int, ...]) -> None:
    rows = 4
    parts = [torch.randn(rows, width) for width in widths]
    gathered = on_ranks(len(widths), lambda crew: crew.group.all_gather(parts[crew.group.rank], widths), name)
    for one in gathered:
        assert torch.equal(one, torch.cat(parts, dim=1))


@each
def test_all_take_what_rank_0_has_chosen(name: str) -> None:
    def work(crew: object) -> list[np.ndarray]:
        group: Group = crew.group  # type: ignore[attr-defined]
        return [group.agree(np.arange(n) + 1000 * group.rank, np.array([n])) for n in (1, 5, 4096, 300_000)]

    for answers in on_ranks(3, work, name):
        for n, told in zip((1, 5, 4096, 300_000), answers, strict=True):
            assert np.array_equal(told, np.arange(n))


@each
def test_ranks_that_have_other_drafts_than_rank_0_stop(name: str) -> None:
    with pytest.raises(RanksDisagree, match="draft tokens"):
        on_ranks(2, lambda crew: crew.group.agree(np.arange(3), np.array([crew.group.rank])), name)


def test_ranks_that_do_different_things_are_found_out_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(RanksDisagree, match=r"rank \d of 2, operation 1 .*gone apart"):
        on_ranks(2, lambda crew: crew.group.all_reduce(torch.zeros(1 + crew.group.rank)))
    assert time.monotonic() - began < 5


@each
def test_thousands_of_calls_in_any_order_stay_in_step(name: str) -> None:
    rounds = 1500 if name == "shm" else 60
    draw = np.random.default_rng(3)
    plan = [(int(draw.integers(3)), int(draw.integers(1, 3000))) for _ in range(rounds)]

    def work(crew: object) -> int:
        group: Group = crew.group  # type: ignore[attr-defined]
        lag = np.random.default_rng(group.rank)
        for i, (kind, n) in enumerate(plan):
            if lag.random() < 0.02:
                time.sleep(0.001)
            if kind == 0:
                assert float(group.all_reduce(torch.full((n,), float(i + group.rank)))[-1]) == 3 * i + 3
            elif kind == 1:
                parts = group.all_gather(torch.full((2, group.rank + 1), float(group.rank + i)), (1, 2, 3))
                assert parts[1].tolist() == [i, i + 1, i + 1, i + 2, i + 2, i + 2]
            else:
                assert group.agree(np.full(n, i + group.rank), np.array([i]))[-1] == i
        return sum(count.calls for count in group.counts().values())

    assert on_ranks(3, work, name) == [rounds] * 3


@each
def test_a_rank_that_does_not_come_is_named_with_the_operation_in_time(name: str) -> None:
    left = threading.Event()

    def work(crew: object) -> None:
        group: Group = crew.group  # type: ignore[attr-defined]
        group.all_reduce(torch.zeros(8))
        if group.rank == 0:
            try:
                group.all_reduce(torch.zeros(8))
            finally:
                left.set()
        else:
            left.wait(20)

    began = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"rank 0 of 2, operation 2 \(all_reduce of 32 bytes by .*within 1 s"):
        on_ranks(2, work, name, timeout_s=1.0)
    assert 0.8 < time.monotonic() - began < 8


def test_nobody_waits_for_a_rank_that_is_known_to_have_died() -> None:
    def work(crew: object) -> None:
        group: Group = crew.group  # type: ignore[attr-defined]
        if group.rank == 0:
            threading.Timer(0.2, lambda: group._collective.lose(1)).start()  # type: ignore[union-attr]
            group.all_reduce(torch.zeros(8))

    with pytest.raises(RankLost, match="rank 1 has ended"):
        on_ranks(2, work, "shm", timeout_s=60)


def test_after_a_failure_nothing_is_pretended_to_work() -> None:
    def work(crew: object) -> None:
        group: Group = crew.group  # type: ignore[attr-defined]
        if group.rank == 0:
            for _ in range(2):
                with pytest.raises(CollectiveError):
                    group.all_reduce(torch.zeros(8))
            raise CollectiveError("twice")

    with pytest.raises(CollectiveError, match="twice"):
        on_ranks(2, work, "shm", timeout_s=0.3)


def test_calls_bytes_and_times_are_counted() -> None:
    def work(crew: object) -> object:
        group: Group = crew.group  # type: ignore[attr-defined]
        for _ in range(5):
            group.all_reduce(torch.zeros(10))
        return group.counts()["all_reduce"]

    for name in HERE:
        for count in on_ranks(2, work, name):
            assert (count.calls, count.bytes) == (5, 200)  # type: ignore[attr-defined]
            assert 0 < count.slowest_s <= count.seconds  # type: ignore[attr-defined]


def test_auto_takes_shared_memory_and_says_why_not_the_others() -> None:
    choice = choose("auto", Place(2))
    assert (choice.name, choice.verified) == ("shm", True)
    assert choice.reason.startswith("auto: the first that can run here")


def test_without_a_compiler_auto_takes_gloo_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.ops.native import library

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPEC_TUNER_CACHE", str(tmp_path))
    library.cache_clear()
    try:
        choice = choose("auto", Place(2))
        assert choice.name == "gloo"
        assert "no C++ compiler" in choice.reason
        with pytest.raises(
            InvalidConfig, match=r"allreduce: 'shm' cannot run here: .*no C\+\+ compiler.*what can: gloo"
        ):
            choose("shm", Place(2))
    finally:
        library.cache_clear()


def test_nothing_that_can_run_is_refused_with_every_reason() -> None:
    with pytest.raises(InvalidConfig, match=r"shm: .* main memory.*gloo: .* main memory"):
        choose("auto", Place(2, "cuda"), ("shm", "gloo"))


def test_a_segment_has_no_name_that_could_be_left_behind() -> None:
    def named() -> set[str]:  # of this process alone: other programs come and go
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "/dev/shm/" in line}

    def run(crew: ThreadCrew) -> set[str]:
        crew.group.all_reduce(torch.zeros(8))
        return named()  # while the segment is in use

    before = named()
    assert on_ranks(2, run) == [before, before]


class TestMscclpp:
    """An installed MSCCL++ is taken by what it has, and what it lacks is said."""

    @pytest.fixture(autouse=True)
    def peers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.collectives.mscclpp.without_peers", lambda place: None)

    def reason(self) -> str | None:
        return backend("mscclpp").unavailable(Place(2, "cuda"))

    def installed(self, monkeypatch: pytest.MonkeyPatch, **parts: object) -> None:
        import importlib.machinery
        import sys
        import types

        for name in ("mscclpp", "mscclpp.ext"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        for name, part in parts.items():
            setattr(sys.modules["mscclpp.ext"], name, part)

    def test_that_it_is_not_installed(self) -> None:
        assert "MSCCL++ is not installed" in (self.reason() or "")

    def test_an_older_one_is_refused_with_what_it_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed(monkeypatch)
        assert "has no collection of algorithms" in (self.reason() or "")

        class Older:
            def build_default_algorithms(self, scratch_buffer, scratch_buffer_size, flag_buffer, rank):  # type: ignore[no-untyped-def]
                ...

        self.installed(monkeypatch, AlgorithmCollectionBuilder=Older)
        assert "from flag_buffer, rank, scratch_buffer, scratch_buffer_size" in (self.reason() or "")

    def test_one_that_is_known_can_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Known:
            def build_default_algorithms(self, scratch_buffer, scratch_buffer_size, rank):  # type: ignore[no-untyped-def]
                ...

        self.installed(monkeypatch, AlgorithmCollectionBuilder=Known)
        assert self.reason() is None
