"""The corpus grows to what was asked for, holds only whole conversations, and goes on after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.build import Core
from engine.train.corpus import read
from engine.train.generate import generate


class Frame:
    before = (1, 2, 3)
    between = (4,)

    def prompt(self, user: tuple[int, ...]) -> tuple[int, ...]:
        return (*self.before, *user, *self.between)


def test_a_corpus_is_made_and_goes_on_where_it_was(make_core: Callable[..., Core], tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    # A random tiny model ends a turn with any of these soon enough.
    stop = tuple(range(10, 30))
    first = generate(make_core(), Frame(), file, 300, stop)  # type: ignore[arg-type]
    some = list(read([file]))
    assert first == sum(len(c.response) for c in some) >= 300
    assert len({c.user for c in some}) == len(some)
    assert all(not set(c.user) & set(stop) for c in some)
    assert generate(make_core(), Frame(), file, 300, stop) == first  # type: ignore[arg-type]
    more = generate(make_core(), Frame(), file, first + 200, stop)  # type: ignore[arg-type]
    assert more >= first + 200
    assert list(read([file]))[: len(some)] == some
