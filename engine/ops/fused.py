"""Calls of the compiled kernels that run all layers at once (layers.hpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.ops.base import Stack, View

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_NOT_ADDED_UP = 2


class LinearRef(ctypes.Structure):
    """`LinearRef` of layers.hpp."""

    _fields_ = (("kind", _I64), ("n", _I64), ("k", _I64), ("weights", _P), ("bias", _P))


class _LayerRef(ctypes.Structure):
    _fields_ = (
        *(("attention_norm", _P), ("mlp_norm", _P)),
        *((name, LinearRef) for name in ("qkv", "out", "gate_up", "down")),
    )


class _StackRef(ctypes.Structure):
    _fields_ = (
        *(("layers", ctypes.POINTER(_LayerRef)), ("count", _I64), ("q_heads", _I64), ("kv_heads", _I64), ("dim", _I64)),
        *(("final_norm", _P), ("cos_table", _P), ("sin_table", _P), ("eps", ctypes.c_double)),
        *(("all_reduce", _P), ("group", _P)),
    )


class _RowsRef(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("rows", "requests", "pages_per_request", "page_size")),
        *((name, _P) for name in ("positions", "page_table", "table_row", "row_start", "context", "mask_width")),
        *((name, _P) for name in ("slots", "mask_start", "mask", "k_cache", "v_cache")),
        ("cache_stride", _I64),
    )


class FusedLayers:
    """The layers of one model, by pointers into its tensors, which it keeps alive."""

    def __init__(self, function: Any, stack: Stack, linears: Sequence[Sequence[LinearRef]]) -> None:
        """`linears`: of each layer qkv, out, gate_up, down."""
        self._function, self._stack = function, stack
        self._layers = (_LayerRef * len(stack.layers))()
        for target, layer, four in zip(self._layers, stack.layers, linears, strict=True):
            target.attention_norm, target.mlp_norm = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
            target.qkv, target.out, target.gate_up, target.down = four
        cos, sin = stack.rope
        hook = stack.ranks.hook()
        self._ref = _StackRef(
            layers=self._layers,
            count=len(stack.layers),
            q_heads=stack.q_heads,
            kv_heads=stack.kv_heads,
            dim=stack.head_dim,
            final_norm=stack.final_norm.data_ptr(),
            cos_table=cos.data_ptr(),
            sin_table=sin.data_ptr(),
            eps=stack.eps,
            all_reduce=hook.function if hook else None,
            group=hook.group if hook else None,
        )

    def __call__(
        self, residual: Tensor, view: View, k: Tensor, v: Tensor, wanted: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.fuse`."""
        rows, hidden = residual.shape
        normed = torch.empty_like(residual)
        features = torch.empty(rows, len(wanted) * hidden, dtype=residual.dtype)
        ref = _RowsRef(
            rows=rows,
            requests=view.table_row.shape[0],
            pages_per_request=view.page_table.shape[1],
            page_size=view.page_size,
            positions=view.positions.data_ptr(),
            page_table=view.page_table.data_ptr(),
            table_row=view.table_row.data_ptr(),
            row_start=view.row_start.data_ptr(),
            context=view.context.data_ptr(),
            mask_width=None if view.mask_width is None else view.mask_width.data_ptr(),
            slots=view.slots.data_ptr(),
            mask_start=view.mask_start.data_ptr(),
            mask=None if view.mask is None else view.mask.data_ptr(),
            k_cache=k.data_ptr(),
            v_cache=v.data_ptr(),
            cache_stride=k.stride(0),
        )
        layers = (ctypes.c_int32 * max(1, len(wanted)))(*wanted)
        status = self._function(
            ctypes.byref(self._ref),
            ctypes.byref(ref),
            residual.data_ptr(),
            normed.data_ptr(),
            layers,
            len(wanted),
            features.data_ptr(),
        )
        if status == _NOT_ADDED_UP:
            raise self._stack.ranks.failure()
        return normed, features
