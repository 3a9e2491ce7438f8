"""Compiled kernels equal the plain torch ones, for any mix of requests, and do not depend on the mix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.base import View
from engine.ops.grouped import KINDS, quantize
from engine.ops.native import NativeOps, compiler_flags
from engine.ops.reference import ReferenceOps
from engine.spec.accept import ancestor_mask
from engine.spec.base import DraftTree

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[list[int], list[int]]:
    parent, depth = [-1], [0]
    for i in range(1, nodes):
        above = int(rng.integers(0, i))
        parent.append(above)
        depth.append(depth[above] + 1)
    return parent, depth


def make_view(rng: np.random.Generator, shape: list[tuple[int, int]], page_size: int, trees: bool) -> View:
    """Requests given as (context, rows), on shuffled pages; with `trees` the rows are random trees."""
    pages_each = max(-(-(context + rows) // page_size) for context, rows in shape)
    table = rng.permutation(len(shape) * pages_each).reshape(len(shape), pages_each).astype(np.int32)
    rows = np.array([n for _, n in shape])
    start = np.concatenate(([0], np.cumsum(rows)))
    context = np.array([c for c, _ in shape])
    owner = np.repeat(np.arange(len(shape)), rows)
    logical = context[owner] + np.arange(start[-1]) - start[owner]
    parent, depth = [], []
    for b, n in enumerate(rows):
        p, d = random_tree(rng, n)
        parent += [start[b] + x if x >= 0 else -1 for x in p]
        depth += d
    tree = DraftTree(np.zeros(start[-1], dtype=np.int64), np.array(parent), np.array(depth), start, chain=False)
    mask, offsets = ancestor_mask(tree)
    return View(
        tokens=torch.zeros(int(start[-1]), dtype=torch.int64),
        positions=torch.from_numpy((context[owner] + tree.depth if trees else logical).astype(np.int32)),
        slots=torch.from_numpy(table[owner, logical // page_size].astype(np.int64) * page_size + logical % page_size),
        page_table=torch.from_numpy(table),
        page_size=page_size,
        table_row=torch.arange(len(shape), dtype=torch.int32),
        row_start=torch.from_numpy(start.astype(np.int32)),
        context=torch.from_numpy(context.astype(np.int32)),
        mask=torch.from_numpy(mask) if trees else None,
        mask_start=torch.from_numpy(offsets if trees else np.full(len(shape), -1, dtype=np.int64)),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 21)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3), (4, 4), (40, 1)]),
    dim=st.sampled_from([8, 64, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    trees=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_attention_and_cache_equal_the_reference(
    shape: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    trees: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    view = make_view(rng, shape, page_size, trees)
    q_heads, kv_heads = heads
    cache = torch.randn(2, view.page_table.numel() * page_size, kv_heads, dim).to(dtype)
    rows = len(view.tokens)
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(400, dim // 2) * 6
    rope = (angles.cos(), angles.sin())
    results = []
    for ops in (ReferenceOps(), NativeOps(dtype)):
        mine, (k, v) = qkv.clone(), cache.clone()
        ops.rope_store(mine, view, rope, k, v, q_heads)
        results.append((k, v, ops.attention(mine, view, k, v, q_heads)))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours.float(), expected.float(), **TOLERANCE[dtype])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    ops = NativeOps(dtype)
    view = make_view(rng, [(130, 1), (7, 5), (300, 3)], 16, trees=False)
    k, v = torch.randn(2, view.page_table.numel() * 16, 3, 64).to(dtype)
    qkv = torch.randn(9, 15 * 64).to(dtype)
    together = ops.attention(qkv, view, k, v, 9)
    for b in range(3):
        first, last = view.row_start[b], view.row_start[b + 1]
        alone = replace(
            view,
            table_row=view.table_row[b : b + 1],
            row_start=torch.tensor([0, last - first], dtype=torch.int32),
            context=view.context[b : b + 1].clone(),
            mask_start=view.mask_start[b : b + 1],
        )
        assert torch.equal(ops.attention(qkv[first:last].contiguous(), alone, k, v, 9), together[first:last])


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(0, 300),
    rows=st.integers(2, 20),
    page_size=st.sampled_from([5, 16]),
    heads=st.sampled_from([(9, 3), (4, 4), (8, 2), (14, 2), (40, 1)]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    context: int, rows: int, page_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """To the last bit: a token is verified among others and decoded alone, and both must choose alike."""
    ops = NativeOps(dtype)
    q_heads, kv_heads = heads
    view = make_view(np.random.default_rng(context), [(context, rows)], page_size, trees=False)
    k, v = torch.randn(2, view.page_table.numel() * page_size, kv_heads, 64).to(dtype)
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * 64).to(dtype)
    together = ops.attention(qkv, view, k, v, q_heads)
    for i in range(rows):
        alone = replace(
            view,
            row_start=torch.tensor([0, 1], dtype=torch.int32),
            context=torch.tensor([context + i], dtype=torch.int32),
        )
        assert torch.equal(ops.attention(qkv[i : i + 1].contiguous(), alone, k, v, q_heads)[0], together[i])


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), dim=st.sampled_from([5, 48, 576]), dtype=st.sampled_from(DTYPES))
def test_norms_and_activation_equal_the_reference(rows: int, dim: int, dtype: torch.dtype) -> None:
    x, delta, weight = (torch.randn(n, dim).to(dtype) for n in (rows, rows, 1))
    reference, native = ReferenceOps(), NativeOps(dtype)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(native.rms_norm(x, weight[0], 1e-5), reference.rms_norm(x, weight[0], 1e-5), **near)
    residuals = x.clone(), x.clone()
    ours = native.add_rms_norm(delta, residuals[0], weight[0], 1e-5)
    torch.testing.assert_close(ours, reference.add_rms_norm(delta, residuals[1], weight[0], 1e-5), **near)
    torch.testing.assert_close(residuals[0], residuals[1], **near)
    wide = torch.randn(rows, 2 * dim).mul(20).to(dtype)
    torch.testing.assert_close(native.silu_mul(wide), reference.silu_mul(wide), **near)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 100),
    size=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    bias=st.booleans(),
    wide=st.booleans(),
)
def test_bfloat16_linear_equals_float32_of_the_same_values(
    rows: int, size: tuple[int, int], bias: bool, wide: bool
) -> None:
    weight, x = torch.randn(*size).bfloat16(), torch.randn(rows, size[1]).bfloat16()
    shift = torch.randn(size[0]).bfloat16() if bias else None
    ours = NativeOps(torch.bfloat16).linear(weight, shift, as_float=wide)(x)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if shift is None else shift.float())
    assert ours.dtype == (torch.float32 if wide else torch.bfloat16)
    torch.testing.assert_close(ours.float(), expected, atol=3e-2, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    size=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    bias=st.booleans(),
    wide=st.booleans(),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
)
def test_grouped_linear_equals_the_reference(
    rows: int, size: tuple[int, int], bias: bool, wide: bool, kind: str, dtype: torch.dtype
) -> None:
    weight, x = torch.randn(*size), (torch.randn(rows, size[1]) * torch.randn(rows, 1).exp()).to(dtype)
    shift = torch.randn(size[0]) if bias else None
    ours, expected = (
        ops.linear(weight, shift, as_float=wide, weights=kind)(x) for ops in (NativeOps(dtype), ReferenceOps())
    )
    assert ours.dtype == expected.dtype == (torch.float32 if wide else dtype)
    near = {"atol": 1e-4, "rtol": 1e-4} if wide else TOLERANCE[dtype]
    size_of_row = x.float().norm(dim=1, keepdim=True).clamp(1e-6)
    torch.testing.assert_close(ours.float() / size_of_row, expected.float() / size_of_row, **near)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linears_row_depends_neither_on_its_batch_nor_on_the_threads(weights: str, dtype: torch.dtype) -> None:
    # Lossless speculation rests on this: one row and five must give the same logits to the last bit.
    weight, x = torch.randn(200, 100), torch.randn(67, 100).to(dtype)
    together = NativeOps(dtype).linear(weight, as_float=True, weights=weights)(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        linear = NativeOps(dtype).linear(weight, as_float=True, weights=weights)
        for first, last in ((0, 1), (1, 3), (3, 7), (7, 15), (15, 67)):
            assert torch.equal(linear(x[first:last]), together[first:last])
    finally:
        torch.set_num_threads(threads)
        NativeOps(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_and_zero_activations(kind: str) -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2] = float("nan"), float("inf"), 0.0
    out = NativeOps(torch.float32).linear(torch.rand(8, 64), weights=kind)(x)
    assert out[:2].isnan().all()
    assert (out[2] == 0).all()
    assert out[3].isfinite().all()


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 15)])
def test_quantised_weights_are_near_and_stay_themselves(kind: str, steps: int) -> None:
    weight = torch.randn(50, 100)
    grouped = quantize(weight, kind)
    groups = torch.nn.functional.pad(weight, (0, 28)).unflatten(1, (-1, 32))
    width = (2 * groups.abs().amax(-1) if kind == "int8" else groups.amax(-1) - groups.amin(-1)) / steps
    error = torch.nn.functional.pad((grouped.dequantize() - weight).abs(), (0, 28)).unflatten(1, (-1, 32)).amax(-1)
    assert (error <= 0.51 * width + 1e-3).all()
    again = quantize(grouped.dequantize(), kind)
    torch.testing.assert_close(again.dequantize(), grouped.dequantize(), atol=2e-3, rtol=0)


def test_argmax_takes_the_first_of_equals_and_reports_nan() -> None:
    logits = torch.randn(5, 1000)
    logits[0, [3, 900]] = 99.0
    logits[1, 17] = float("nan")
    logits[2, :] = float("-inf")
    logits[2, 5] = -1e30
    for ops in (ReferenceOps(), NativeOps(torch.float32)):
        assert ops.argmax(logits)[:3].tolist() == [3, -1, 5]
        assert ops.argmax(logits)[3:].tolist() == logits[3:].argmax(-1).tolist()


def test_compiler_options_name_only_what_the_machine_has() -> None:
    assert compiler_flags(frozenset()) == []
    assert "-mamx-bf16" not in compiler_flags(frozenset({"avx2", "avx512f", "amx_tile"}))
    assert not any("native" in option for option in compiler_flags(frozenset({"avx2", "fma"})))
