"""Weights as whole numbers in groups, and the activations they are multiplied with: what int8 and int4 mean here.

A weight [out, in] is cut along `in` into groups of 32. int4 holds numbers 0 to 15 with a scale and a minimum per group
(the values of GGUF's Q4_1 and Q4_0 exactly), int8 numbers from -127 to 127 with a scale (those of Q8_0). Activations
are rounded to 8 bits by groups of 32 as well, each row for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
KINDS = ("int8", "int4")


@dataclass(frozen=True)
class GroupedWeight:
    """value = scale * number + minimum.

    Attributes:
        kind: "int8" or "int4".
        numbers: [out, groups * 32], int8 or (int4, one to a byte) uint8; zeros behind `columns`.
        scale: float16 [out, groups].
        minimum: float16 [out, groups]; None for int8.
        columns: the weight's own `in`.
    """

    kind: str
    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.numbers.shape[0], self.columns

    def rows(self, index: Tensor) -> GroupedWeight:
        """These rows (int64), in this order."""
        minimum = None if self.minimum is None else self.minimum[index]
        return GroupedWeight(self.kind, self.numbers[index], self.scale[index], minimum, self.columns)

    def columns_of(self, at: range) -> GroupedWeight:
        """These columns: whole groups, but for a last one that is the weight's own last."""
        assert at.start % GROUP == 0, at
        assert at.stop % GROUP == 0 or at.stop == self.columns, at
        groups = slice(at.start // GROUP, -(-at.stop // GROUP))
        numbers = self.numbers[:, groups.start * GROUP : groups.stop * GROUP]
        minimum = None if self.minimum is None else self.minimum[:, groups].contiguous()
        return GroupedWeight(self.kind, numbers.contiguous(), self.scale[:, groups].contiguous(), minimum, len(at))

    def dequantize(self) -> Tensor:
        """The values, float32 [out, in]."""
        values = self.numbers.float().unflatten(1, (-1, GROUP)) * self.scale.float().unsqueeze(-1)
        if self.minimum is not None:
            values = values + self.minimum.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.columns]


def stack(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of one kind and one `in`, one below the other."""
    first = parts[0]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return GroupedWeight(
        first.kind,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
        first.columns,
    )


def quantize(weight: Tensor, kind: str) -> GroupedWeight:
    """The nearest such numbers for weight [out, in]: int8 by the group's largest magnitude, int4 by its range."""
    groups = _groups(weight.float())
    if kind == "int8":
        scale = (groups.abs().amax(-1) / 127).half()
        numbers = (groups / _divisor(scale)).round().clamp(-127, 127).to(torch.int8)
        return GroupedWeight(kind, numbers.flatten(1), scale, None, weight.shape[1])
    low = groups.amin(-1)
    minimum, scale = low.half(), ((groups.amax(-1) - low) / 15).half()
    numbers = ((groups - minimum.float().unsqueeze(-1)) / _divisor(scale)).round().clamp(0, 15).to(torch.uint8)
    # What fills the last group is multiplied with zeros, whatever it is.
    return GroupedWeight(kind, numbers.flatten(1), scale, minimum, weight.shape[1])


def round_rows(x: Tensor) -> Tensor:
    """Activations [T, in] as the kernels see them, float32: by groups, 127 steps up to the largest magnitude."""
    groups = _groups(x.float())
    largest = groups.abs().amax(-1, keepdim=True)
    # Not 127 / largest, which torch computes as 127 * (1 / largest): rounded twice.
    inverse = torch.where(largest > 1e-30, torch.tensor(127.0).div(largest), 0.0)
    rounded = (groups * inverse).round() * (largest / 127)
    return rounded.flatten(1)[:, : x.shape[1]]


def grouped_linear(x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 [T, out] of x [T, in] and dequantised values [out, in]; the oracle of the compiled kernels."""
    return functional.linear(round_rows(x), values, None if bias is None else bias.float())


def _groups(values: Tensor) -> Tensor:
    missing = -values.shape[1] % GROUP
    return functional.pad(values, (0, missing)).unflatten(1, (-1, GROUP))


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale.float(), 1.0).unsqueeze(-1)
