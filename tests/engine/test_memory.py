"""Every page is free or owned exactly once, whatever happens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.pool import KVPool, Pages

PAGES, SIZE, ROWS, LONGEST = 23, 4, 5, 60


class PagesMachine(RuleBasedStateMachine):
    """Random opening, growing and closing of rows against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(PAGES, SIZE, ROWS, LONGEST)
        self.tokens: dict[int, int] = {}

    @precondition(lambda self: len(self.tokens) < ROWS)
    @rule()
    def open(self) -> None:
        row = self.pages.open_row()
        assert row not in self.tokens
        self.tokens[row] = 0

    @invariant()
    def what_a_row_has_no_page_for_is_nobodys(self) -> None:
        """A request that is drafted for beyond its pages must not reach what was once its own."""
        for row, tokens in self.tokens.items():
            at = np.arange(-(-tokens // SIZE) * SIZE, LONGEST)
            assert (self.pages.slots(np.full(len(at), row), at) // SIZE == PAGES).all()

    @precondition(lambda self: self.tokens)
    @rule(pick=st.integers(0, ROWS), tokens=st.integers(0, LONGEST))
    def grow(self, pick: int, tokens: int) -> None:
        row = list(self.tokens)[pick % len(self.tokens)]
        need = max(0, -(-tokens // SIZE) - -(-self.tokens[row] // SIZE))
        free = self.pages.free
        assert self.pages.grow(row, tokens) == (need <= free)
        if need <= free:
            self.tokens[row] = max(self.tokens[row], tokens)
            assert self.pages.free == free - need
        else:
            assert self.pages.free == free

    @precondition(lambda self: self.tokens)
    @rule(pick=st.integers(0, ROWS))
    def close(self, pick: int) -> None:
        row = list(self.tokens)[pick % len(self.tokens)]
        self.pages.close_row(row)
        del self.tokens[row]

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.pages.check()
        slots = [
            slot
            for row, tokens in self.tokens.items()
            for slot in self.pages.slots(np.full(tokens, row), np.arange(tokens)).tolist()
        ]
        assert len(slots) == len(set(slots))


TestPages = PagesMachine.TestCase


@given(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True), st.randoms())
def test_a_move_reads_all_before_it_writes(sources: list[int], random: object) -> None:
    pool = KVPool(2, 3, 4, 1, 2, torch.float32)
    for layer in range(2):
        for tensor in pool.layer(layer):
            tensor.copy_(torch.arange(12).view(12, 1, 1).expand(12, 1, 2) + 100 * layer)
    targets = list(range(len(sources)))
    pool.move(torch.tensor(sources), torch.tensor(targets))
    k, v = pool.layer(1)
    assert k[: len(sources), 0, 0].tolist() == [100 + s for s in sources]
    assert v[: len(sources), 0, 1].tolist() == [100 + s for s in sources]
