"""The few operations a model is made of, behind one protocol, so that a model is written once for every device.

T rows of this forward, H hidden size, D head size, Q and G query and KV heads, V vocabulary, B requests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.ops.grouped import GroupedWeight


@dataclass(frozen=True)
class View:
    """What one forward reads and writes, fixed before it starts. Rows of one request are neighbours.

    Attributes:
        tokens: int64 [T], input ids.
        positions: int32 [T], for the rotary embedding: committed length + depth in the draft tree.
        slots: int64 [T], where each row's keys and values are stored: page * page_size + offset.
        page_table: int32 [requests at most, pages at most], pages of each request by logical position.
        page_size: tokens per page.
        table_row: int32 [B], the requests' rows in `page_table`.
        row_start: int32 [B + 1], the requests' first rows, then T.
        context: int32 [B], tokens already in the cache and visible to every row of the request.
        mask: uint8, concatenated [n, w] matrices: whether row i of a request sees the key j places behind its context;
            None: all are causal.
        mask_start: int64 [B], offset of each request's matrix in `mask`, -1 where it is causal.
        logit_rows: int64 [R], the rows whose logits are wanted.
        mask_width: int32 [B], w of each request; None: its rows, which are then the keys themselves.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    page_size: int
    table_row: Tensor
    row_start: Tensor
    context: Tensor
    mask: Tensor | None
    mask_start: Tensor
    logit_rows: Tensor
    mask_width: Tensor | None = None

    def on(self, device: torch.device) -> View:
        """The same there, copied without waiting for the device."""
        if self.tokens.device == device:
            return self
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        there: dict[str, Any] = {name: sent(value, device) for name, value in tensors.items()}
        return replace(self, **there)


class Linear(Protocol):
    """A weight prepared for multiplication: x [T, in] → [T, out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        ...


@dataclass(frozen=True)
class Layer:
    """A decoder layer's parts; `head_norms`: of each head of the queries and the keys, [D] each (Qwen3)."""

    attention_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Stack:
    """A model's layers and what they share; `rope`: see `Ops.rope_store`; `ranks`: over whom the layers are cut."""

    layers: tuple[Layer, ...]
    final_norm: Tensor
    rope: tuple[Tensor, Tensor]
    eps: float
    q_heads: int
    kv_heads: int
    head_dim: int
    ranks: Ranks


class Hook(NamedTuple):
    """Adding up over all ranks, for compiled kernels: addresses of a `ReduceHook` (layers.hpp) and its argument."""

    function: int
    group: int


class Ranks(Protocol):
    """What a stack of layers needs to know of the ranks that it is cut over."""

    def hook(self) -> Hook | None:
        """None where the layers are whole."""
        ...

    def failure(self) -> Exception:
        """Why the hook's last call failed."""
        ...


class Fused(Protocol):
    """All layers in one call."""

    def __call__(
        self, residual: Tensor, view: View, k: Tensor, v: Tensor, wanted: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Final normed hidden states [T, H] and the wanted layers' outputs side by side [T, len(wanted) H].

        residual: embeddings [T, H], overwritten. k, v: caches [layers, slots, G, D], written at the view's slots.
        """
        ...


class Ops(Protocol):
    """One implementation of the operations; `describe` says what it is, for `/server_info`."""

    name: str

    def describe(self, weights: str) -> dict[str, str]:
        """Kernel by operation, for a model whose linear layers keep their weights so (see `linear`)."""
        ...

    def linear(
        self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, as_float: bool = False, weights: str = "auto"
    ) -> Linear:
        """Prepare weight [out, in].

        Args:
            weight: values, or whole numbers as they are.
            bias: [out].
            as_float: results in float32 whatever the type of x (logits).
            weights: how values are kept: "bf16", "int8" or "int4" (`engine.ops.grouped`); else in their own type.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / rms(x) * weight."""
        ...

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add delta to `residual` in place, then `rms_norm` of it."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] → silu(first half) * second half, [T, I]."""
        ...

    def rope_store(
        self, qkv: Tensor, view: View, rope: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, q_heads: int
    ) -> None:
        """Rotate q in qkv [T, (Q + 2G) D] in place; store rotated k, and v, to caches [slots, G, D].

        rope: cos and sin, float32 [positions, D / 2].
        """
        ...

    def attention(self, qkv: Tensor, view: View, k_cache: Tensor, v_cache: Tensor, q_heads: int) -> Tensor:
        """Attention of the rows' queries over what the view lets them see, scaled by D**-0.5: [T, Q D]."""
        ...

    def fuse(self, stack: Stack) -> Fused | None:
        """All layers as one call with the same results to the last bit, or None where there is no such call."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Of float32 [R, V]: int64 [R], the first of equals; -1 for a row that holds a NaN."""
        ...

    def choose(
        self,
        logits: Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        coin: np.ndarray,
        min_p: np.ndarray,
    ) -> np.ndarray:
        """One token per row of float32 logits [R, V] on the host; int64 [R], -1 where a row holds a NaN.

        Per row: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; `coin` in [0, 1) picks from the
        cumulative weights, by token id where all tokens stand, else from the likeliest down. min_p, then top_k, then
        top_p, each of what the one before has left.
        """
        ...

    def likeliest(self, logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of float32 [R, V] the `count` likeliest tokens of each row, best first: log-probabilities, float64
        [R, count], and indices, int64; NaN scores for a row that holds one."""
        ...


class DeviceOps(Ops, Protocol):
    """What a device with memory of its own does besides: choosing and accepting tokens without the host.

    Nothing here waits for the device, and no shape depends on values.
    """

    def sample(self, logits: Tensor, temperature: Tensor, coin: Tensor) -> Tensor:
        """`choose` for rows without top-k, top-p and min-p: float32 [R, V], float64 [R] above 0 and [R] → int64 [R]."""
        ...

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`likeliest`, left where it is: float64 and int64 [R, count]."""
        ...

    def accept(
        self, drafts: Tensor, parent: Tensor, start: Tensor, chosen: Tensor, deepest: int, most: int
    ) -> tuple[Tensor, Tensor]:
        """`engine.spec.accept.accept`: lengths, int64 [B], and paths, int64 [B, deepest + 1].

        drafts, parent, chosen: int64 [N]; start: int64 [B + 1]; `most`: nodes of the largest tree.
        """
        ...


def causal_view(tokens: Tensor, page_table: Tensor, page_size: int) -> View:
    """One request's whole prompt with an empty cache, its pages in row 0: for tests and one-off forwards."""
    n = len(tokens)
    at = torch.arange(n)
    return View(
        tokens=tokens,
        positions=at.int(),
        slots=page_table[0, at // page_size].long() * page_size + at % page_size,
        page_table=page_table,
        page_size=page_size,
        table_row=torch.zeros(1, dtype=torch.int32),
        row_start=torch.tensor([0, n], dtype=torch.int32),
        context=torch.zeros(1, dtype=torch.int32),
        mask=None,
        mask_start=torch.full((1,), -1, dtype=torch.int64),
        logit_rows=at,
    )


def rows_of(x: Tensor, at: Tensor | np.ndarray) -> Tensor:
    """x[at] for int64 indices into the first axis.

    Not written x[at], since torch then wakes its OpenMP threads even for a few rows: 20 ms for what takes 20 µs, seen
    with one other process on the same cores.
    """
    return torch.index_select(x, 0, sent(at, x.device))


def sent(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """The same values there, copied from pinned memory without waiting for the device."""
    values = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return values if values.device == device else values.pin_memory().to(device, non_blocking=True)
