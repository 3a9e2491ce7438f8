from __future__ import annotations

import math
import random

import pytest

from tuner.engines.speculation import schedule_problems
from tuner.search.crossing import Curve, as_threshold, best_depths, crossings, ratio, schedule, sides

LEVELS = (1, 8, 30, 100)


def curve(*values: float, sd: float = 0.02) -> Curve:
    return {level: (value, sd) for level, value in zip(LEVELS, values, strict=True)}


def test_a_crossing_lies_between_the_levels_where_the_sign_changes() -> None:
    (found,) = crossings(curve(-0.06, 0.02, 0.10, 0.05, sd=0.005))
    assert found.rising
    assert found.at == pytest.approx(math.exp(math.log(8) * 0.75), rel=0.01)
    assert 1 < found.low < found.at < found.high < 8
    below, above = sides(found.at)
    assert below < found.at <= above == below + 1


def test_more_noise_widens_the_interval_up_to_the_ends() -> None:
    narrow, wide = (crossings(curve(-0.06, 0.02, 0.10, 0.15, sd=sd))[0] for sd in (0.005, 0.1))
    assert wide.low <= narrow.low
    assert wide.high >= narrow.high
    assert (wide.low, wide.high) == (pytest.approx(1), pytest.approx(100))


def test_both_ways_are_found_and_no_crossing_is_none() -> None:
    assert [one.rising for one in crossings(curve(-0.1, 0.1, 0.1, -0.1))] == [True, False]
    assert crossings(curve(0.1, 0.2, 0.1, 0.05)) == ()
    assert crossings({1: (0.1, 0.01)}) == ()


def test_the_interval_holds_the_true_crossing_nineteen_times_in_twenty() -> None:
    draw, held = random.Random(1), 0
    for _ in range(300):
        values = [slope + draw.gauss(0, 0.02) for slope in (-0.10, 0.02, 0.1, 0.2)]
        found = [one for one in crossings(curve(*values, sd=0.02)) if one.rising]
        truth = math.exp(math.log(8) * 0.10 / 0.12)
        held += any(one.low <= truth <= one.high for one in found)
    assert held >= 0.9 * 300


def test_a_schedule_takes_the_fastest_depth_at_each_load() -> None:
    curves = {0: curve(0, 0, 0, 0), 3: curve(-0.06, 0.1, 0.1, -0.2), 1: curve(-0.03, 0.03, 0.05, 0.06)}
    assert best_depths(curves) == {1: 0, 8: 3, 30: 3, 100: 1}
    text = schedule(curves)
    assert text is not None
    assert [part.split(":")[1] for part in text.split(",")] == ["0", "3", "1"]
    assert schedule_problems(text, 3) == []
    sizes = [int(part.split(":")[0]) for part in text.split(",")]
    assert sizes[0] == 1 < sizes[1] <= 8
    assert 30 < sizes[2] <= 100


def test_what_noise_does_not_tell_apart_stays_shallow_and_one_depth_is_no_schedule() -> None:
    assert best_depths({0: curve(0, 0, 0, 0), 2: curve(0.001, 0.005, 0.001, 0.001)}) == dict.fromkeys(LEVELS, 0)
    assert schedule({0: curve(0, 0, 0, 0), 2: curve(0.2, 0.2, 0.2, 0.2)}) is None
    assert schedule({2: curve(0.2, 0.2, 0.2, 0.2)}) is None


def test_a_schedule_that_ends_speculation_is_a_threshold() -> None:
    assert as_threshold("1:3,9:0") == 8
    assert as_threshold("1:0,9:3") is None
    assert as_threshold("1:3,9:1") is None


def test_a_ratio_has_the_noise_of_both() -> None:
    assert ratio({1: (0.3, 0.03)}, {1: (0.1, 0.04), 8: (0.0, 0.1)}) == {1: (pytest.approx(0.2), pytest.approx(0.05))}
