"""Throughput of a decode step as a formula with few unknowns, in which settings that were never measured have a place.

    tokens/s = C / (C q + step / L)

`C` requests run; `q` is what a token costs in prefill; `L` is tokens per verify step. A step of R rows costs weights
that are read once, experts that more rows reach (they saturate), work per row, drafting per depth, and host work per
row where it is not overlapped. All costs are relative to the first, so that one unknown carries the unit.

A draft's chance falls with its depth and differs from one kind of prompt to another. With a share w of the output
tokens, kinds come together as 1/L = sum of w/L(kind): each takes as many steps as its tokens need.

Which costs matter on a machine is not known beforehand: the priors are wide, and measurements decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tuner.search.encode import distinct
from tuner.search.shape import WITH, Shape

Array = np.ndarray
MOST_DEPTH = 16
STEP = 1e-5
"""Of the differences that derivatives by costs are taken by."""

CERTAIN = 1 - 1e-12
"""A chance that is as good as one."""

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


PREFILL, WIDTH = 4, 7
"""Where these are among them; all before `width` are costs."""


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _chance(logit: Array) -> Array:
    return 1 / (1 + np.exp(-logit))


DRAFTERS: Mapping[str, tuple[float, float, float]] = {
    "ngram": (0.35, 0.7, 0.003),
    "eagle3": (0.65, 0.0, 0.08),
    "mtp": (0.7, 0.0, 0.08),
    "draft_model": (0.65, 0.0, 0.2),
    "hybrid": (0.6, 0.2, 0.06),
}
"""Drafter → the chance that its first guess is right, by how much the log odds of one behind a right one are better,
and its cost per depth, as far as names tell; all uncertain. N-grams that go on to match seldom do so by chance."""

UNKNOWN_DRAFTER = (0.55, 0.0, 0.08)

OWN = (("right", 1.0), ("behind", 0.5), ("fall", 0.7), ("draft", 1.2), ("draft_row", 1.5))
"""The unknowns of a drafter, with standard deviations: what `DRAFTERS` has, how the chance falls from there with every
depth more, and a cost per row."""

ACCEPTS = 3
"""So many of these say how often a draft is accepted, the others what it costs."""


KIND_SD = 0.7
"""By how much the log odds of a draft are other for one kind of prompt, before anything tells."""


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

    @cached_property
    def accepting(self) -> tuple[Terms, Array]:
        """The rows that differ in what acceptance hangs on, each once; and which of them each row is."""
        on = np.stack([self.drafter, self.depth, self.topk, self.rows], axis=1).astype(np.int64)
        first, which = distinct(on)
        return self.at(first), which


@dataclass(frozen=True)
class Physics:
    """The formula for a space's drafters, and for the kinds of prompts that its traffic has (name → share of it)."""

    drafters: tuple[str, ...]
    kinds: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The unknowns, in order."""
        own = [f"{drafter}.{each}" for drafter in self.drafters for each, _ in OWN]
        odds = [f"{drafter}.{kind}" for kind in self.kinds for drafter in self.drafters]
        return (*(name for name, _, _ in COMMON), *own, *odds)

    @cached_property
    def prior_mean(self) -> Array:
        """What is expected before any measurement, but for the unit."""
        values = [mean for _, mean, _ in COMMON]
        for drafter in self.drafters:
            right, behind, cost = DRAFTERS.get(drafter.partition(WITH)[0], UNKNOWN_DRAFTER)
            values += [_logit(right), behind, _logit(0.93), math.log(cost), math.log(0.001)]
        return np.array(values + [0.0] * (len(self.drafters) * len(self.kinds)))

    @cached_property
    def prior_sd(self) -> Array:
        """How far off it may be."""
        own = [sd for _, sd in OWN] * len(self.drafters)
        return np.array([sd for _, _, sd in COMMON] + own + [KIND_SD] * (len(self.drafters) * len(self.kinds)))

    @cached_property
    def of_acceptance(self) -> Array:
        """Which unknowns acceptance hangs on; the rate hangs on those through it alone."""
        own = [i >= ACCEPTS for i in range(len(OWN))] * len(self.drafters)
        costs = [i < WIDTH for i in range(len(COMMON))] + own
        return np.flatnonzero([not cost for cost in costs] + [True] * (len(self.names) - len(costs)))

    @cached_property
    def of_costs(self) -> Array:
        """The other unknowns."""
        return np.setdiff1d(np.arange(len(self.names)), self.of_acceptance)

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

    def log_rate(self, theta: Array, terms: Terms) -> Array:
        """ln(tokens per second) of all requests together."""
        return self._log_rate(theta, terms, self.log_accept(theta, terms))

    def log_accept(self, theta: Array, terms: Terms) -> Array:
        """ln(tokens per verify step)."""
        distinct, which = terms.accepting
        return np.log(of_all(each_kind(self.reached(theta, distinct)), self.shares))[which]

    def reached(self, theta: Array, terms: Terms) -> Array:
        """The chance that a verify step accepts at least so many drafts: kinds × terms × depths from 1 on.

        Without kinds there is one that stands for all.
        """
        if not self.drafters:
            return np.zeros((len(self.shares), len(terms), int(terms.depth.max(initial=0))))
        return _reached(terms, *self._logits(theta, terms), theta[WIDTH])

    def _logits(self, theta: Array, terms: Terms) -> tuple[Array, Array, Array]:
        """Of the first draft and of one behind a right one, kinds × terms; of what is left of a chance, terms."""
        first, behind, fall = self._own(theta)[terms.drafter, :ACCEPTS].T
        odds = self._odds(theta)[:, terms.drafter]
        return first + odds, first + behind + odds, fall

    @cached_property
    def shares(self) -> Array:
        """Of the kinds, in order; of one that stands for all without them."""
        given = np.array([*self.kinds.values()], float)
        return given / given.sum() if len(given) else np.ones(1)

    def _log_rate(self, theta: Array, terms: Terms, log_accept: Array) -> Array:
        level = terms.level
        rows = terms.rows * level
        costs = np.exp(np.clip(theta[..., :WIDTH], -40, 40))[..., None]
        read, per_row, experts, knee, prefill, sync, sync_row = (costs[..., i, :] for i in range(WIDTH))
        step = 1 + per_row * rows + experts * -np.expm1(-rows / knee) + terms.sync * (sync + sync_row * rows)
        if self.drafters:
            draft = np.exp(np.clip(self._own(theta)[..., ACCEPTS:], -40, 40))[..., terms.drafter, :]
            speculates = (terms.drafter >= 0) * terms.depth
            step = step + speculates * (draft[..., 0] + draft[..., 1] * terms.topk * level)
        return np.log(level / read) - np.log(level * prefill + step * np.exp(-log_accept))

    def _own(self, theta: Array) -> Array:
        """The unknowns of the drafters, one row each."""
        own = theta[..., len(COMMON) : len(COMMON) + len(self.drafters) * len(OWN)]
        return own.reshape(*theta.shape[:-1], len(self.drafters), len(OWN))

    def _odds(self, theta: Array) -> Array:
        """What a kind adds to the log odds of a drafter: kinds × drafters."""
        if not self.kinds:
            return np.zeros((1, len(self.drafters)))
        return theta[len(COMMON) + len(self.drafters) * len(OWN) :].reshape(len(self.kinds), len(self.drafters))

    def jacobian(self, theta: Array, terms: Terms) -> Array:
        """Derivatives of `log_rate` by the unknowns, rows × unknowns."""
        distinct, which = terms.accepting
        each = each_kind(self.reached(theta, distinct))
        length = of_all(each, self.shares)
        by_each = self.shares * (length / each**2).T
        by_accept = self.slopes(theta, distinct, np.arange(len(distinct)), by_each)[which]
        moved = np.concatenate([theta[None, :], theta + STEP * np.eye(len(theta))[self.of_costs]])
        rates = self._log_rate(moved, terms, np.log(length)[which])
        found = np.zeros((len(terms), len(theta)))
        found[:, self.of_costs] = ((rates[1:] - rates[0]) / STEP).T
        # Of a request's time per token so much is steps, which acceptance divides; the rest is prefill.
        steps = 1 - np.exp(theta[0] + theta[PREFILL] + rates[0])
        found[:, self.of_acceptance] = by_accept * steps[:, None]
        return found

    def slopes(
        self, theta: Array, terms: Terms, at: Array, by_each: Array, deep: tuple[Array, Array] | None = None
    ) -> Array:
        """Derivatives of figures by the unknowns `of_acceptance`: figures × unknowns.

        Figure i hangs on the lengths of each kind (`each_kind`) in the row `at[i]` of the terms: `by_each`, figures ×
        kinds. `deep` is for each a depth, and by how much it hangs on what is `reached` there: figures × kinds.
        """
        found = np.zeros((len(at), len(self.of_acceptance)))
        if not self.drafters or not terms.depth.any():
            return found
        by = []
        for slopes in _slopes(terms, *self._logits(theta, terms), theta[WIDTH]):
            told = by_each * slopes.sum(axis=-1)[:, at].T
            if deep is not None:
                told += deep[1] * slopes[:, at, np.maximum(deep[0], 1) - 1].T
            by.append(told)
        by_right, by_later, by_fall, by_width = by
        by_odds = by_right + by_later
        mine = (terms.drafter[at][:, None] == np.arange(len(self.drafters))).astype(float)
        own = np.stack([each.sum(axis=1) for each in (by_odds, by_later, by_fall)], axis=1)
        columns = [by_width.sum(axis=1)[:, None], mine[:, :, None] * own[:, None, :]]
        if self.kinds:
            columns.append(by_odds[:, :, None] * mine[:, None, :])
        return np.concatenate([column.reshape(len(at), -1) for column in columns], axis=1, out=found)


def _right(terms: Terms, right: Array, later: Array, fall: Array) -> Array:
    """The chance that a draft is right which comes behind right ones only: kinds × terms × depths; of their logits."""
    found = _chance(later)[..., None] * _chance(fall)[:, None] ** np.arange(int(terms.depth.max(initial=0)))
    found[..., :1] = _chance(right)[..., None]
    return np.minimum(found, CERTAIN)


def _wide(terms: Terms) -> Array:
    """How many drafts a step tries at each depth, in the mean."""
    return np.maximum(np.minimum(terms.topk, (terms.rows - 1) / np.maximum(terms.depth, 1)), 1.0)


def _one_is(terms: Terms, right: Array, width: Array) -> Array:
    """The chance that one of the drafts at a depth is right."""
    tried = (terms.drafter >= 0)[:, None] & (np.arange(right.shape[-1]) < terms.depth[:, None])
    return np.where(tried, -np.expm1(_wide(terms)[:, None] ** width * np.log1p(-right)), 0.0)


def _reached(terms: Terms, right: Array, later: Array, fall: Array, width: Array) -> Array:
    """`Physics.reached`, of logits (`Physics._logits`) and the exponent of a tree's width."""
    return np.cumprod(_one_is(terms, _right(terms, right, later, fall), width), axis=-1)


