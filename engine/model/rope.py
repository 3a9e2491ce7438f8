"""Rotary embedding: the angle of each pair of a head's elements at each position, with the scalings in use.

Every scaling here is one set of frequencies for all positions, so that cached keys stay valid as a request grows. The
"dynamic" one is not: its frequencies follow the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelBroken, UnsupportedModel

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """How a model rotates.

    Args:
        theta: base of the frequencies: pair i of D / 2 turns by theta**(-2 i / D) per position.
        scaling: one of `SCALINGS`.
        factor: by how much the context was stretched.
        original_context: tokens before that (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's: wavelengths above original_context / low are divided by `factor`,
            those below original_context / high are left, and between them it goes over smoothly.
        beta_fast, beta_slow: yarn's: pairs that turn more often than fast in the original context are left, those that
            turn less often than slow are divided by `factor`, linearly between (Peng et al., 2023).
        attention_factor: of cos and sin, yarn's; None: 0.1 ln(factor) + 1.
        truncate: yarn's: the two bounds are rounded outwards to whole pairs.
        divisors: of each pair's frequency, where a file lists them (GGUF's llama3); else empty.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_huggingface(cls, data: Mapping[str, Any]) -> Rope:
        """From a config.json. transformers 5 writes rope_parameters; before, rope_theta and rope_scaling stood alone.

        Raises:
            UnsupportedModel: another scaling, or a variant of one that is not computed here.
            ModelBroken: a scaling without its figures.
        """
        old = {"rope_theta": data.get("rope_theta"), **(data.get("rope_scaling") or {})}
        rope = {k: v for k, v in (data.get("rope_parameters") or old).items() if v is not None}
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling not in SCALINGS:
            raise UnsupportedModel(f"rope scaling '{scaling}' is not supported; supported: {', '.join(SCALINGS)}")
        if rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
        for name in ("mscale", "mscale_all_dim"):
            if scaling == "yarn" and rope.get(name):
                raise UnsupportedModel(f"yarn with {name} is not supported")
        if scaling != "default" and "factor" not in rope:
            raise ModelBroken(f"rope scaling '{scaling}' has no factor")
        same = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        given: dict[str, Any] = {name: float(rope[name]) for name in same if name in rope}
        original = rope.get("original_max_position_embeddings") or data.get("max_position_embeddings", 0)
        return cls(
            theta=float(rope.get("rope_theta", data.get("rope_theta") or 10000.0)),
            scaling=scaling,
            original_context=int(original),
            truncate=bool(rope.get("truncate", True)),
            **given,
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The `rope_parameters` that `from_huggingface` reads. `divisors` have no place there."""
        if self.scaling == "default":
            return {"rope_theta": self.theta, "rope_type": "default"}
        out: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.scaling, "factor": self.factor}
        if self.scaling != "linear":
            out["original_max_position_embeddings"] = self.original_context
        if self.scaling == "llama3":
            out |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.scaling == "yarn":
            out |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            if self.attention_factor is not None:
                out["attention_factor"] = self.attention_factor
        return out

    def tables(self, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [positions, D / 2]."""
        size = 1.0
        if self.scaling == "yarn":
            stretched = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
            size = stretched if self.attention_factor is None else self.attention_factor
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.angles(head_dim))
        return angles.cos() * size, angles.sin() * size

    def angles(self, head_dim: int) -> Tensor:
        """By which each pair turns per position, float32 [D / 2]."""
        inverse = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.divisors:
            inverse = inverse / torch.tensor(self.divisors)
        if self.scaling == "linear":
            return inverse / self.factor
        if self.scaling == "llama3":
            return self._llama3(inverse)
        return self._yarn(inverse, head_dim) if self.scaling == "yarn" else inverse

    def _llama3(self, inverse: Tensor) -> Tensor:
        turns = self.original_context * inverse / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(inverse / self.factor, inverse, kept.clamp(0, 1))

    def _yarn(self, inverse: Tensor, head_dim: int) -> Tensor:
        def pair_that_turns(times: float) -> float:
            wavelength = self.original_context / times
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        span = last - first or 0.001
        divided = ((torch.arange(len(inverse)) - first) / span).clamp(0, 1)
        return torch.lerp(inverse, inverse / self.factor, divided)
