import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.judge.verdict import holm_confidences, overall_log_ratios, verdict
from tuner.records import Pair

GAIN = [0.095, 0.102, 0.099, 0.104]


def test_no_interval_under_four_pairs_only_what_could_have_been_seen():
    for n in (1, 2, 3):
        found = verdict("c", 8, GAIN[:n])
        assert (found.low, found.high, found.outcome) == (None, None, "not separated")
        assert found.speedup == pytest.approx(math.exp(sum(GAIN[:n]) / n))
        assert found.detectable is not None
        assert found.detectable > 0.01


def test_no_pairs_say_nothing():
    found = verdict("c", 8, [])
    assert (found.speedup, found.detectable, found.outcome) == (None, None, "not separated")


@pytest.mark.parametrize(
    ("log_ratios", "outcome"),
    [
        (GAIN, "better"),
        ([-x for x in GAIN], "worse"),
        ([0.001, -0.002, 0.002, 0.0, 0.001, -0.001], "equivalent"),
        ([0.10, -0.05, 0.12, -0.02], "not separated"),
        ([0.009, 0.0091, 0.0089, 0.009], "equivalent"),  # surely above zero, and still not worth a change
    ],
)
def test_outcomes(log_ratios, outcome):
    assert verdict("c", 8, log_ratios).outcome == outcome


@given(st.lists(st.floats(-0.5, 0.5), min_size=4, max_size=12))
def test_swapping_the_sides_mirrors_the_verdict(log_ratios):
    one, other = verdict("c", 1, log_ratios), verdict("c", 1, [-x for x in log_ratios])
    assert one.speedup * other.speedup == pytest.approx(1.0)
    assert one.low * other.high == pytest.approx(1.0)
    mirror = {"better": "worse", "worse": "better"}
    # The band of equivalence is stated as (0.98, 1.02), which is not exactly its own mirror image.
    if "equivalent" not in (one.outcome, other.outcome):
        assert other.outcome == mirror.get(one.outcome, one.outcome)


def pair(index, concurrency, log_ratio):
    return Pair("c", concurrency, "confirm", index, 1, 2, log_ratio)


def test_overall_is_the_weighted_mean_inside_each_index():
    pairs = [pair(0, 1, 0.1), pair(0, 8, 0.3), pair(1, 1, 0.2), pair(1, 8, 0.4)]
    assert overall_log_ratios(pairs, {1: 1, 8: 3}) == pytest.approx([0.25, 0.35])


def test_an_index_without_all_its_levels_has_no_composite():
    pairs = [pair(0, 1, 0.1), pair(0, 8, 0.3), pair(1, 1, 0.2)]
    assert overall_log_ratios(pairs, {1: 1, 8: 1}) == pytest.approx([0.2])
    assert overall_log_ratios(pairs, {1: 1, 8: 1, 32: 0}) == pytest.approx([0.2])
    assert overall_log_ratios([], {1: 1}) == []


def test_holm_steps_down_and_stops_at_the_first_claim_that_does_not_hold():
    strong = [0.2, 0.201, 0.199, 0.2, 0.2]
    weak = [0.02, -0.03, 0.05, 0.0, 0.01]
    confidences = holm_confidences({"strong": strong, "weak": weak, "none": [0.0] * 2})
    assert confidences["strong"] == pytest.approx(1 - 0.05 / 3)
    assert confidences["weak"] == confidences["none"] == pytest.approx(1 - 0.05 / 2)
    assert holm_confidences({"only": strong}) == {"only": pytest.approx(0.95)}
