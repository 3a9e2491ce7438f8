"""Inputs that no measurement should give: named, or judged without a claim; never an exception's trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_records import BASELINE, FAST, OTHER, Study

from tuner.export.reference import Reference
from tuner.judge.calibration import Window, calibrate
from tuner.judge.holds import level_holds
from tuner.judge.intervals import PAIR_SD_FLOOR, detectable_effect, p_above, t_interval
from tuner.judge.pareto import front
from tuner.judge.text import recommendation_dict, recommendation_lines
from tuner.judge.verdict import holm_confidences, verdict
from tuner.records import Block, Verdict
from tuner.study.score import log_ratio

NOT_NUMBERS = (math.nan, math.inf, -math.inf)


def test_values_that_agree_to_the_last_digit_give_an_interval_with_a_width() -> None:
    for n in (4, 8, 16):
        found = verdict("c", 1, [0.05] * n)
        assert found.low is not None
        assert found.high is not None
        assert found.high > found.speedup > found.low  # type: ignore[operator]
        assert math.log(found.high / found.low) > PAIR_SD_FLOOR / math.sqrt(n)
        assert found.outcome == "better"
    assert verdict("c", 1, [0.0] * 4).outcome == "equivalent"
    barely = math.log(1.0101)
    assert verdict("c", 1, [barely] * 4).outcome == "equivalent"  # no one knows four equal values so well


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_log_ratios_that_are_no_numbers_are_refused_by_name(bad: float) -> None:
    for n in (1, 4):
        with pytest.raises(ValueError, match="no numbers"):
            verdict("c", 1, [0.1] * (n - 1) + [bad])
    with pytest.raises(ValueError, match="numbers only"):
        t_interval([0.1, bad], 0.95)


@pytest.mark.parametrize("rate", [*NOT_NUMBERS, 0.0, -5.0])
def test_a_block_without_a_rate_makes_no_pair(rate: float) -> None:
    good = next(iter(Study().add(FAST, 8, [0.1]).blocks.values())).block
    assert log_ratio(good, good) == 0.0
    odd: Block = replace(good, tokens_per_s=rate)
    assert log_ratio(good, odd) is None
    assert log_ratio(odd, good) is None


@given(st.lists(st.floats(-1e4, 1e4), max_size=12), st.sampled_from([0.95, 0.99, 1 - 0.05 / 400]))
@settings(deadline=None)
def test_any_numbers_give_a_verdict_that_can_be_written_down(ratios: list[float], confidence: float) -> None:
    found = verdict("c", 1, ratios, confidence=confidence)
    json.dumps(found.__dict__, allow_nan=False)
    if found.low is not None:
        assert found.low <= found.speedup <= found.high  # type: ignore[operator]
    assert 0 <= p_above(ratios, 0.01) <= 1
    assert set(holm_confidences({"a": ratios, "b": [0.1] * 4}).values()) <= {1 - 0.025, 0.95}


def test_any_number_of_claims_and_pairs_tells_what_could_have_been_seen() -> None:
    for n in (2, 4, 64, 1000):
        for claims in (1, 10, 1000):
            assert 0 < detectable_effect(0.01, n, alpha=0.05 / claims) < math.inf


@pytest.mark.parametrize(
    "study",
    [
        Study(),
        Study().add(FAST, 8, [0.1]),
        Study().add(FAST, 8, [0.1] * 4).add(FAST, 1, []),
        Study().add(FAST, 8, [0.0] * 8).add(FAST, 1, [0.0] * 8),
        Study().add(FAST, 8, [-5.0, 5.0, -5.0, 5.0]).add(FAST, 1, [700.0] * 4),
        Study().add(FAST, 8, [0.1] * 4, valid=False),
        Study().add(FAST, 8, [0.1] * 4).add(FAST, 30, [0.1] * 4),  # a level that no weight names
        Study().add(BASELINE, 8, [0.1] * 4),
    ],
    ids=["nothing", "one", "a level missing", "equal", "absurd", "invalid", "an unknown level", "itself"],
)
@pytest.mark.parametrize("weights", [{8: 1.0}, {1: 0.5, 8: 0.5}, {1: 0.0, 8: 1.0}])
def test_every_study_has_a_recommendation_that_can_be_printed(study: Study, weights: dict[int, float]) -> None:
    found = study.recommend(weights)
    assert recommendation_lines(found)
    json.dumps(recommendation_dict(found), allow_nan=False)
    if set(weights) - {pair.concurrency for pair in study.pairs} and weights.get(1):
        assert found.overall.winner is None  # not measured everywhere


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, 0.0, -1.0])
def test_rates_that_are_none_are_refused_by_name(bad: float) -> None:
    for recorded, measured in (([bad], [1.0]), ([1.0], [bad]), ([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match="rates that are none"):
            level_holds(8, recorded, measured)
    windows = [Window(launch, 8, 0, 100.0 if launch else bad) for launch in range(5)]
    with pytest.raises(ValueError, match="no rate"):
        calibrate(windows, {8: 1.0})
    level = {"concurrency": 8, "tokens_per_s": [bad], "within": [], "role": "confirm"}
    with pytest.raises(ValueError, match="no rate"):
        Reference.from_dict({"space": {}, "levels": [level], "answers": None, "pair_sd": None, "fingerprint": {}})


def test_windows_that_agree_to_the_last_digit_make_no_quiet_machine() -> None:
    windows = [Window(launch, 8, number, 100.0) for launch in range(8) for number in range(2)]
    found = calibrate(windows, {8: 1.0})
    assert found.pair_sd == PAIR_SD_FLOOR
    assert found.pairs == 4
    json.dumps(found.to_dict(), allow_nan=False)


def said(low: float, high: float, level: int = 1) -> Verdict:
    return Verdict("", level, 8, (low + high) / 2, low, high, 0.95, "better", None)


def test_who_was_not_measured_at_a_level_dominates_nobody_there() -> None:
    """Else three could each push out the next, and nothing would be left."""
    circle = {
        "a": {1: said(1.2, 1.3), 8: said(1.0, 1.1)},
        "b": {8: said(1.2, 1.3), 30: said(1.0, 1.1)},
        "c": {30: said(1.2, 1.3), 1: said(1.0, 1.1)},
    }
    assert {"a", "b", "c"} <= set(front(circle))
    whole = {"a": {1: said(1.2, 1.3), 8: said(1.2, 1.3)}, "b": {1: said(1.0, 1.05)}}
    assert front(whole) == ("a",)


@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.dictionaries(
            st.sampled_from([1, 8, 30]), st.tuples(st.floats(0.5, 2.0), st.floats(0.0, 0.3)), min_size=1, max_size=3
        ),
        min_size=1,
    )
)
def test_the_pareto_set_is_never_empty_and_holds_the_fastest_of_every_level(
    ratios: dict[str, dict[int, tuple[float, float]]],
) -> None:
    given_ = {
        name: {level: said(middle - half, middle + half, level) for level, (middle, half) in levels.items()}
        for name, levels in ratios.items()
    }
    found = front(given_)
    assert found
    base = {level: said(1.0, 1.0, level) for levels in given_.values() for level in levels}
    everyone = {"": base, **given_}
    for one in found:
        for other in everyone.keys() - {one}:
            worse = all(
                everyone[other].get(at) is not None and everyone[other][at].low > mine.high  # type: ignore[operator]
                for at, mine in everyone[one].items()
            )
            assert not worse


def test_two_that_gain_alike_are_told_apart_by_nobody_and_one_is_taken() -> None:
    found = Study().add(FAST, 8, [0.1] * 6).add(OTHER, 8, [0.1] * 6).recommend({8: 1.0})
    assert found.overall.winner in (FAST, OTHER)
