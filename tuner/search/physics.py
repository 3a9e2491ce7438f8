"""Throughput of a decode step as a formula with few unknowns, in which settings that were never measured have a place.

    tokens/s = C / (C q + step / L)

`C` requests run; `q` is what a token costs in prefill; `L` is tokens per verify step. A step of R rows costs weights
that are read once, experts that more rows reach (they saturate), work per row, drafting per depth, and host work per
row where it is not overlapped. All costs are relative to the first, so that one unknown carries the unit.

Which costs matter on a machine is not known beforehand: the priors are wide, and measurements decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tuner.search.shape import Shape

Array = np.ndarray
MOST_DEPTH = 16
STEP = 1e-5
"""Of the differences that derivatives are taken by."""

COMMON: tuple[tuple[str, float, float], ...] = (
    ("read", 0.0, 2.0),
    ("per_row", math.log(0.008), 1.5),
    ("experts", math.log(0.3), 1.5),
    ("experts_rows", math.log(30.0), 1.0),
    ("prefill", math.log(0.003), 1.5),
    ("sync", math.log(0.02), 1.5),
    ("sync_row", math.log(0.003), 1.5),
    ("width", 0.5, 0.2),
)
"""Name, mean and standard deviation of the unknowns that every drafter shares; logs, but for the exponent `width`."""


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


DRAFTERS: Mapping[str, tuple[float, float]] = {
    "ngram": (0.35, 0.003),
    "eagle3": (0.65, 0.08),
    "mtp": (0.7, 0.08),
    "draft_model": (0.65, 0.2),
    "hybrid": (0.6, 0.06),
}
"""Drafter → the chance that its first guess is right, and its cost per depth, as far as names tell; both uncertain."""

UNKNOWN_DRAFTER = (0.55, 0.08)


@dataclass(frozen=True)
class Terms:
    """Shapes at levels, as columns. `drafter` counts into the physics' drafters; -1 is plain decoding."""

    level: Array
    depth: Array
    topk: Array
    rows: Array
    sync: Array
    drafter: Array

    def __len__(self) -> int:
        return len(self.level)

    def at(self, index: Array) -> Terms:
        """Some of the rows."""
        return Terms(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Physics:
    """The formula for a space's drafters."""

    drafters: tuple[str, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The unknowns, in order."""
        own = [f"{drafter}.{each}" for drafter in self.drafters for each in ("right", "fall", "draft", "draft_row")]
        return (*(name for name, _, _ in COMMON), *own)

    @cached_property
    def prior_mean(self) -> Array:
        """What is expected before any measurement, but for the unit."""
        values = [mean for _, mean, _ in COMMON]
        for drafter in self.drafters:
            right, cost = DRAFTERS.get(drafter, UNKNOWN_DRAFTER)
            values += [_logit(right), _logit(0.93), math.log(cost), math.log(0.001)]
        return np.array(values)

    @cached_property
    def prior_sd(self) -> Array:
        """How far off it may be."""
        return np.array([sd for _, _, sd in COMMON] + [1.0, 0.7, 1.2, 1.5] * len(self.drafters))

    def terms(self, shapes: Sequence[Shape], levels: Sequence[int]) -> Terms:
        """Columns of shapes, each at its level."""
        index = {name: i for i, name in enumerate(self.drafters)}
        return Terms(
            np.array(levels, float),
            np.array([min(shape.depth, MOST_DEPTH) for shape in shapes], int),
            np.array([shape.topk for shape in shapes], float),
            np.array([shape.rows for shape in shapes], float),
            np.array([shape.depth > 0 and not shape.overlap for shape in shapes], float),
            np.array([index.get(shape.drafter, -1) if shape.depth else -1 for shape in shapes], int),
        )

    def log_accept(self, theta: Array, terms: Terms) -> Array:
        """ln(tokens per verify step). `theta` may have leading axes, which the result has as well."""
        return np.log(self._accept(theta, terms))

    def log_rate(self, theta: Array, terms: Terms) -> Array:
        """ln(tokens per second) of all requests together; axes as of `log_accept`."""
        level = terms.level
        rows = terms.rows * level
        costs = np.exp(np.clip(theta[..., :7], -40, 40))[..., None]
        read, per_row, experts, knee, prefill, sync, sync_row = (costs[..., i, :] for i in range(7))
        step = 1 + per_row * rows + experts * -np.expm1(-rows / knee) + terms.sync * (sync + sync_row * rows)
        if self.drafters:
            draft = np.exp(np.clip(self._own(theta)[..., 2:], -40, 40))[..., terms.drafter, :]
            speculates = (terms.drafter >= 0) * terms.depth
            step = step + speculates * (draft[..., 0] + draft[..., 1] * terms.topk * level)
        return np.log(level / read) - np.log(level * prefill + step / self._accept(theta, terms))

    def _own(self, theta: Array) -> Array:
        """The unknowns of the drafters, one row each."""
        return theta[..., len(COMMON) :].reshape(*theta.shape[:-1], len(self.drafters), 4)

    def _accept(self, theta: Array, terms: Terms) -> Array:
        length = np.ones((*theta.shape[:-1], len(terms)))
        if not self.drafters:
            return length
        chances = 1 / (1 + np.exp(-self._own(theta)[..., :2]))
        wrong, fall = 1 - chances[..., terms.drafter, 0], chances[..., terms.drafter, 1]
        width = np.minimum(terms.topk, (terms.rows - 1) / np.maximum(terms.depth, 1))
        power = np.maximum(width, 1.0) ** theta[..., 7:8]
        reached = (terms.drafter >= 0).astype(float)
        right = 1 - wrong
        for depth in range(int(terms.depth.max(initial=0))):
            reached = reached * np.where(depth < terms.depth, 1 - (1 - right) ** power, 0.0)
            length = length + reached
            right = right * fall
        return length

    def jacobian(self, theta: Array, terms: Terms, *, accept: bool = False) -> Array:
        """Derivatives of `log_rate` (or `log_accept`) by the unknowns, rows × unknowns."""
        function = self.log_accept if accept else self.log_rate
        moved = np.concatenate([theta[None, :], theta + STEP * np.eye(len(theta))])
        found = function(moved, terms)
        return ((found[1:] - found[0]) / STEP).T
