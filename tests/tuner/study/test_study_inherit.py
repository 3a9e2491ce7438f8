"""What an earlier study's candidates are in another space."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuner.study.toy_study import SPACE, space, study
from tuner.records import Candidate
from tuner.study.data import Import
from tuner.study.inherit import FIRST, best_of_stale, in_space, taken_from

ROWS = "parameters.num_draft_tokens={choices: %s}"


@pytest.mark.parametrize("rows", ["[4, 8]", "[8, 4]"])
def test_a_value_that_had_no_effect_and_was_not_kept_is_made_up(rows: str) -> None:
    """Of a chain of three steps the four rows follow, so they are not among its settings."""
    the_space = space(SPACE, ROWS % rows)
    old = Candidate({"disable_batch_threshold": "never", "num_steps": 3, "speculation": "ngram"})
    found, why = in_space(the_space, old)
    assert found is not None, why
    assert found.candidate == old
    assert found.params["num_draft_tokens"] == 4
    plain = Candidate({"speculation": "none"})
    found, why = in_space(the_space, plain)
    assert found is not None, why
    assert found.candidate == plain


def test_a_value_that_has_an_effect_is_not_made_up() -> None:
    old = Candidate({"disable_batch_threshold": "never", "num_steps": 3, "speculation": "ngram"})
    for more in (ROWS % "[8, 16]", "parameters.threads={choices: [1, 2]}"):
        found, why = in_space(space(SPACE, more), old)
        assert found is None
        assert why.endswith(", which was not tried there")


def test_what_a_study_was_begun_with_is_known_where_that_was_nothing_and_however_it_is_said(tmp_path: Path) -> None:
    store = study(tmp_path)
    store.put_imports("bare", [], [], [], [], "in whatever words")
    assert taken_from(store.data(), "bare")
    assert not taken_from(store.data(), "other")


def test_the_best_of_stale_are_those_that_were_faster_than_their_baseline() -> None:
    values = {"slow": -0.2, "best": 0.3, "none": None, "good": 0.1, "fair": 0.05, "little": 0.01}
    imports = [Import("old", name, "stale", "", value) for name, value in values.items()]
    imports.append(Import("old", "taken", "taken", "", 0.9))
    assert best_of_stale(imports) == ["best", "good", "fair"][:FIRST]
