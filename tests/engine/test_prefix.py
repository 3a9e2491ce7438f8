"""Requests that begin alike share pages, and nobody's output shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.build import Core
from engine.config import SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.memory.pool import Pages
from engine.memory.prefix import PrefixCache
from tests.engine.conftest import generate
from tests.engine.test_spec import prompts

PAGES, SIZE, ROWS, LONGEST = 17, 2, 4, 20
NGRAM = SpecConfig("ngram", 3, 1, 4, ngram_min=1, ngram_max=3)


class PrefixMachine(RuleBasedStateMachine):
    """Rows of few different tokens, run, recorded, closed, flushed and disowned at random, against a plain model: what
    each page holds, as its writer wrote it."""

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(PAGES, SIZE, ROWS, LONGEST)
        self.prefix = PrefixCache(self.pages, self.lookahead)
        self.rows: dict[int, list[int]] = {}
        self.ran: dict[int, int] = {}
        self.content: dict[int, list[tuple[int, ...]]] = {}  # page: per token, everything it depends on

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST))
    def open(self, tokens: list[int]) -> None:
        row = self.pages.open_row()
        cached = self.prefix.attach(row, tokens, self.prefix.match(tokens))
        assert cached < len(tokens), "the last token is always run"
        for at in range(cached):
            page = self.pages.pages_of(row)[at // SIZE]
            assert self.content[page][at % SIZE] == tuple(tokens[: at + 1 + self.lookahead])
        self.rows[row], self.ran[row] = tokens, cached

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, ROWS), count=st.integers(1, LONGEST))
    def run(self, pick: int, count: int) -> None:
        row = list(self.rows)[pick % len(self.rows)]
        tokens, first = self.rows[row], self.ran[row]
        last = min(first + count, len(tokens) - self.lookahead)
        if last <= first or not self.pages.grow(row, last):
            return
        for at in range(first, last):
            page = self.pages.pages_of(row)[at // SIZE]
            lines = self.content.setdefault(page, [()] * SIZE)
            lines[at % SIZE] = tuple(tokens[: at + 1 + self.lookahead])
        self.ran[row] = last
        self.prefix.record(row, tokens, last)

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, ROWS), disown=st.booleans())
    def close(self, pick: int, disown: bool) -> None:
        row = list(self.rows)[pick % len(self.rows)]
        if disown:
            self.prefix.disown(row)
        self.prefix.detach(row)
        self.pages.close_row(row)
        del self.rows[row]

    @rule()
    def flush(self) -> None:
        self.prefix.flush()
        assert self.pages.cached == 0
        assert not self.prefix.match([0] * LONGEST)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.pages.check()
        self.prefix.check()
        assert self.pages.free + self.pages.cached + self.pages.used == PAGES


class LookaheadMachine(PrefixMachine):
    lookahead = 1


TestPrefix = PrefixMachine.TestCase
TestPrefixWithLookahead = LookaheadMachine.TestCase
TestPrefix.settings = TestPrefixWithLookahead.settings = settings(max_examples=60, deadline=None)


def test_with_lookahead_a_page_is_found_only_before_the_same_next_token() -> None:
    pages = Pages(8, 2, 2, 16)
    prefix = PrefixCache(pages, lookahead=1)
    row = pages.open_row()
    prefix.attach(row, [5, 6, 7], [])
    pages.grow(row, 3)
    prefix.record(row, [5, 6, 7], 3)
    assert len(prefix.match([5, 6, 7, 1])) == 1
    assert prefix.match([5, 6, 8, 1]) == []


def test_the_least_recently_used_beginning_goes_first_and_from_its_end() -> None:
    pages = Pages(6, 1, 3, 8)
    prefix = PrefixCache(pages)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        row = pages.open_row()
        prefix.attach(row, tokens, [])
        pages.grow(row, 3)
        prefix.record(row, tokens, 3)
        prefix.detach(row)
        pages.close_row(row)
    row = pages.open_row()
    assert pages.grow(row, 2)
    assert [len(prefix.match([*tokens, 0])) for tokens in ([1, 2, 3], [4, 5, 6])] == [1, 3]
    assert prefix.evicted_pages == 2


def conversation(core: Core, turns: int, spec_rids: int = 0) -> list[list[int]]:
    """Each turn's prompt is all that went before and a question."""
    history: list[int] = []
    answers = []
    for turn in range(turns):
        history += [(7 * turn + i) % 90 + 1 for i in range(11)]
        answers.append(generate(core, [history], max_tokens=13)[0])
        history += answers[-1]
    return answers


@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_answers_are_the_same_with_and_without_the_cache(
    make_core: Callable[..., Core], spec: SpecConfig, page_size: int
) -> None:
    core = make_core(spec, page_size=page_size)
    answers = conversation(core, 5)
    assert core.prefix.hit_tokens > (100 if page_size < 16 else 60)
    plain = make_core(page_size=page_size, prefix_cache=False)
    assert answers == conversation(plain, 5)
    assert plain.prefix.hit_tokens == plain.pages.cached == 0


@pytest.mark.parametrize("spec", [SpecConfig(), NGRAM])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_32_streams_that_begin_alike_in_a_pool_too_small_for_them(
    make_core: Callable[..., Core], spec: SpecConfig, sampling: dict[str, float]
) -> None:
    common = prompts(1)[0][:21]
    asked = [[*common[: 4 * (i % 6)], *prompt] for i, prompt in enumerate(prompts(32))]
    core = make_core(spec, kv_tokens=180)
    squeezed = generate(core, asked, **sampling)
    assert core.scheduler.preemptions > 0
    assert core.prefix.hit_tokens > 0
    assert core.prefix.evicted_pages > 0
    assert squeezed == generate(make_core(max_running_requests=32, prefix_cache=False), asked, **sampling)


def first_update(core: Core, prompt: Sequence[int]) -> int:
    core.scheduler.submit(Submit(1, tuple(prompt), SamplingParams(max_tokens=3)))
    told = [u.cached_tokens for _ in range(9) if core.scheduler.busy for u in core.scheduler.step()]
    assert not any(told[1:])
    return told[0]


def test_the_first_update_tells_what_was_cached_and_a_flush_forgets_it(make_core: Callable[..., Core]) -> None:
    core = make_core()
    prompt = list(range(1, 22))
    assert [first_update(core, prompt) for _ in range(2)] == [0, 20]
    assert first_update(core, prompt[:20]) == 16, "the last token is run"
    assert core.prefix.flush() > 0
    assert core.pages.free == core.pages.total
    assert first_update(core, prompt) == 0


def test_what_a_nan_has_touched_is_never_shared(make_core: Callable[..., Core]) -> None:
    core = make_core()
    embedding = core.model._embedding[96].clone()
    core.model._embedding[96] = float("nan")
    core.scheduler.submit(Submit(1, (96, *range(1, 20)), SamplingParams(max_tokens=3)))
    assert [u.finish for u in core.scheduler.step()] == ["error"]
    core.model._embedding[96] = embedding
    assert core.pages.cached == 0
    assert first_update(core, (96, *range(1, 20))) == 0
