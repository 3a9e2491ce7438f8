"""Speed-ups that differ between places are seen, and those that differ by chance are not."""

from __future__ import annotations

import math
import random

import pytest

from tuner.judge.places import differences


def pairs(rng: random.Random, mean: float, n: int, sd: float = 0.01) -> list[float]:
    return [rng.gauss(mean, sd) for _ in range(n)]


def test_a_candidate_that_gains_at_one_host_alone_is_named_with_both_figures() -> None:
    rng = random.Random(1)
    ratios = {
        ("fast", 8): {"a": pairs(rng, 0.12, 3), "b": pairs(rng, 0.02, 3)},
        ("same", 8): {"a": pairs(rng, 0.05, 3), "b": pairs(rng, 0.05, 3)},
    }
    found = differences(ratios)
    assert [(each.candidate_id, each.concurrency) for each in found] == [("fast", 8)]
    assert found[0].speedups["a"] == pytest.approx(1.127, abs=0.02)
    assert "gains +1" in found[0].sentence
    assert " at a, " in found[0].sentence
    assert 1 < found[0].low < found[0].speedups["a"] / found[0].speedups["b"] < found[0].high
    assert "a beside b: +" in found[0].sentence


def test_the_interval_of_a_difference_holds_the_true_one_as_often_as_it_says() -> None:
    rng = random.Random(3)
    found = [
        each
        for _ in range(300)
        for each in differences({("x", 1): {"a": pairs(rng, 0.2, 4, 0.03), "b": pairs(rng, 0.1, 4, 0.03)}})
    ]
    assert len(found) > 280
    held = sum(each.low <= math.exp(0.1) <= each.high for each in found)
    assert held >= 0.92 * len(found), "95 % were promised"


def test_places_that_are_alike_are_seldom_said_to_differ() -> None:
    rng = random.Random(2)
    wrong = 0
    for _ in range(400):
        ratios = {(c, 1): {place: pairs(rng, 0.1, 2, 0.03) for place in "abc"} for c in ("x", "y")}
        wrong += bool(differences(ratios))
    assert wrong <= 0.08 * 400, "5 % were promised"


def test_one_place_or_too_few_pairs_say_nothing() -> None:
    assert differences({("x", 1): {"a": [0.1, 0.2, 0.3]}}) == []
    assert differences({("x", 1): {"a": [0.1], "b": [0.9]}}) == []
    assert differences({("x", 1): {"a": [0.1, 0.1], "b": [0.1, 0.1]}}) == []
    assert differences({}) == []
