"""Physics and a Gaussian process on what it does not explain, fitted together to everything measured.

With the unknowns of the physics linearised at their best values (Laplace), both are one Gaussian model: the covariance
of two log rates is J S Jᵀ + K, of the unknowns' priors S and of the process K. So uncertainty of the physics and room
for its errors are weighed against one another, and where the formula is wrong by a constant, or has no place for a
setting, the process takes it up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from tuner.search.encode import Encoder
from tuner.search.evidence import Measurement
from tuner.search.physics import Array, Physics, Terms
from tuner.search.shape import Shape, shape_at

ACCEPT_SD = 0.04
"""Of ln(accept length): by prompts, and by what engines count."""

LAUNCH_SD = 0.006
"""What all blocks of one candidate have in common by chance."""

SIZES: tuple[tuple[float, float], ...] = tuple((own, rest) for own in (0.03, 0.1, 0.3) for rest in (0.02, 0.07, 0.25))
"""Tried standard deviations of what unknown settings do, and of what the physics gets wrong."""

MOST_BLOCKS = 300
"""Measurements that a fit takes at most; beyond them the best and an even choice of the rest stand for all."""

STEPS = 8
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
        drafters = sorted({str(s["speculation"]) for s in settings if s.get("speculation", "none") != "none"})
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
        self.terms = catalogue.physics.terms(shapes, [one.level for one in blocks])
        self.rates = np.array([math.log(one.tokens_per_s) for one in blocks])
        accepted = [i for i, one in enumerate(blocks) if one.accept_length and shapes[i].depth] if physics else []
        self.accepted = np.array(accepted, int)
        self.targets = np.concatenate(
            [self.rates, [math.log(max(1.0, blocks[i].accept_length or 1.0)) for i in accepted]]
        )
        self.noise = np.array([one.sd**2 for one in blocks])
        self._fit()

    # -- fitting ----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        self.mean, self.var = self._prior()
        kernels = self._kernels(self.codes, self.codes)
        near = _near(self.levels, self.levels)
        kernels = tuple(kernel[np.ix_(self.whose, self.whose)] * near for kernel in kernels)
        noise = np.diag(self.noise) + LAUNCH_SD**2 * (self.whose[:, None] == self.whose[None, :])
        self.size = (0.1, 0.07)
        self.theta = self._climb(self.mean, noise + _combined(kernels, self.size), STEPS)
        for last in (False, True):
            jacobian = self._jacobian(self.theta)
            gap = self.targets - self._predicted(self.theta) + jacobian @ (self.theta - self.mean)
            if not last:
                sums = [self._whole(noise + _combined(kernels, size), jacobian) for size in SIZES]
                self.size = SIZES[int(np.argmax([_evidence(whole, gap) for whole in sums]))]
                self.theta = self._climb(self.theta, noise + _combined(kernels, self.size), STEPS // 2)
        self.jacobian = jacobian
        self.factor = cho_factor(self._whole(noise + _combined(kernels, self.size), jacobian), lower=True)
        self.weights = cho_solve(self.factor, gap)

    def _prior(self) -> tuple[Array, Array]:
        """Means and variances of the unknowns, with the unit put so that plain decoding at its lowest level is met."""
        if not self.with_physics:
            return np.array([float(self.rates.mean())]), np.array([FREE_SD**2])
        physics = self.catalogue.physics
        theta = physics.prior_mean.copy()
        plain = np.flatnonzero(self.terms.depth == 0)
        some = plain if len(plain) else np.arange(len(self.rates))
        lowest = some[self.levels[some] == self.levels[some].min()]
        theta[0] = float(np.mean(physics.log_rate(theta, self.terms)[lowest] - self.rates[lowest]))
        return theta, physics.prior_sd**2

    def _climb(self, theta: Array, covariance: Array, steps: int) -> Array:
        """Gauss-Newton steps of the unknowns, each as far as it helps; `covariance` is what is left beside them."""
        n, m = len(self.rates), len(self.targets)
        left = np.diag(np.full(m, ACCEPT_SD**2))
        left[:n, :n] = covariance
        factor = cho_factor(left, lower=True)

        def cost(at: Array) -> float:
            off = self.targets - self._predicted(at)
            return float(off @ cho_solve(factor, off) + ((at - self.mean) ** 2 / self.var).sum())

        here = cost(theta)
        for _ in range(steps):
            jacobian = self._jacobian(theta)
            solved = cho_solve(factor, jacobian)
            slope = solved.T @ (self.targets - self._predicted(theta)) - (theta - self.mean) / self.var
            move = np.linalg.solve(jacobian.T @ solved + np.diag(1 / self.var), slope)
            for scale in (1.0, 0.3, 0.05):
                there = cost(theta + scale * move)
                if there < here:
                    break
            else:
                break
            theta, gained, here = theta + scale * move, here - there, there
            if gained < 1e-2:
                break
        return theta

    def _predicted(self, theta: Array) -> Array:
        if not self.with_physics:
            return np.full(len(self.rates), theta[0])
        physics = self.catalogue.physics
        rates, accepts = physics.log_rate(theta, self.terms), physics.log_accept(theta, self.terms.at(self.accepted))
        return np.concatenate([rates, accepts])

    def _jacobian(self, theta: Array) -> Array:
        if not self.with_physics:
            return np.ones((len(self.rates), 1))
        physics = self.catalogue.physics
        accepts = physics.jacobian(theta, self.terms.at(self.accepted), accept=True)
        return np.concatenate([physics.jacobian(theta, self.terms), accepts])

    def _whole(self, covariance: Array, jacobian: Array) -> Array:
        n, m = len(self.rates), len(jacobian)
        whole = (jacobian * self.var) @ jacobian.T
        whole[:n, :n] += covariance
        whole[np.arange(n, m), np.arange(n, m)] += ACCEPT_SD**2
        return whole

    def _kernels(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Between candidates: of settings that physics does not know, and of all; each with standard deviation 1."""
        tables, other = self.catalogue.encoder.alike, self.catalogue.encoder.other
        total, own, product = np.zeros((len(a), len(b))), np.zeros((len(a), len(b))), np.ones((len(a), len(b)))
        for j, table in enumerate(tables):
            alike = table[a[:, j]][:, b[:, j]]
            total += alike
            product *= 0.4 + 0.6 * alike
            if j in other:
                own += alike
        return own, 0.3 + 0.3 * total / max(1, len(tables)) + 0.4 * product

    # -- predictions ------------------------------------------------------------------------------------------------

    def log_rates(self) -> Array:
        """Expected ln(tokens per second), candidates × levels of the catalogue."""
        levels = np.array(self.catalogue.levels, float)
        formula: Array = np.full(len(self.catalogue.terms), self.theta[0])
        if self.with_physics:
            formula = self.catalogue.physics.log_rate(self.theta, self.catalogue.terms)
        # At the best unknowns, what the linearised formula adds to itself is nothing: only the process is left.
        kernel = _combined(self._kernels(self.catalogue.codes, self.codes), self.size)
        near = _near(levels, self.levels)
        carried: Array = np.zeros((len(self.codes), len(levels)))
        np.add.at(carried, self.whose, (near * self.weights[: len(self.rates)]).T)
        return formula.reshape(-1, len(levels)) + kernel @ carried

    def covariances(self, candidates: Array, base: int | None = None) -> Array:
        """Of the log rates at all levels, less those of candidate `base`: candidates × levels × levels."""
        levels = np.array(self.catalogue.levels, float)
        chosen = candidates if base is None else np.append(candidates, base)
        kernel = _combined(self._kernels(self.catalogue.codes[chosen], self.codes), self.size)
        moved = np.ones((len(chosen), len(levels), 1))
        if self.with_physics:
            moved = self.catalogue.physics.jacobian(self.theta, self.catalogue.rows(chosen))
            moved = moved.reshape(len(chosen), len(levels), -1)
        cross = (moved * self.var) @ self.jacobian.T
        cross[:, :, : len(self.rates)] += kernel[:, None, self.whose] * _near(levels, self.levels)[None]
        near = _near(levels, levels)
        own = np.full(len(candidates), self._own())
        if base is not None:
            cross, moved = cross[:-1] - cross[-1], moved[:-1] - moved[-1]
            codes = self.catalogue.codes
            shared = _combined(self._kernels(codes[candidates], codes[[base]]), self.size)[:, 0]
            own = 2 * (own - shared)
        prior = own[:, None, None] * near + (moved * self.var) @ moved.transpose(0, 2, 1)
        solved = solve_triangular(self.factor[0], cross.reshape(-1, cross.shape[2]).T, lower=True)
        solved = solved.T.reshape(len(candidates), len(levels), -1)
        return prior - solved @ solved.transpose(0, 2, 1)

    def _own(self) -> float:
        return self.size[0] ** 2 * len(self.catalogue.encoder.other) + self.size[1] ** 2


def spread(covariances: Array, weights: Sequence[float]) -> Array:
    """Standard deviations of weighted sums over the levels."""
    w = np.array(weights)
    return np.sqrt(np.maximum(np.einsum("ijk,j,k->i", covariances, w, w), 1e-8))


def _near(a: Array, b: Array) -> Array:
    """How far what is learned at one level of concurrency carries to another."""
    far = np.log(a)[:, None] - np.log(b)[None, :]
    return 0.5 + 0.5 * np.exp(-0.5 * far**2)


def _combined(kernels: Sequence[Array], size: tuple[float, float]) -> Array:
    return size[0] ** 2 * kernels[0] + size[1] ** 2 * kernels[1]


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
