"""What a CPU with fewer instructions computes, on one with more: the kernels are built as they would be there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.ops import native
from engine.ops.grouped import KINDS
from engine.ops.native import NativeOps, compiler_flags, cpu_flags
from engine.ops.reference import ReferenceOps
from tests.engine.test_ops import TOLERANCE, make_view

pytestmark = pytest.mark.slow  # each set is compiled

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}


@pytest.fixture(params=[_AVX2, _AVX512], ids=["avx2", "avx512"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: the kernels are those of a machine with these instruction sets, from there on."""
    wanted: frozenset[str] = request.param
    if missing := wanted - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    with monkeypatch.context() as patch:
        patch.setattr(native, "cpu_flags", lambda: wanted)
        built = native.library.__wrapped__()
    return lambda: monkeypatch.setattr(native, "library", lambda: built)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_the_same_to_the_last_bit(kind: str, narrow: Callable[[], None]) -> None:
    weight, x = torch.randn(200, 576), torch.randn(21, 576)
    here = NativeOps(torch.float32).linear(weight, weights=kind)(x)
    narrow()
    assert torch.equal(NativeOps(torch.float32).linear(weight, weights=kind)(x), here)


def test_bfloat16_linears_and_attention_equal_the_reference_and_a_row_knows_of_no_other(
    narrow: Callable[[], None],
) -> None:
    narrow()
    dtype = torch.bfloat16
    ours, plain = NativeOps(dtype), ReferenceOps()
    weight, x = torch.randn(100, 96).bfloat16(), torch.randn(37, 96).bfloat16()
    linear = ours.linear(weight, as_float=True, weights="bf16")
    torch.testing.assert_close(linear(x), x.float() @ weight.float().T, atol=3e-2, rtol=1e-2)
    assert torch.equal(linear(x[5:6]), linear(x)[5:6])
    view = make_view(np.random.default_rng(3), [(150, 1), (0, 40)], 16, trees=False)
    k, v = torch.randn(2, view.page_table.numel() * 16, 3, 64).to(dtype)
    qkv = torch.randn(41, 15 * 64).to(dtype)
    expected = plain.attention(qkv, view, k, v, 9)
    torch.testing.assert_close(ours.attention(qkv, view, k, v, 9).float(), expected.float(), **TOLERANCE[dtype])


def test_what_is_built_for_fewer_instructions_has_no_more() -> None:
    assert not any("512" in option or "amx" in option for option in compiler_flags(_AVX2))
    assert not any("amx" in option for option in compiler_flags(_AVX512))
