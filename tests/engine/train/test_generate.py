"""The corpus grows to what was asked for, holds only whole conversations, and goes on after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.build import Core
from engine.errors import TemplateError
from engine.train.corpus import read
from engine.train.generate import CODE, PROSE, TOPICS, generate

STOP = tuple(range(10, 30))
"""A random tiny model ends a turn with any of these soon enough."""


class Frame:
    before = (1, 2, 3)
    between = (4,)

    def under(self, system: str) -> tuple[int, ...]:
        return (1, 5, 6 + TOPICS.index(system) % 2, 3)

    def prompt(self, user: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *user, *self.between)

    def ids(self, text: str) -> tuple[int, ...]:
        return (7, 8, 9)

    def text(self, ids: Sequence[int]) -> str:
        return "prose"


class Plain(Frame):
    def under(self, system: str) -> tuple[int, ...]:
        raise TemplateError("no system prompt here")


def test_a_corpus_is_made_and_goes_on_where_it_was(make_core: Callable[..., Core], tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    first = generate(make_core(), Frame(), file, 300, STOP)
    some = list(read([file]))
    assert first == sum(len(c.response) for c in some) >= 300
    assert len({c.user for c in some}) == len(some)
    assert all(not set(c.user) & set(STOP) for c in some)
    assert generate(make_core(), Frame(), file, 300, STOP) == first
    more = generate(make_core(), Frame(), file, first + 200, STOP)
    assert more >= first + 200
    assert list(read([file]))[: len(some)] == some


def test_turns_of_every_kind_are_made_and_tasks_hold_an_answer_of_the_targets(
    make_core: Callable[..., Core], tmp_path: Path
) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    made = 0
    while len(kinds := Counter(c.kind for c in read([file])) if made else Counter()) < 3:
        made = generate(make_core(), Frame(), file, made + 1, (10,))
        assert made < 500_000
    assert set(kinds) == {"self", "topic", "task"}
    every = list(read([file]))
    answers = [tuple(t for t in c.response if t != 10) for c in every]
    for task in (c.user for c in every if c.kind == "task"):
        passage = task[3:] if task[:3] == (7, 8, 9) else task[:-3]
        assert passage in answers
        assert 32 <= len(passage) <= 192


def test_a_template_without_system_prompts_leaves_topics_out(make_core: Callable[..., Core], tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    generate(make_core(), Plain(), file, 3000, STOP)
    assert {c.kind for c in read([file])} <= {"self", "task"}


def test_instructions_are_not_those_of_the_prompts_that_are_measured_on() -> None:
    from tuner.bench.prompts import load_prompts

    texts = [prompt.text.lower() for prompt in load_prompts("mixed", split="all")]
    assert texts
    for instruction in (*PROSE, *CODE):
        assert not any(instruction.lower().rstrip(".?") in text for text in texts), instruction
