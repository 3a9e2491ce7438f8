import json
import math

import numpy as np
import pytest
from study_records import BASELINE, FAST, OTHER, Study

from tuner.judge.text import recommendation_dict, recommendation_lines

GAIN = [0.095, 0.102, 0.099, 0.104, 0.1, 0.098]
NONE = [0.002, -0.004, 0.003, -0.001, 0.0, 0.001]
LOSS = [-x for x in GAIN]
ONE = {8: 1.0}
TWO = {1: 1.0, 8: 1.0}


def text(found):
    return "\n".join(recommendation_lines(found))


def test_a_confirmed_gain_wins_with_its_delta_and_settings():
    found = Study().add(FAST, 8, GAIN).recommend(ONE)
    assert found.overall.winner == found.per_concurrency[0].winner == FAST
    assert found.overall.verdict.outcome == "better"
    assert found.per_concurrency[0].baseline_tokens_per_s == pytest.approx(100)
    assert found.per_concurrency[0].winner_tokens_per_s == pytest.approx(110.5, abs=0.1)
    assert f"winner {FAST.id}: +10.5 %" in text(found)
    assert "num_steps=3 speculation=ngram" in text(found)
    assert "6 pairs" in text(found)


def test_what_only_the_search_saw_names_no_winner():
    found = Study().add(FAST, 8, GAIN, role="screen").recommend(ONE)
    assert found.overall.winner is None
    assert found.per_concurrency[0].winner is None
    assert found.per_concurrency[0].baseline_tokens_per_s == pytest.approx(100)
    assert "not separated: no candidate was confirmed" in found.overall.why
    assert "would show a gain of +" in found.overall.why


def test_where_none_came_near_the_baseline_that_is_said_and_no_noise_is_blamed():
    found = Study().add(FAST, 8, [math.log(0.6)] * 2, role="screen").recommend(ONE)
    assert found.overall.winner is None
    assert (
        "none came near the baseline in the search: at the load where one came nearest it had −40.0 %"
        in found.overall.why
    )
    assert "not separated" not in found.overall.why


def test_an_invalid_block_makes_no_winner():
    found = Study().add(FAST, 8, GAIN, valid=False).recommend(ONE)
    assert found.overall.winner is None
    assert "failed a gate" in found.overall.why


def test_too_few_pairs_are_not_separated_and_say_what_could_have_been_seen():
    found = Study().add(FAST, 8, GAIN[:2]).recommend(ONE)
    assert found.overall.winner is None
    shown = text(found)
    assert "no winner: keep the baseline" in shown
    assert "not separated: 2 confirmation pairs of the 4" in shown
    assert "at the noise seen, 4 pairs would show a gain of" in shown
    assert "no interval" in shown
    assert "interval +" not in shown


def test_one_pair_draws_its_noise_from_its_own_seconds():
    found = Study().add(FAST, 8, GAIN[:1]).recommend(ONE)
    assert found.overall.verdict.n == 1
    assert 0.01 < found.overall.verdict.detectable < 0.2


def test_levels_can_differ_and_the_worst_level_guards_the_overall_winner():
    found = Study().add(FAST, 1, LOSS).add(FAST, 8, [3 * x for x in GAIN]).recommend(TWO)
    at = {choice.concurrency: choice for choice in found.per_concurrency}
    assert at[1].winner is None
    assert at[8].winner == FAST
    assert found.overall.winner is None
    assert "below the limit" in found.overall.why
    assert any("Levels differ" in line for line in found.advice)
    assert (
        Study().add(FAST, 1, LOSS).add(FAST, 8, [3 * x for x in GAIN]).recommend(TWO, worst_level=0.5).overall.winner
        == FAST
    )


def test_a_candidate_that_was_not_confirmed_everywhere_is_no_overall_winner():
    found = Study().add(FAST, 8, GAIN).recommend(TWO)
    assert found.overall.winner is None
    assert found.per_concurrency[1].winner == FAST
    assert "no valid confirmation pair at concurrency 1" in found.per_concurrency[0].why


def test_of_two_better_candidates_the_faster_wins():
    found = Study().add(FAST, 8, GAIN).add(OTHER, 8, [2 * x for x in GAIN]).recommend(ONE)
    assert found.overall.winner == OTHER


