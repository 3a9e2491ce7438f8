"""The corpus grows to what was asked for, holds only whole conversations, and goes on after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.build import Core
from engine.errors import InvalidConfig, TemplateError
from engine.train.corpus import Conversation, append, read
from engine.train.generate import CODE, KINDS, PROSE, TOPICS, _rarest, generate

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


def test_a_task_is_an_instruction_with_an_earlier_answer_and_fits_the_model(
    make_core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.train.generate._RESPONSE_TOKENS", 100)
    file, rng = tmp_path / "corpus.jsonl.gz", np.random.default_rng(0)
    short, long = ([tuple(rng.integers(30, 60, n).tolist()) for _ in range(9)] for n in (90, 190))
    known = [Conversation((30 + i,), (*a, 10), 0.0, KINDS[i % 2]) for i, a in enumerate([*short, *long])]
    known = [c for c in known if not c.held_out]
    append(file, known, "self")
    core = make_core()
    generate(core, Frame(), file, sum(len(c.response) for c in known) + 1, (10,))
    tasks = list(read([file]))[len(known) :]
    assert tasks
    assert {c.kind for c in tasks} == {"task"}
    for task in (c.user for c in tasks):
        assert (task[3:] if task[:3] == (7, 8, 9) else task[:-3]) in short
        assert len(Frame().prompt(task)) + 100 <= core.context_length


def test_topics_are_asked_under_their_system_prompts(make_core: Callable[..., Core], tmp_path: Path) -> None:
    file, asked = tmp_path / "corpus.jsonl.gz", []

    class Asked(Frame):
        def under(self, system: str) -> tuple[int, ...]:
            asked.append(system)
            return super().under(system)

    append(file, [Conversation((30,), (31, 32, 10), 0.0, "self")], "self")
    generate(make_core(), Asked(), file, 4, STOP)
    assert {c.kind for c in list(read([file]))[1:]} == {"topic"}
    assert set(asked) == set(TOPICS)


def test_a_template_without_system_prompts_leaves_topics_out(make_core: Callable[..., Core], tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    generate(make_core(), Plain(), file, 600, STOP)
    assert {c.kind for c in read([file])} <= {"self", "task"}


def test_instructions_are_not_those_of_the_prompts_that_are_measured_on() -> None:
    from tuner.bench.prompts import load_prompts

    texts = [prompt.text.lower() for prompt in load_prompts("mixed", split="all")]
    assert texts
    for instruction in (*PROSE, *CODE):
        assert not any(instruction.lower().rstrip(".?") in text for text in texts), instruction


def test_all_kinds_and_temperatures_are_made_alike_whatever_a_batch_yields() -> None:
    rng, known = np.random.default_rng(1), []
    made: Counter[tuple[str, float]] = Counter()
    for size in [192] * 12 + rng.integers(100, 192, 120).tolist():
        kind, temperature = _rarest(known, KINDS)
        known += [Conversation((1,), (1,), temperature, kind)] * size
        made[kind, temperature] += size
    assert len(made) == 6
    assert max(made.values()) - min(made.values()) <= 2 * 192
    assert _rarest([], KINDS)[0] == "self", "there is no text yet to give a task about"


def test_a_model_none_of_whose_turns_can_be_used_is_said_to_be_so(
    make_core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.train.generate._RESPONSE_TOKENS", 255)
    with pytest.raises(InvalidConfig, match="no turn that can be answered"):
        generate(make_core(), Frame(), tmp_path / "corpus.jsonl.gz", 300, STOP)


def test_what_is_made_after_a_kill_in_the_middle_of_a_write_can_be_read(
    make_core: Callable[..., Core], tmp_path: Path
) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    generate(make_core(), Frame(), file, 300, STOP)
    some = list(read([file]))
    file.write_bytes(file.read_bytes()[:-20])
    left = list(read([file]))
    assert len(left) < len(some)
    made = generate(make_core(), Frame(), file, 600, STOP)
    assert sum(len(c.response) for c in read([file])) == made >= 600
    file.write_bytes(file.read_bytes()[:15])
    assert generate(make_core(), Frame(), file, 50, STOP) >= 50
    file.write_bytes(b"something of the user's")
    with pytest.raises(InvalidConfig, match="no gzipped lines"):
        generate(make_core(), Frame(), file, 50, STOP)
    assert file.read_bytes() == b"something of the user's"
