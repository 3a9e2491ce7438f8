import math

import numpy as np
import pytest

from tuner.judge.intervals import (
    PAIR_SD_FLOOR,
    SERIES_SD_FLOOR,
    block_variance,
    detectable_effect,
    p_above,
    pair_sd,
    t_interval,
)

# Paired t-test, alpha 5 %, power 80 %, two-sided; effect in units of the SD, from independent power tables.
KNOWN_EFFECTS = {3: 3.26, 4: 2.13, 5: 1.68, 6: 1.43, 8: 1.16, 10: 1.00, 16: 0.75}


@pytest.mark.parametrize(("n", "effect"), KNOWN_EFFECTS.items())
def test_detectable_effect_agrees_with_power_tables(n, effect):
    assert detectable_effect(1.0, n) == pytest.approx(effect, abs=0.006)


def test_a_detectable_effect_is_found_four_times_out_of_five():
    rng = np.random.default_rng(1)
    effect = detectable_effect(0.012, 6)
    found = sum(t_interval(rng.normal(effect, 0.012, 6), 0.95).low > 0 for _ in range(1000))
    assert found / 1000 == pytest.approx(0.80, abs=0.04)


def test_a_95_percent_interval_covers_the_truth_95_times_in_100():
    rng = np.random.default_rng(2)
    for n in (4, 8):
        covered = 0
        for _ in range(2000):
            interval = t_interval(rng.normal(0.05, 0.012, n), 0.95)
            covered += interval.low <= 0.05 <= interval.high
        assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_an_interval_needs_two_values():
    with pytest.raises(ValueError, match="at least two"):
        t_interval([0.1], 0.95)


def test_p_value_and_interval_agree_on_which_side_the_threshold_lies():
    values = [0.05, 0.061, 0.043, 0.055, 0.049]
    low = t_interval(values, 0.95).low
    assert p_above(values, low) == pytest.approx(0.025)
    assert 0 < p_above([0.05] * 4, 0.01) < 0.001
    assert p_above([0.05] * 3, 0.01) == 1.0


def test_noise_of_pairs_is_their_sd_but_never_nothing():
    assert pair_sd([0.01, 0.03]) == pytest.approx(math.sqrt(2) * 0.01)
    assert pair_sd([0.02, 0.02]) == PAIR_SD_FLOOR


def test_noise_of_one_pair_comes_from_its_seconds_but_is_never_below_what_a_relaunch_changes():
    quiet, noisy = [100.0] * 8, [60.0, 60.0, 140.0, 140.0, 60.0, 60.0, 140.0, 140.0]
    assert pair_sd([0.02], [(quiet, quiet)]) == SERIES_SD_FLOOR
    expected = math.sqrt(2 * np.var([60, 140, 60, 140], ddof=1) / 4) / 100
    assert pair_sd([0.02], [(noisy, noisy)]) == pytest.approx(expected)
    assert block_variance([5.0, 7.0]) == 0.0
