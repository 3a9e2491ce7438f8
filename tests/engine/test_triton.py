"""The Triton kernels compute what their torch paths compute; here by Triton's interpreter, on a CPU.

Where there is an NVIDIA GPU the same tests run on it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton defines its own functions
pytest.importorskip("triton")

from engine.build import Core, build  # noqa: E402
from engine.config import EngineConfig, SpecConfig  # noqa: E402
from engine.ops.base import View  # noqa: E402
from engine.ops.reference import ReferenceOps  # noqa: E402
from engine.ops.triton import attention, tokens  # noqa: E402
from engine.ops.triton.attention import Tiling  # noqa: E402
from engine.ops.triton.ops import TritonOps  # noqa: E402
from engine.ops.triton.tuned import Tuned  # noqa: E402
from engine.spec.accept import accept  # noqa: E402
from engine.spec.base import DraftTree  # noqa: E402
from tests.engine.conftest import generate  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@dtypes
@pytest.mark.parametrize("dim", [72, 1])
def test_norms_and_gates(dtype: torch.dtype, dim: int) -> None:
    ops, oracle = TritonOps(), ReferenceOps()
    x, delta, weight = (
        random(5, dim, dtype=dtype),
        random(5, dim, dtype=dtype, seed=1),
        random(dim, dtype=dtype, seed=2),
    )
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), **CLOSE[dtype])
    mine, theirs = x.clone(), x.clone()
    normed, wanted = ops.add_rms_norm(delta, mine, weight, 1e-5), oracle.add_rms_norm(delta, theirs, weight, 1e-5)
    torch.testing.assert_close(normed, wanted, **CLOSE[dtype])
    # Triton's interpreter cuts off what does not fit into bfloat16; a GPU rounds, as torch does.
    torch.testing.assert_close(mine, theirs, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)
    pair = torch.cat((x, delta), dim=1)
    torch.testing.assert_close(ops.silu_mul(pair), oracle.silu_mul(pair), **CLOSE[dtype])


def view_of(
    contexts: list[int], rows: list[int], page_size: int, mask: bool = False, wider: int = 0, seed: int = 0
) -> tuple[View, int]:
    """Requests with these contexts and rows on scattered pages, and the number of slots."""
    draw = np.random.default_rng(seed)
    longest = [context + n + wider for context, n in zip(contexts, rows, strict=True)]
    pages = [-(-n // page_size) for n in longest]
    order = draw.permutation(sum(pages))
    table = np.zeros((len(rows) + 2, max(pages)), dtype=np.int32)
    table_row = draw.permutation(len(rows) + 2)[: len(rows)]
    at = 0
    for row, count in zip(table_row, pages, strict=True):
        table[row, :count] = order[at : at + count]
        at += count
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(contexts, rows, strict=True)])
    owner = np.repeat(np.arange(len(rows)), rows)
    slots = table[table_row[owner], positions // page_size].astype(np.int64) * page_size + positions % page_size
    start = np.concatenate(([0], np.cumsum(rows)))
    mask_start, matrices, width = np.full(len(rows), -1, dtype=np.int64), [], np.array(rows) + wider
    if mask:
        size = 0
        for b, n in enumerate(rows):
            if b % 3 == 2:
                continue  # causal among masked ones
            matrix = draw.integers(0, 2, (n, n + wider))
            matrix[np.arange(n), np.arange(n)] = 1
            mask_start[b] = size
            size += matrix.size
            matrices.append(matrix.reshape(-1))
    view = View(
        tokens=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions.astype(np.int32)).to(DEVICE),
        slots=torch.from_numpy(slots).to(DEVICE),
        page_table=torch.from_numpy(table).to(DEVICE),
        page_size=page_size,
        table_row=torch.from_numpy(table_row.astype(np.int32)).to(DEVICE),
        row_start=torch.from_numpy(start.astype(np.int32)).to(DEVICE),
        context=torch.tensor(contexts, dtype=torch.int32).to(DEVICE),
        mask=torch.from_numpy(np.concatenate(matrices).astype(np.uint8)).to(DEVICE) if matrices else None,
        mask_start=torch.from_numpy(mask_start).to(DEVICE),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        mask_width=torch.from_numpy(width.astype(np.int32)).to(DEVICE) if wider else None,
    )
    return view, sum(pages) * page_size


@dtypes
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
def test_rotation_and_the_store_into_the_cache(dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int) -> None:
    view, slots = view_of([0, 5, 17], [4, 1, 3], 4)
    qkv = random(8, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    rope = (random(64, dim // 2, seed=3), random(64, dim // 2, seed=4))
    results = []
    for ops in (TritonOps(), ReferenceOps()):
        k, v = (torch.zeros(slots, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        mine = qkv.clone()
        ops.rope_store(mine, view, rope, k, v, q_heads)
        results.append((mine[:, : q_heads * dim], k, v))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, **CLOSE[dtype])


SHAPES = {
    "decode": ([0, 1, 33, 70], [1, 1, 1, 1], False, 0),
    "chunks": ([0, 7, 40], [19, 3, 1], False, 0),
    "trees": ([5, 40, 8, 0], [6, 17, 2, 1], True, 0),
    "draft trees": ([5, 30], [2, 2], True, 5),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tiling", "q_heads", "kv_heads", "dim"),
    [
        (torch.float32, Tiling(keys=32, rows=16, splits=3), 9, 3, 64),
        (torch.bfloat16, Tiling(keys=64, splits=1), 4, 4, 24),
    ],
)
def test_attention(shape: str, dtype: torch.dtype, tiling: Tiling, q_heads: int, kv_heads: int, dim: int) -> None:
    contexts, rows, mask, wider = SHAPES[shape]
    view, slots = view_of(contexts, rows, 4, mask, wider)
    qkv = random(sum(rows), (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    k, v = random(slots, kv_heads, dim, dtype=dtype, seed=1), random(slots, kv_heads, dim, dtype=dtype, seed=2)
    run = attention.decode if shape == "decode" else attention.extend
    mine = run(qkv, view, k, v, q_heads, tiling)
    torch.testing.assert_close(mine, ReferenceOps().attention(qkv, view, k, v, q_heads), **CLOSE[dtype])


def test_the_first_largest_logit_and_minus_one_for_nan() -> None:
    logits = random(6, 5000)
    logits[1, 4999] = logits[1, 4321] = 50.0
    logits[2, 17] = float("nan")
    logits[3] = float("-inf")
    logits[4, 4998] = float("inf")
    assert tokens.argmax(logits).tolist() == ReferenceOps().argmax(logits).tolist()


def test_a_coin_picks_the_token_that_the_host_would_pick() -> None:
    draw = np.random.default_rng(1)
    logits = random(40, 4500) * 3
    logits[7, 100] = float("nan")
    temperature, coin = draw.choice([0.3, 1.0, 2.0], 40), draw.random(40)
    coin[:2] = 0.0, 1 - 2**-53
    wanted = ReferenceOps().choose(logits.cpu(), temperature, np.zeros(40, int), np.ones(40), coin, np.zeros(40))
    device = (torch.from_numpy(values).to(DEVICE) for values in (temperature, coin))
    assert tokens.sample(logits, *device).tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_is_that_of_the_host(seed: int) -> None:
    draw = np.random.default_rng(seed)
    token, parent, depth, start = [], [], [], [0]
    for _ in range(5):
        base = len(token)
        token, parent, depth = [*token, 0], [*parent, -1], [*depth, 0]
        for _ in range(int(draw.integers(0, 12))):
            above, candidate = int(draw.integers(base, len(token))), int(draw.integers(0, 3))
            if not any(p == above and t == candidate for p, t in zip(parent, token, strict=True)):
                token, parent, depth = [*token, candidate], [*parent, above], [*depth, depth[above] + 1]
        start.append(len(token))
    chosen = draw.integers(0, 3, len(token))
    tree = DraftTree(np.array(token), np.array(parent), np.array(depth), np.array(start), chain=False)
    wanted = accept(tree, chosen)
    deepest, most = int(tree.depth.max()), int(np.diff(tree.start).max())
    arrays = (torch.from_numpy(a).to(DEVICE) for a in (tree.tokens, tree.parent, tree.start, chosen))
    length, path = tokens.accept(*arrays, deepest, most)
    assert length.tolist() == wanted.length.tolist()
    longest = wanted.path.shape[1]
    assert path[:, :longest].tolist() == wanted.path.tolist()
    assert (path[:, longest:] == -1).all()


@pytest.mark.skipif(GPU, reason="the model is on the CPU")
def test_a_model_on_these_kernels_says_what_it_says_on_the_others(
    tiny_model: Path, head_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig("eagle3", 2, 2, 4, draft_head=str(head_file))

    def made() -> Core:
        return build(EngineConfig(model=str(tiny_model), dtype="float32", page_size=4, threads=1, spec=spec))

    wanted = generate(made(), [[1, 2, 3], [7]], max_tokens=3)
    import engine.build

    monkeypatch.setattr(engine.build, "NativeOps", lambda dtype: TritonOps())
    core = made()
    assert core.model.ops.name == "triton"
    assert generate(core, [[1, 2, 3], [7]], max_tokens=3) == wanted


@pytest.mark.skipif(GPU, reason="the device is played")
def test_a_round_that_stays_on_a_device_is_the_same_on_these_kernels(tiny_model: Path, head_file: Path) -> None:
    from tests.engine.played_device import Played, PlayedDevice

    spec = SpecConfig("eagle3", 2, 2, 4, draft_head=str(head_file))
    config = EngineConfig(str(tiny_model), dtype="float32", page_size=4, threads=1, spec=spec, cuda_graphs="off")
    asked = {"max_tokens": 3, "temperature": 0.8, "seed": 3}
    wanted = generate(build(config), [[1, 2, 3], [7]], **asked)
    with Played() as mode:
        device = PlayedDevice(mode, ops=TritonOps())
        core = build(config, device=device)
        assert generate(core, [[1, 2, 3], [7]], **asked) == wanted
    assert device.fetches > 0


@dtypes
def test_parts_are_added_in_the_order_of_the_ranks_by_their_addresses(dtype: torch.dtype) -> None:
    from engine.ops.triton.sums import add_parts

    parts = [random(3000, dtype=dtype, seed=i) for i in range(3)]
    out = torch.empty(3000, dtype=dtype, device=DEVICE)
    add_parts(torch.tensor([part.data_ptr() for part in parts], device=DEVICE), 3, out)
    wanted = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    torch.testing.assert_close(out, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)


class TestTuned:
    """Configurations are measured once for a shape and a device."""

    def test_the_fastest_is_taken_and_never_measured_again(self, tmp_path: Path) -> None:
        seconds = {Tiling(keys=64): 3.0, Tiling(keys=32): 1.0, Tiling(keys=16): 2.0}
        ran: list[Tiling] = []

        def tuned(device: str) -> Tuned:
            def measure(call: object) -> float:
                call()  # type: ignore[operator]
                return seconds[ran[-1]]

            return Tuned(device, measure, tmp_path)

        first = tuned("one")
        for _ in range(2):
            assert first.pick("decode 8", list(seconds), ran.append) == Tiling(keys=32)
        assert tuned("one").pick("decode 8", list(seconds), ran.append) == Tiling(keys=32)
        assert len(ran) == 3
        tuned("one").pick("decode 16", list(seconds), ran.append)
        tuned("another").pick("decode 8", list(seconds), ran.append)
        assert len(ran) == 9

    def test_what_cannot_run_is_passed_over_and_nothing_at_all_is_an_error(self, tmp_path: Path) -> None:
        def run(tiling: Tiling) -> None:
            if tiling.keys == 64:
                raise RuntimeError("out of resource: shared memory")

        def measure(call: object) -> float:
            call()  # type: ignore[operator]
            return 1.0

        tuned = Tuned("one", measure, tmp_path)
        assert tuned.pick("a", [Tiling(keys=64), Tiling(keys=32)], run) == Tiling(keys=32)
        with pytest.raises(RuntimeError, match="none of 1 configurations"):
            tuned.pick("b", [Tiling(keys=64)], run)

    def test_all_ranks_take_the_choice_of_rank_0(self, tmp_path: Path) -> None:
        first, second = Tiling(keys=64), Tiling(keys=32)
        asked: list[Tiling] = []

        def exchange(mine: Tiling) -> list[Tiling]:
            asked.append(mine)
            return [first, mine]

        tuned = Tuned("one", lambda call: 1.0, tmp_path, exchange)
        for _ in range(2):
            assert tuned.pick("a", [second, first], lambda tiling: None) == first
        assert asked == [second]

    def test_a_damaged_cache_is_measured_again(self, tmp_path: Path) -> None:
        Tuned("one", lambda call: 1.0, tmp_path).pick("a", [Tiling()], lambda tiling: None)
        for file in tmp_path.iterdir():
            file.write_text("{")
        assert Tuned("one", lambda call: 1.0, tmp_path).pick("a", [Tiling()], lambda tiling: None) == Tiling()
