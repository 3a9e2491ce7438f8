"""Finds the free parameters of the reference machine: `python -m tuner.engines.simulated.fit`.

Six figures are fitted. The two at 100 are held out: with 30 requests a level there were at most 30 in flight, so the
figures at "100" are a second look at 30, which the fit has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from tuner.engines.simulated.machine import Work, predict
from tuner.engines.simulated.profiles import FITTED, Fitted, reference, reference_profile

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "baseline": {"speculation": "none"},
    "topk1_spec_v2": {"speculation": "eagle3", "num_steps": 3, "topk": 1, "spec_version": "v2"},
    "topk4_spec_v1": {"speculation": "eagle3", "num_steps": 3, "topk": 4, "num_draft_tokens": 8, "spec_version": "v1"},
}
"""The published variants. Depth 3 and 8 rows were not published: they are the server's usual values."""

HELD_OUT = (("baseline", 100), ("topk1_spec_v2", 100))


def ratios(fitted: Fitted) -> dict[tuple[str, int], float]:
    """(variant, level) → predicted / published tokens per second, for all published figures."""
    data = reference()
    profile = reference_profile(fitted)
    work = Work(output_tokens=data["workload"]["max_tokens"])
    in_flight = data["workload"]["requests_per_level"]
    return {
        (variant, int(level)): predict(profile, VARIANTS[variant], min(int(level), in_flight), work).tokens_per_s / rate
        for variant, rates in data["throughput_tok_s"].items()
        for level, rate in rates.items()
    }


def fit() -> Fitted:
    """The parameters that bring the fitted figures closest, by least squares of the log ratios."""

    def residuals(x: np.ndarray) -> list[float]:
        return [math.log(r) for key, r in ratios(_decoded(x)).items() if key not in HELD_OUT]

    start = np.log(astuple(FITTED))
    start[2] = math.log(FITTED.accept / (1 - FITTED.accept))
    return _decoded(least_squares(residuals, start, x_scale=0.1).x)


def _decoded(x: np.ndarray) -> Fitted:
    a, b, c, d, e = (float(value) for value in x)
    return Fitted(math.exp(a), math.exp(b), 1 / (1 + math.exp(-c)), math.exp(d), math.exp(e))


if __name__ == "__main__":
    found = fit()
    print(found)
    for key, ratio in ratios(found).items():
        print(f"{key[0]:15} {key[1]:4} {100 * (ratio - 1):+6.2f} %{'  held out' if key in HELD_OUT else ''}")
