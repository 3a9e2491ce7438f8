"""The operations by compiled CPU kernels (native.cpp), built on first use and kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cache import cache_dir
from engine.ops.base import Fused, Linear, Stack, View
from engine.ops.fused import FusedLayers, LinearRef
from engine.ops.grouped import KINDS, GroupedWeight, quantize
from engine.ops.reference import ReferenceOps

_SOURCE = Path(__file__).with_name("native.cpp")
_HEADERS = ("choose", "lanes", "layers", "linear", "numbers", "pool", "shared", "tiles")
_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-pthread", "-fopenmp-simd", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
# Instruction sets by the kernel's name for them, never -march=native: a virtual machine may hide what its CPU has.
_INSTRUCTION_SETS = {
    "avx2": ("-mavx2",),
    "fma": ("-mfma",),
    "f16c": ("-mf16c",),
    "avx512f": ("-mavx512f", "-mprefer-vector-width=512"),
    "avx512bw": ("-mavx512bw",),
    "avx512vl": ("-mavx512vl",),
    "avx512dq": ("-mavx512dq",),
    "avx512_vnni": ("-mavx512vnni",),
    "avx512_bf16": ("-mavx512bf16",),
}
_TILES = ("amx_tile", "amx_bf16", "avx512_bf16", "avx512vl", "avx512bw")

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "st_set_threads": (None, (_I32,)),
    "st_tiles": (_I32, ()),
    "st_packed_size": (_I64, (_I64, _I64)),
    "st_pack_bf16": (None, (_P, _P, _I64, _I64)),
    "st_linear_tiles": (None, (_P, _I64, _I64, _P, _I64, _P, _P, _I32)),
    "st_lanes": (_I32, ()),
    "st_linear_size": (_I64, (_I32, _I64, _I64)),
    "st_pack_wide": (None, (_P, _P, _I64, _I64)),
    "st_pack_groups": (None, (_I32, _P, _P, _P, _P, _I64, _I64)),
    "st_linear": (None, (_I32, _P, _I64, _I64, _P, _I64, _P, _P, _I32)),
    "st_rms_norm": (None, (_P, _P, _P, _P, _I64, _I64, _F32)),
    "st_silu_mul": (None, (_P, _P, _I64, _I64)),
    "st_rope_store": (None, (_P, _I64, _I32, _I32, _I32, _P, _P, _P, _P, _P, _P)),
    "st_attention": (_I32, (_P, _I64, _P, _P, _P, _I64, _I32, *(_P,) * 6, _I64, _I32, _I32, _I32, _P)),
    "st_forward": (_I32, (_P, _P, _P, _P, _P, _I64, _P)),
    "st_argmax": (None, (_P, _I64, _I64, _P)),
    "st_choose": (None, (_P, _I64, _I64, *(_P,) * 6)),
    "st_likeliest": (None, (_P, _I64, _I64, _I32, _P, _P)),
    "st_shared_bytes": (_I64, (_I64, _I64)),
    "st_shared_open": (_P, (_P, _I32, _I32, _I64, _I64, _I32)),
    "st_shared_close": (None, (_P,)),
    "st_shared_all_reduce": (_I32, (_P, _P, _I64, _I32)),
    "st_shared_all_gather": (_I32, (_P, _P, _I64, _P, _P)),
    "st_shared_broadcast": (_I32, (_P, _P, _I64, _I32)),
    "st_shared_lose": (None, (_P, _I32)),
    "st_shared_explain": (None, (_P, _P)),
    "st_shared_totals": (None, (_P, _I64, _P)),
}
_TYPED = ("st_linear", "st_rms_norm", "st_silu_mul", "st_rope_store", "st_attention", "st_forward")
_SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
_KIND_CODES = {"bf16": 0, "int8": 1, "int4": 2, "tiles": 3}
HEAD_SIZES = (8, 16, 32, 64, 80, 96, 128, 256)


class NativeUnavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why. The reference operations still work."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; empty where /proc/cpuinfo is not to be had."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def compiler_flags(flags: frozenset[str]) -> list[str]:
    """Compiler options for a machine with these instruction sets."""
    chosen = [option for name, options in _INSTRUCTION_SETS.items() if name in flags for option in options]
    if all(name in flags for name in _TILES):
        chosen += ["-mamx-tile", "-mamx-bf16"]
    return chosen


def build() -> Path:
    """The compiled library, from the cache or made now.

    Raises:
        NativeUnavailable: not Linux, no compiler, or the compiler's own message.
    """
    if platform.system() != "Linux":
        raise NativeUnavailable(f"compiled kernels need Linux, this is {platform.system()}")
    compiler = os.environ.get("CXX", "c++")
    options = [*_FLAGS, *compiler_flags(cpu_flags())]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeUnavailable(f"no C++ compiler: {error}; install one, or name it in CXX") from error
    sources = [
        _SOURCE.with_name(name).read_text() for name in (_SOURCE.name, *(f"{header}.hpp" for header in _HEADERS))
    ]
    key = hashlib.sha256("\n".join([*sources, version, *options]).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"native-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / "native.so"
        done = subprocess.run(
            [compiler, *options, "-shared", "-o", str(library), str(_SOURCE)], capture_output=True, text=True
        )
        if done.returncode:
            raise NativeUnavailable(f"{compiler} failed:\n{done.stderr.strip()}")
        library.replace(target)  # atomic: several engines may build at once
    return target


@cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises NativeUnavailable."""
    path = build()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels do not load: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        for full in (name + suffix for suffix in _SUFFIX.values()) if name in _TYPED else (name,):
            function = getattr(lib, full)
            function.restype, function.argtypes = result, arguments
    return lib


