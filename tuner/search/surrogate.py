"""Physics and a Gaussian process on what it does not explain, fitted together to everything measured.

With the unknowns of the physics linearised at their best values (Laplace), both are one Gaussian model: the covariance
of two log rates is J S Jᵀ + K, of the unknowns' priors S and of the process K. So uncertainty of the physics and room
for its errors are weighed against one another, and where the formula is wrong by a constant, or has no place for a
setting, the process takes it up. What was seen of acceptance says nothing of rates: it comes first, and its posterior
is the rates' prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import least_squares

from tuner.search.acceptance import Seen, kinds_of, seen_of
from tuner.search.encode import Encoder, distinct
from tuner.search.evidence import Measurement
from tuner.search.physics import Array, Physics, Terms
from tuner.search.shape import Shape, drafter_of, shape_at

LAUNCH_SD = 0.006
"""What all blocks of one candidate have in common by chance."""

SIZES: tuple[tuple[float, float], ...] = tuple((own, rest) for own in (0.03, 0.1, 0.3) for rest in (0.02, 0.07, 0.25))
"""Standard deviations of what unknown settings do, and of what the physics gets wrong: between these."""

LOUD = (0.4, 1.0, 2.5, 6.0)
"""How many times the noise may be of what is told of it, which is the least: hosts that others use have more of it."""

USUAL_SIZES, SIZES_SD = (0.1, 0.07), 1.0
"""What they are before anything tells, and how far ln of them may be off: a setting that never varied says nothing."""

LEVEL_SD = 0.3
"""What the physics gets wrong of a level for all candidates alike; between two of them it cancels."""

MOST_BLOCKS = 240
"""Measurements that a fit takes at most; beyond them the best and an even choice of the rest stand for all."""

STEPS = 30
"""Of the search for the best unknowns, at most; half as many the second time."""

AT_ONCE = 512
"""Candidates whose likeness to all measured ones is worked out at a time, so that it stays near the processor."""

FREE_SD = 2.0
"""Of the constant that stands for the physics where it is left out."""


@dataclass(frozen=True)
class Catalogue:
    """Candidates in the form that a fit needs, made once for a space: `terms` has a row a candidate and level."""

    settings: tuple[Mapping[str, Any], ...]
    levels: tuple[int, ...]
    encoder: Encoder
    physics: Physics

    @classmethod
    def of(cls, settings: Sequence[Mapping[str, Any]], levels: Sequence[int]) -> Catalogue:
        """The catalogue of these settings."""
        drafters = sorted({drafter for each in settings if (drafter := drafter_of(each)) != "none"})
        return cls(tuple(settings), tuple(levels), Encoder.of(settings), Physics(tuple(drafters)))

    @cached_property
    def codes(self) -> Array:
        """Candidates × settings."""
        return self.encoder.encode(self.settings)

    @cached_property
    def terms(self) -> Terms:
        """Candidate after candidate, level after level."""
        shapes: list[Shape] = []
        for settings in self.settings:
            shapes += [shape_at(settings, level) for level in self.levels]
        return self.physics.terms(shapes, [*self.levels] * len(self.settings))

    def rows(self, candidates: Array) -> Terms:
        """The terms of some candidates at all levels."""
        count = len(self.levels)
        return self.terms.at((candidates[:, None] * count + np.arange(count)).ravel())


class Surrogate:
    """What is known after `measured`: log rates of any candidate at any level, with their uncertainty.

    Args:
        catalogue: the candidates of the space.
        measured: what was measured, of any settings and levels; not empty.
        fixed: settings that all candidates share.
        physics: False leaves the process alone, around a free constant.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        measured: Sequence[Measurement],
        fixed: Mapping[str, Any] | None = None,
        *,
        physics: bool = True,
    ) -> None:
        self.catalogue = catalogue
        self.with_physics = physics
        blocks = _thinned(measured, MOST_BLOCKS)
        told = {one.candidate.id: {**(fixed or {}), **one.candidate.settings} for one in blocks}
        place = {candidate: i for i, candidate in enumerate(told)}
        self.whose = np.array([place[one.candidate.id] for one in blocks])
        self.codes = catalogue.encoder.encode(list(told.values()))
        self.levels = np.array([one.level for one in blocks], float)
        shapes = [shape_at(told[one.candidate.id], one.level) for one in blocks]
        self.physics = replace(catalogue.physics, kinds=kinds_of(blocks) if physics else {})
        self.terms = self.physics.terms(shapes, [one.level for one in blocks])
        self.rates = np.array([math.log(one.tokens_per_s) for one in blocks])
        # An engine that goes below its depth where little is accepted tells of depths that nobody knows.
        as_set = [i for i, one in enumerate(blocks) if told[one.candidate.id].get("policy") != "adaptive"]
        self.seen: Seen | None = None
        if physics:
            self.seen = seen_of(self.physics, [blocks[i] for i in as_set], self.terms.at(np.array(as_set, int)))
        self.noise = np.array([one.sd**2 for one in blocks])
        self._fit()

    # -- fitting ----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        self.mean, self.var = self._prior()
        kernels = self._kernels(self.codes, self.codes)
        near = _near(self.levels, self.levels)
        kernels = tuple(kernel[np.ix_(self.whose, self.whose)] for kernel in kernels)
        noise = np.diag(self.noise) + LAUNCH_SD**2 * (self.whose[:, None] == self.whose[None, :])
        self.size, self.loud = USUAL_SIZES, 1.0
        # What blocks have in common hides where the unknowns lie: they are sought without that first, then with it.
        covariance = noise + _combined(kernels, self.size) * near
        self.theta = self._climb(self._climb(self.mean, np.diag(np.diag(covariance)), STEPS), covariance, STEPS)
        for last in (False, True):
            jacobian = self._jacobian(self.theta)
            mean, self.cov = self._after_seen(self.theta)
            gap = self.rates - self._predicted(self.theta) + jacobian @ (self.theta - mean)
            explained = jacobian @ self.cov @ jacobian.T
            if not last:
                told = []
                for size in SIZES:
                    shared = _combined(kernels, size) * near + explained
                    told += [_evidence(loud**2 * noise + shared, gap) for loud in LOUD]
                self.size, self.loud = _likely(told)
                noise = self.loud**2 * noise
                self.theta = self._climb(self.theta, noise + _combined(kernels, self.size) * near, STEPS // 2)
        self.jacobian = jacobian
        self.factor = cho_factor(noise + _combined(kernels, self.size) * near + explained, lower=True)
        self.weights = cho_solve(self.factor, gap)

    def _prior(self) -> tuple[Array, Array]:
        """Means and variances of the unknowns, with the unit put so that plain decoding at its lowest level is met."""
        if not self.with_physics:
            return np.array([float(self.rates.mean())]), np.array([FREE_SD**2])
        physics = self.physics
        theta = physics.prior_mean.copy()
        plain = np.flatnonzero(self.terms.depth == 0)
        some = plain if len(plain) else np.arange(len(self.rates))
        lowest = some[self.levels[some] == self.levels[some].min()]
        theta[0] = float(np.mean(physics.log_rate(theta, self.terms)[lowest] - self.rates[lowest]))
        return theta, physics.prior_sd**2

    def _after_seen(self, theta: Array) -> tuple[Array, Array]:
        """Mean and covariance of the unknowns after what was seen of acceptance, linearised at `theta`."""
        precision = np.diag(1 / self.var)
        if self.seen is None or not len(self.seen):
            return self.mean, np.diag(self.var)
        slopes = self._slopes_seen(theta)
        gap = slopes @ (theta - self.mean) - self._off_seen(theta)
        covariance = cho_solve(cho_factor(precision + slopes.T @ slopes), np.eye(len(theta)))
        return self.mean + covariance @ (slopes.T @ gap), covariance

    def _off_seen(self, theta: Array) -> Array:
        """How far what is expected of acceptance is off what was seen, in standard deviations."""
        if self.seen is None or not len(self.seen):
            return np.zeros(0)
        expected, *_ = self.seen.expected(self.physics.reached(theta, self.seen.terms), self.physics.shares)
        return (expected - self.seen.value) / np.sqrt(self.seen.var)

    def _slopes_seen(self, theta: Array) -> Array:
        """Its derivatives by the unknowns."""
        if self.seen is None or not len(self.seen):
            return np.zeros((0, len(theta)))
        seen, physics = self.seen, self.physics
        _, by_each, by_depth = seen.expected(physics.reached(theta, seen.terms), physics.shares)
        slopes = np.zeros((len(seen), len(theta)))
        found = physics.slopes(theta, seen.terms, seen.shape, by_each, (seen.depth, by_depth))
        slopes[:, physics.of_acceptance] = found
        return slopes / np.sqrt(seen.var)[:, None]

    def _climb(self, theta: Array, covariance: Array, steps: int) -> Array:
        """The unknowns that fit best, sought from `theta` on; `covariance` is what is left beside them."""
        factor, sd = cholesky(covariance, lower=True), np.sqrt(self.var)

        def off(at: Array) -> Array:
            rates = solve_triangular(factor, self._predicted(at) - self.rates, lower=True)
            return np.concatenate([rates, self._off_seen(at), (at - self.mean) / sd])

        def slopes(at: Array) -> Array:
            rates = solve_triangular(factor, self._jacobian(at), lower=True)
            return np.concatenate([rates, self._slopes_seen(at), np.diag(1 / sd)])

        found = least_squares(off, theta, slopes, x_scale=sd, max_nfev=steps, ftol=1e-4, xtol=1e-4, gtol=1e-4)
        return np.asarray(found.x)

    def _predicted(self, theta: Array) -> Array:
        if not self.with_physics:
            return np.full(len(self.rates), theta[0])
        return self.physics.log_rate(theta, self.terms)

    def _jacobian(self, theta: Array) -> Array:
        if not self.with_physics:
            return np.ones((len(self.rates), 1))
        return self.physics.jacobian(theta, self.terms)

    def _kernels(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Between candidates: of settings that physics does not know, and of all; each with standard deviation 1."""
        tables, other = self.catalogue.encoder.alike, self.catalogue.encoder.other
        own, total, product = np.zeros((len(a), len(b))), np.zeros((len(a), len(b))), np.ones((len(a), len(b)))
        # Half of the settings at a time: many candidates have few combinations of those.
        for half in np.array_split(np.arange(len(tables)), 2):
            first, which = distinct(a[:, half])
            some = a[first][:, half]
            mine, whole, times = (np.full((len(some), len(b)), start) for start in (0.0, 0.0, 1.0))
            for j, codes in zip(half, some.T, strict=True):
                alike = tables[j][:, b[:, j]][codes]
                whole += alike
                times *= 0.4 + 0.6 * alike
                if j in other:
                    mine += alike
            own += mine[which]
            total += whole[which]
            product *= times[which]
        return own, 0.3 + 0.3 * total / max(1, len(tables)) + 0.4 * product

    # -- predictions ------------------------------------------------------------------------------------------------

    def log_rates(self, candidates: Array | None = None) -> Array:
        """Expected ln(tokens per second), candidates × levels: of these, or of the whole catalogue."""
        catalogue = self.catalogue
        levels = np.array(catalogue.levels, float)
        codes = catalogue.codes if candidates is None else catalogue.codes[candidates]
        formula: Array = np.full((len(codes), len(levels)), self.theta[0])
        if self.with_physics:
            terms = catalogue.terms if candidates is None else catalogue.rows(candidates)
            formula = self.physics.log_rate(self.theta, terms).reshape(-1, len(levels))
        # At the best unknowns, what the linearised formula adds to itself is nothing: only the process is left.
        near = _near(levels, self.levels)
        carried: Array = np.zeros((len(self.codes), len(levels)))
        np.add.at(carried, self.whose, (near * self.weights).T)
        for first in range(0, len(codes), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            formula[some] += _combined(self._kernels(codes[some], self.codes), self.size) @ carried
        return formula

    def covariances(self, candidates: Array, base: int | None = None) -> Array:
        """Of the log rates at all levels, less those of candidate `base`: candidates × levels × levels."""
        levels = np.array(self.catalogue.levels, float)
        chosen = candidates if base is None else np.append(candidates, base)
        kernel = _combined(self._kernels(self.catalogue.codes[chosen], self.codes), self.size)
        moved = np.ones((len(chosen), len(levels), 1))
        if self.with_physics:
            moved = self.physics.jacobian(self.theta, self.catalogue.rows(chosen))
            moved = moved.reshape(len(chosen), len(levels), -1)
        cross = moved @ (self.cov @ self.jacobian.T)
        cross += kernel[:, None, self.whose] * _near(levels, self.levels)[None]
        near = _near(levels, levels)
        own = np.full(len(candidates), self._own())
        if base is not None:
            cross, moved = cross[:-1] - cross[-1], moved[:-1] - moved[-1]
            codes = self.catalogue.codes
            shared = _combined(self._kernels(codes[candidates], codes[[base]]), self.size)[:, 0]
            own = 2 * (own - shared)
        prior = own[:, None, None] * near + moved @ self.cov @ moved.transpose(0, 2, 1)
        solved = solve_triangular(self.factor[0], cross.reshape(-1, cross.shape[2]).T, lower=True)
        solved = solved.T.reshape(len(candidates), len(levels), -1)
        return prior - solved @ solved.transpose(0, 2, 1)

    def _own(self) -> float:
        return self.size[0] ** 2 * len(self.catalogue.encoder.other) + self.size[1] ** 2 + LEVEL_SD**2


def spread(covariances: Array, weights: Sequence[float]) -> Array:
    """Standard deviations of weighted sums over the levels."""
    w = np.array(weights)
    return np.sqrt(np.maximum(np.einsum("ijk,j,k->i", covariances, w, w), 1e-8))


def _near(a: Array, b: Array) -> Array:
    """How far what is learned at one level of concurrency carries to another."""
    far = np.log(a)[:, None] - np.log(b)[None, :]
    return 0.5 + 0.5 * np.exp(-0.5 * far**2)


def _combined(kernels: Sequence[Array], size: tuple[float, float]) -> Array:
    return size[0] ** 2 * kernels[0] + size[1] ** 2 * kernels[1] + LEVEL_SD**2


def _likely(evidences: Sequence[float]) -> tuple[tuple[float, float], float]:
    """The mean of `SIZES`, each with every `LOUD`, by how likely each is, of logs.

    The likeliest alone changes with a block or two.
    """
    tried = np.log([[*size, loud] for size in SIZES for loud in LOUD])
    beforehand = -0.5 * (((tried - np.log([*USUAL_SIZES, 1.0])) / SIZES_SD) ** 2).sum(axis=1)
    told = np.array(evidences) + beforehand
    chance = np.exp(told - told.max())
    own, rest, loud = np.exp(chance @ tried / chance.sum())
    return (float(own), float(rest)), max(1.0, float(loud))


def _evidence(covariance: Array, gap: Array) -> float:
    """Log marginal likelihood, but for its constant."""
    factor = cho_factor(covariance, lower=True)
    return -0.5 * float(gap @ cho_solve(factor, gap)) - float(np.log(np.diag(factor[0])).sum())


def _thinned(measured: Sequence[Measurement], most: int) -> list[Measurement]:
    """All, or as many as may be: half the fastest at their level, half an even choice of the others."""
    if len(measured) <= most:
        return list(measured)
    best: dict[int, float] = {}
    for one in measured:
        best[one.level] = max(best.get(one.level, 0.0), one.tokens_per_s)
    ranked = sorted(range(len(measured)), key=lambda i: -measured[i].tokens_per_s / best[measured[i].level])
    first, rest = ranked[: most // 2], sorted(ranked[most // 2 :])
    step = len(rest) / (most - len(first))
    chosen = first + [rest[int(i * step)] for i in range(most - len(first))]
    return [measured[i] for i in sorted(chosen)]
