from __future__ import annotations

import math

import pytest

from tuner.judge.quality import Answers, Likelihood, compare, lossy_settings

BASE = tuple(f"answer number {i} has its own words and ends here" for i in range(10))


def words(text: str, chosen: float = -0.3, gaps: dict[int, float] | None = None) -> Likelihood:
    """One token a word; `gaps`: word → how much likelier another one was."""
    offsets, at = [], 0
    for word in text.split(" "):
        offsets.append(at)
        at += len(word) + 1
    values = [chosen] * len(offsets)
    best = [chosen + (gaps or {}).get(i, 0.0) for i in range(len(offsets))]
    return Likelihood(tuple(offsets), tuple(values), tuple(best))


def judged(texts: tuple[str, ...], chosen: float = -0.3, gap: float = 0.0, word: int = 6) -> Answers:
    return Answers(texts, tuple(words(text, chosen, {word: gap}) for text in texts))


def turned(count: int) -> tuple[str, ...]:
    """The baseline's answers, `count` of them with another word in place of the seventh."""
    return tuple(
        text.replace(" words ", " terms ").replace("own", "own") if i < count else text for i, text in enumerate(BASE)
    )


def test_equal_answers_need_no_likelihood() -> None:
    found = compare("c", Answers(BASE), Answers(BASE))
    assert (found.outcome, found.exact) == ("same", 10)


def test_silence_is_no_evidence() -> None:
    silent = ("",) * 8 + BASE[:2]
    assert compare("c", Answers(silent), Answers(silent)).outcome == "unknown"


def test_a_near_tie_that_rounding_turned_is_equivalent() -> None:
    texts = turned(4)
    found = compare("c", judged(BASE), judged(texts, gap=0.1, word=6))
    assert (found.outcome, found.exact, found.far) == ("equivalent", 6, 0)
    assert found.divergence == BASE[0].index("words")
    assert found.loss == pytest.approx(0.0)


def test_leaving_at_clear_choices_is_different() -> None:
    assert compare("c", judged(BASE), judged(turned(1), gap=3.0)).outcome == "equivalent"  # one may be chance
    found = compare("c", judged(BASE), judged(turned(4), gap=3.0))
    assert (found.outcome, found.far) == ("different", 4)


def test_answers_that_the_baseline_finds_unlikely_are_different() -> None:
    found = compare("c", judged(BASE), judged(turned(4), chosen=-0.6))
    assert found.outcome == "different"
    assert found.loss == pytest.approx(0.3)


def test_without_likelihoods_only_texts_speak() -> None:
    unknown = compare("c", Answers(BASE), Answers(turned(4), unknown="no echo"))
    assert unknown.outcome == "unknown"
    assert "no echo" in unknown.why
    short = compare("c", Answers(BASE), Answers(tuple(text[:12] for text in BASE)))
    assert short.outcome == "different"
    looping = compare("c", Answers(BASE), Answers(tuple("so it goes on and " * 4 for _ in BASE)))
    assert looping.outcome == "different"
    assert looping.repeating == 1.0


def test_stored_answers_come_back_the_same() -> None:
    answers = judged(turned(2), gap=0.2)
    assert Answers.from_dict(answers.to_dict()) == answers


def test_settings_that_change_the_numbers_are_lossy_by_name() -> None:
    assert lossy_settings({"num_steps": 1}, {"num_steps": 3, "weights": "int8"}) == ["weights"]
    assert lossy_settings({"weights": "int8"}, {"weights": "int8"}) == []


def test_answers_to_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        compare("c", Answers(BASE), Answers(BASE[:3]))


def test_a_gap_is_that_of_the_token_around_a_character() -> None:
    one = words("ab cd ef", gaps={1: 0.7})
    assert one.gap_at(4) == pytest.approx(0.7)
    assert one.gap_at(0) == 0.0
    assert one.mean == pytest.approx(-0.3)
    assert Likelihood((), (), ()).gap_at(0) is None
    assert not math.isnan(one.best[0])
