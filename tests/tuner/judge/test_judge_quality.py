from __future__ import annotations

import math
import random

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


def test_likelihoods_of_nothing_show_nothing() -> None:
    empty = tuple(Likelihood((), (), ()) for _ in BASE)
    assert compare("c", Answers(BASE, empty), Answers(turned(4), empty)).outcome == "unknown"
    assert compare("c", judged(BASE), Answers(turned(4), empty)).outcome == "unknown"


def test_stored_answers_come_back_the_same() -> None:
    answers = judged(turned(2), gap=0.2)
    assert Answers.from_dict(answers.to_dict()) == answers


def test_settings_that_change_the_numbers_are_lossy_by_name() -> None:
    assert lossy_settings({"num_steps": 1}, {"num_steps": 3, "weights": "int8"}) == ["weights"]
    assert lossy_settings({"weights": "int8"}, {"weights": "int8"}) == []


def test_answers_to_other_prompts_are_not_compared() -> None:
    assert compare("c", Answers(BASE), Answers(BASE[:3])).outcome == "unknown"
    assert compare("c", Answers(BASE, asked="a"), Answers(BASE, asked="b")).outcome == "unknown"


def test_a_gap_is_that_of_the_token_around_a_character() -> None:
    one = words("ab cd ef", gaps={1: 0.7})
    assert one.gap_at(4) == pytest.approx(0.7)
    assert one.gap_at(0) == 0.0
    assert one.mean == pytest.approx(-0.3)
    assert Likelihood((), (), ()).gap_at(0) is None
    assert not math.isnan(one.best[0])


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "sleeps", "under", "some", "old", "tree")
ANSWERS, LENGTH = 16, 64
"""What a study asks for by itself: eight alone, eight at once, of 64 tokens."""


def said(draw: random.Random, length: int = LENGTH) -> list[str]:
    return [draw.choice(WORDS) for _ in range(length)]


def pair(draw: random.Random, wrong: float, *, near: float = 0.0) -> tuple[Answers, Answers]:
    """The baseline's answers, and those of a candidate that takes another word at these rates: a `wrong` one at clear
    choices, a `near` one where two were as likely. From there on it says something else."""
    ours, theirs, likely = [], [], []
    for _ in range(ANSWERS):
        one = said(draw)
        other, gaps = list(one), {}
        for i in range(LENGTH):
            bad, tie = draw.random() < wrong, draw.random() < near
            if bad or tie:
                other = [*one[:i], f"{one[i]}s", *said(draw, LENGTH - i - 1)]
                gaps = {i: 4.0 if bad else draw.uniform(0.0, 0.4)}
                break
        ours.append(" ".join(one))
        theirs.append(" ".join(other))
        likely.append(words(theirs[-1], gaps=gaps))
    return Answers(tuple(ours), tuple(map(words, ours))), Answers(tuple(theirs), tuple(likely))


def refused(wrong: float, *, near: float = 0.0, studies: int = 200) -> float:
    draw = random.Random(f"{wrong} {near}")
    return sum(compare("c", *pair(draw, wrong, near=near)).outcome == "different" for _ in range(studies)) / studies


def test_one_wrong_token_in_two_hundred_is_found_and_rounding_is_not_taken_for_it() -> None:
    assert refused(1 / 200) >= 0.9
    assert refused(1 / 50) == 1.0
    assert refused(0.0, near=1 / 20) == 0.0
    assert refused(1 / 20_000) <= 0.05


def test_answers_that_are_cut_short_are_different_with_and_without_likelihoods() -> None:
    """A fifth less is within what lengths may differ by."""
    cut = tuple(text[: int(0.8 * len(text))].rstrip() for text in BASE)
    for base, other in ((Answers(BASE), Answers(cut)), (judged(BASE), judged(cut))):
        found = compare("c", base, other)
        assert found.outcome == "different"
        assert "10 of 10 end where the baseline's go on" in found.why
    once = (cut[0], *BASE[1:])
    assert compare("c", judged(BASE), judged(once)).outcome == "equivalent"  # rounding may end one
    spaces = tuple(f"{text} " for text in BASE)
    assert compare("c", Answers(spaces), Answers(BASE)).outcome == "unknown"


ENGLISH = (
    "The harbour is quiet at noon, and the boats lie still. Later the wind comes up, and with it the sailors return.",
    "We walk along the street until we see the old house at the end of the village, where nobody lives any more.",
    "The woman opened the window and called the children in, because the meal was ready and the soup was growing cold.",
    "To sort the list, compare each pair of neighbours and swap them when the first one is larger than the second.",
    "In short, the company earned more than in the year before, although it sold fewer machines than it had expected.",
)
ENGLISH_TOO = (
    "At noon the harbour is calm and the boats do not move. In the evening the wind rises and the sailors come home.",
    "We follow the road as far as the old house behind the village. It has been empty for a good many years now.",
    "The window opened, and the woman told the children that the meal was waiting and the soup would not stay hot.",
    "Go through the list and compare neighbours: whenever the first is larger than the second, let them change places.",
    "The company sold fewer machines than it had hoped for, and all the same it earned more than it did last year.",
)
GERMAN = (
    "Der Hafen ist mittags still, und die Boote liegen ruhig. Abends kommt Wind auf, und die Seeleute kehren zurück.",
    "Wir gehen die Straße entlang, bis wir das alte Haus am Ende des Dorfes sehen, in dem niemand mehr wohnt.",
    "Die Frau öffnete das Fenster und rief die Kinder herein, weil das Essen fertig war und die Suppe kalt wurde.",
    "Um die Liste zu sortieren, vergleiche Nachbarn und vertausche sie, wenn der erste größer ist als der zweite.",
    "Kurz gesagt verdiente die Firma mehr als im Jahr davor, obwohl sie weniger Maschinen verkaufte als erwartet.",
)
RUSSIAN = tuple(
    "Гавань тиха в полдень, и лодки стоят неподвижно, пока не поднимется ветер и не вернутся моряки." for _ in ENGLISH
)


@pytest.mark.parametrize("other", [GERMAN, RUSSIAN])
def test_another_language_is_noticed_without_likelihoods(other: tuple[str, ...]) -> None:
    found = compare("c", Answers(ENGLISH), Answers(other))
    assert found.outcome == "different"
    assert "another language" in found.why
    assert compare("c", Answers(ENGLISH), Answers(ENGLISH_TOO)).outcome == "unknown"