def test_more_claims_need_wider_intervals():
    alone = Study().add(FAST, 8, NONE).recommend(ONE).overall.verdict
    among = Study().add(FAST, 8, NONE).add(OTHER, 8, NONE).recommend(ONE).overall.verdict
    assert among.confidence > alone.confidence
    assert among.high - among.low > alone.high - alone.low


def test_nothing_to_compare_is_not_a_victory_of_the_baseline():
    empty = Study()
    assert "no candidate has been measured" in empty.recommend(ONE).overall.why
    empty.candidates[FAST.id] = FAST
    empty.candidates[OTHER.id] = OTHER
    assert "no comparison possible: none of 2 candidates" in empty.recommend(ONE).overall.why


def test_equivalent_and_worse_are_said_as_such():
    assert "equivalent" in Study().add(FAST, 8, NONE).recommend(ONE).overall.why
    assert "slower than the baseline" in Study().add(FAST, 8, LOSS).recommend(ONE).overall.why


def test_a_shift_of_output_length_raises_an_alarm():
    found = Study().add(FAST, 8, GAIN, length=30.0).recommend(ONE)
    assert any("answers of 30 tokens where the baseline gives 60" in line for line in found.advice)


def test_simulated_results_are_marked_everywhere():
    found = Study().add(FAST, 8, GAIN).recommend(ONE, simulated=True)
    assert "SIMULATED" in recommendation_lines(found)[0]
    assert recommendation_dict(found)["simulated"] is True


def test_the_short_profile_says_what_a_full_one_would_show():
    assert any("8 pairs" in line and "would show gains from" in line for line in _short().advice)
    assert not any("--profile full" in line for line in _short(profile="full").advice)


def _short(**changes):
    return Study().add(FAST, 8, GAIN[:2]).recommend(ONE, **changes)


def test_the_dictionary_is_plain_json():
    for study in (Study(), Study().add(FAST, 8, GAIN), Study().add(FAST, 8, GAIN[:1])):
        given = recommendation_dict(study.recommend(TWO))
        assert json.loads(json.dumps(given, allow_nan=False)) == given


def test_the_order_of_pairs_does_not_matter():
    study = Study().add(FAST, 1, GAIN).add(FAST, 8, NONE).add(OTHER, 1, NONE).add(OTHER, 8, GAIN)
    assert study.recommend(TWO) == study.recommend(TWO, pairs=study.pairs[::-1])


def simulate(rng, truth, *, pairs=6, sd=0.012, levels=(1, 8, 32)):
    """Two finalists with the given true gain at every level; what a level shares inside an index is correlated."""
    study = Study()
    for candidate in (FAST, OTHER):
        shared = rng.normal(0, sd / 2, pairs)
        for level in levels:
            study.add(candidate, level, list(truth + shared + rng.normal(0, sd, pairs)))
    return study.recommend(dict.fromkeys(levels, 1.0))


def winners(found):
    return [c for c in (found.overall, *found.per_concurrency) if c.winner is not None]


@pytest.mark.parametrize("truth", [0.0, np.log(1.01)])
def test_where_nothing_differs_enough_at_most_five_studies_in_a_hundred_name_a_winner(truth):
    rng = np.random.default_rng(7)
    studies = 300
    false = sum(bool(winners(simulate(rng, truth))) for _ in range(studies))
    assert false <= 0.05 * studies + 2 * np.sqrt(0.05 * 0.95 * studies)
    if truth == 0.0:
        assert false <= 0.05 * studies


def test_a_true_gain_is_found_nine_times_in_ten_and_quoted_without_bias():
    rng = np.random.default_rng(8)
    found = [simulate(rng, 0.05, pairs=8).overall for _ in range(150)]
    assert np.mean([choice.winner is not None for choice in found]) >= 0.9
    quoted = [choice.verdict.speedup for choice in found if choice.winner is not None]
    assert np.mean(quoted) == pytest.approx(np.exp(0.05), abs=0.005)
    assert BASELINE.id not in {choice.winner.id for choice in found if choice.winner}


def test_an_unquiet_machine_is_said_to_be_one():
    quiet = Study().add(FAST, 8, GAIN)
    assert not any("not quiet" in note for note in quiet.recommend(ONE).advice)
    wild = Study().add(FAST, 8, [0.0, 0.5, -0.4, 0.1])
    assert any("not quiet" in note and FAST.id in note for note in wild.recommend(ONE).advice)