def _slopes(terms: Terms, right: Array, later: Array, fall: Array, width: Array) -> tuple[Array, Array, Array, Array]:
    """Its derivatives by these."""
    chance = _right(terms, right, later, fall)
    one = _one_is(terms, chance, width)
    reached, power = np.cumprod(one, axis=-1), _wide(terms)[:, None] ** width
    none = np.divide(1 - one, one, out=np.zeros_like(one), where=one > 0)
    # Of logs: what a depth adds to them, all deeper ones have.
    by_chance = power * none / (1 - chance) * chance
    behind = np.arange(chance.shape[-1])
    return (
        reached * (by_chance[..., :1] * (1 - chance[..., :1])),
        reached * np.cumsum(by_chance * ((1 - _chance(later))[..., None] * (behind > 0)), axis=-1),
        reached * np.cumsum(by_chance * ((1 - _chance(fall))[:, None] * behind), axis=-1),
        reached * np.cumsum(-none * np.log1p(-chance) * power * np.log(_wide(terms))[:, None], axis=-1),
    )


def each_kind(reached: Array) -> Array:
    """Tokens per verify step of each kind (kinds × terms), of chances as `Physics.reached` tells them."""
    return 1 + reached.sum(axis=-1)


def of_all(each: Array, shares: Array) -> Array:
    """Tokens per verify step of all kinds, of those of `each` (kinds × terms)."""
    return 1 / (shares @ (1 / each))