def fast_bfloat16() -> bool:
    """Whether bfloat16 weights are multiplied at memory speed here, by these kernels or by torch."""
    try:
        return bool(library().st_lanes() or library().st_tiles())
    except NativeUnavailable:
        return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


class NativeOps:
    """Kernels for activations of one type, float32 or bfloat16.

    bfloat16 weights use matrix tiles where there are some, else vectors; int8 and int4 ones always vectors. The number
    of rows decides how many are computed at a time, never how a row is computed.

    They run on `torch.get_num_threads()` threads of their own, as counted when this is made.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _SUFFIX:
            raise NativeUnavailable(f"no compiled kernels for {dtype}")
        lib = library()
        self._lib = lib
        lib.st_set_threads(torch.get_num_threads())
        self._tiles = dtype == torch.bfloat16 and bool(lib.st_tiles())
        self._lanes = int(lib.st_lanes())
        suffix = _SUFFIX[dtype]
        self._multiply = getattr(lib, "st_linear" + suffix)
        self._rms_norm = getattr(lib, "st_rms_norm" + suffix)
        self._silu_mul = getattr(lib, "st_silu_mul" + suffix)
        self._rope_store = getattr(lib, "st_rope_store" + suffix)
        self._attention = getattr(lib, "st_attention" + suffix)
        self._forward = getattr(lib, "st_forward" + suffix)

    def describe(self, weights: str) -> dict[str, str]:
        """See `Ops.describe`."""
        linear = "torch"
        if weights in KINDS and self._lanes:
            linear = f"{weights} in whole numbers, vectors of {32 * self._lanes} bits"
        elif weights == "bf16" and self._tiles:
            linear = "bf16, matrix tiles"
        elif weights == "bf16" and self._lanes:
            linear = f"bf16, vectors of {32 * self._lanes} bits"
        output = {"output layer": linear.replace("int4", "int8")} if weights == "int4" else {}
        return {"linear": f"{linear}, any number of rows", **output, "attention": "native, paged", "other": "native"}

    def linear(
        self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, as_float: bool = False, weights: str = "auto"
    ) -> Linear:
        """See `Ops.linear`."""
        if isinstance(weight, Tensor) and weights in KINDS:
            weight = quantize(weight, weights)
        if isinstance(weight, Tensor):
            weight = weight.bfloat16() if weights == "bf16" else weight
            if self._tiles and weight.dtype == torch.bfloat16:
                return _TileLinear(self._lib, weight.contiguous(), bias, as_float)
        if self._lanes and (isinstance(weight, GroupedWeight) or weight.dtype == torch.bfloat16):
            return _VectorLinear(self._lib, self._multiply, weight, bias, as_float)
        return ReferenceOps().linear(weight, bias, as_float)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        out = torch.empty_like(x)
        self._rms_norm(None, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.add_rms_norm`."""
        out = torch.empty_like(residual)
        rows, dim = residual.shape
        self._rms_norm(delta.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def rope_store(
        self, qkv: Tensor, view: View, rope: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, q_heads: int
    ) -> None:
        """See `Ops.rope_store`."""
        kv_heads, dim = k_cache.shape[1], k_cache.shape[2]
        self._rope_store(
            qkv.data_ptr(),
            qkv.shape[0],
            q_heads,
            kv_heads,
            dim,
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            view.positions.data_ptr(),
            view.slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
        )

    def attention(self, qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int) -> Tensor:
        """See `Ops.attention`."""
        kv_heads, dim = k_cache.shape[1], k_cache.shape[2]
        rows = qkv.shape[0]
        out = torch.empty(rows, q_heads * dim, dtype=qkv.dtype)
        unsupported = self._attention(
            qkv.data_ptr(),
            qkv.shape[1],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            view.page_table.data_ptr(),
            view.page_table.shape[1],
            view.page_size,
            view.table_row.data_ptr(),
            view.row_start.data_ptr(),
            view.context.data_ptr(),
            None if view.mask is None else view.mask.data_ptr(),
            view.mask_start.data_ptr(),
            None if view.mask_width is None else view.mask_width.data_ptr(),
            view.table_row.shape[0],
            q_heads,
            kv_heads,
            dim,
            out.data_ptr(),
        )
        if unsupported:
            raise NativeUnavailable(f"no attention kernel for heads of {dim}; there are {HEAD_SIZES}")
        return out

    def fuse(self, stack: Stack) -> Fused | None:
        """See `Ops.fuse`. Layers that normalise heads, or multiply by torch, are called one by one."""
        if any(layer.head_norms for layer in stack.layers) or stack.head_dim not in HEAD_SIZES:
            return None
        refs = []
        for layer in stack.layers:
            four = [
                linear for linear in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(linear, _Packed)
            ]
            if len(four) < 4:
                return None
            refs.append([linear.ref for linear in four])
        return FusedLayers(self._forward, stack, refs)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`."""
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._lib.st_argmax(logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr())
        return out

    def choose(
        self,
        logits: Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        coin: np.ndarray,
        min_p: np.ndarray,
    ) -> np.ndarray:
        """See `Ops.choose`."""
        rows, vocab = logits.shape
        out = np.empty(rows, dtype=np.int64)
        kinds = (np.float64, np.int64, np.float64, np.float64, np.float64)
        each = [
            np.ascontiguousarray(values, dtype=kind)
            for values, kind in zip((temperature, top_k, top_p, coin, min_p), kinds, strict=True)
        ]
        logits = logits.contiguous()
        self._lib.st_choose(logits.data_ptr(), rows, vocab, *(values.ctypes.data for values in each), out.ctypes.data)
        return out

    def likeliest(self, logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ops.likeliest`."""
        rows, vocab = logits.shape
        scores, index = np.empty((rows, count)), np.empty((rows, count), dtype=np.int64)
        logits = logits.contiguous()
        self._lib.st_likeliest(logits.data_ptr(), rows, vocab, count, scores.ctypes.data, index.ctypes.data)
        return scores, index


class _Packed:
    """A weight laid out for a kernel; the one it was made from is not kept."""

    def __init__(self, kind: str, shape: tuple[int, int], packed: Tensor, bias: Tensor | None, as_float: bool) -> None:
        self.out_features, self.in_features = shape
        self._packed, self._bias = packed, None if bias is None else bias.float().contiguous()
        self._pointer = packed.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._kind, self._as_float = _KIND_CODES[kind], as_float

    @property
    def ref(self) -> LinearRef:
        """For calls of whole layers; valid while this lives."""
        return LinearRef(self._kind, self.out_features, self.in_features, self._pointer, self._bias_pointer)


class _VectorLinear(_Packed):
    """By vectors: bfloat16, int8 or int4."""

    def __init__(
        self, lib: ctypes.CDLL, multiply: Any, weight: Tensor | GroupedWeight, bias: Tensor | None, as_float: bool
    ) -> None:
        n, k = weight.shape
        kind = weight.kind if isinstance(weight, GroupedWeight) else "bf16"
        packed = torch.empty(lib.st_linear_size(_KIND_CODES[kind], n, k), dtype=torch.uint8)
        if isinstance(weight, GroupedWeight):
            numbers, scale = weight.numbers.contiguous(), weight.scale.contiguous()
            minimum = scale if weight.minimum is None else weight.minimum.contiguous()
            pointers = (part.data_ptr() for part in (numbers, scale, minimum, packed))
            lib.st_pack_groups(_KIND_CODES[kind], *pointers, n, scale.shape[1])
        else:
            lib.st_pack_wide(weight.contiguous().data_ptr(), packed.data_ptr(), n, k)
        super().__init__(kind, (n, k), packed, bias, as_float)
        self._call = multiply

    def __call__(self, x: Tensor) -> Tensor:
        x, rows = x.contiguous(), x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=torch.float32 if self._as_float else x.dtype)
        self._call(
            self._kind,
            x.data_ptr(),
            rows,
            self.in_features,
            self._pointer,
            self.out_features,
            self._bias_pointer,
            out.data_ptr(),
            int(self._as_float),
        )
        return out


class _TileLinear(_Packed):
    """By matrix tiles: bfloat16."""

    def __init__(self, lib: ctypes.CDLL, weight: Tensor, bias: Tensor | None, as_float: bool) -> None:
        n, k = weight.shape
        packed = torch.empty(lib.st_packed_size(n, k), dtype=torch.bfloat16)
        lib.st_pack_bf16(weight.data_ptr(), packed.data_ptr(), n, k)
        super().__init__("tiles", (n, k), packed, bias, as_float)
        self._call = lib.st_linear_tiles

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=torch.float32 if self._as_float else torch.bfloat16)
        self._call(
            x.data_ptr(),
            rows,
            self.in_features,
            self._pointer,
            self.out_features,
            self._bias_pointer,
            out.data_ptr(),
            int(self._as_float),
        )
        return out
