"""Pages that requests with the same beginning share, and that stay for the next one while there is room.

A trie of whole pages: an entry is found by its parent and its page's tokens. The dictionary hashes both and compares
both, so that no collision is ever taken for a hit, and an entry never outlives its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.memory.pool import Pages


@dataclass(eq=False, slots=True)
class _Entry:
    """One page in the trie. `page` -1 is the root; a forgotten entry is no longer `alive`."""

    page: int = -1
    parent: _Entry | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], _Entry] = field(default_factory=dict)
    alive: bool = True


class PrefixCache:
    """Which cached pages hold which beginnings.

    Args:
        pages: whose pages are shared; this object becomes its `on_evict`.
        lookahead: 1 where what is cached at a page's last position depends on the token behind the page as well, as
            a draft head's entries do; that token is then part of the key. Else 0.
        enabled: False: nothing is ever found or kept.
    """

    def __init__(self, pages: Pages, lookahead: int = 0, enabled: bool = True) -> None:
        if lookahead not in (0, 1):
            raise ValueError(f"lookahead is 0 or 1, not {lookahead}")
        self._pages, self.lookahead, self.enabled = pages, lookahead, enabled
        self._root = _Entry()
        self._by_page: dict[int, _Entry] = {}
        self._tails: dict[int, tuple[_Entry, int]] = {}  # by row: its deepest entry, pages looked at
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evicted_pages = 0
        pages.on_evict = self._evicted

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached pages with which `tokens` begin; the last token is never among them, since it must be run."""
        found: list[int] = []
        if not self.enabled:
            return found
        entry: _Entry | None = self._root
        for index in range((len(tokens) - 1) // self._pages.page_size):
            assert entry is not None
            entry = entry.children.get(self._key(tokens, index))
            if entry is None:
                break
            found.append(entry.page)
        return found

    def attach(self, row: int, tokens: Sequence[int], found: Sequence[int]) -> int:
        """Let an empty row of these tokens begin with the pages that `match` found just now; how many tokens."""
        self._pages.share(row, found)
        self._tails[row] = (self._by_page[found[-1]] if found else self._root, len(found))
        cached = len(found) * self._pages.page_size
        self.queried_tokens += len(tokens)
        self.hit_tokens += cached
        return cached

    def record(self, row: int, tokens: Sequence[int], cached: int) -> None:
        """Make a row's pages findable as far as they are full: `cached` of its tokens are in the pool."""
        size = self._pages.page_size
        full = min(cached, len(tokens) - self.lookahead) // size
        tail, done = self._tails[row]
        if full <= done or not self.enabled:
            return
        if not tail.alive:  # its page went to somebody else: begin again
            tail, done = self._root, 0
        for index in range(done, full):
            key = self._key(tokens, index)
            entry = tail.children.get(key)
            if entry is None:
                page = self._pages.pages_of(row)[index]
                entry = tail.children[key] = self._by_page[page] = _Entry(page, tail, key)
                self._pages.keep(page)
            tail = entry
        self._tails[row] = (tail, full)

    def detach(self, row: int) -> None:
        """The row is about to be closed."""
        del self._tails[row]

    def disown(self, row: int) -> None:
        """Make nothing of this row findable any more: its content cannot be trusted."""
        for page in self._pages.pages_of(row):
            entry = self._by_page.get(page)
            if entry is not None:
                self._forget(entry)

    def flush(self) -> int:
        """Forget everything; how many pages were cached for nobody's use at the moment. Requests go on."""
        idle = self._pages.cached
        for entry in list(self._root.children.values()):
            self._forget(entry)
        return idle

    def check(self) -> None:
        """Raise AssertionError unless what is findable is what the pages keep."""
        assert self._by_page.keys() == self._pages.kept, "kept pages and entries differ"
        for page, entry in self._by_page.items():
            assert entry.alive, "a forgotten entry can be found"
            assert entry.page == page, "an entry under another page's number"
            assert entry.parent is not None, "an entry without a parent"
            assert entry.parent.alive, "an entry has outlived its parent"
            assert entry.parent.children[entry.tokens] is entry, "an entry that its parent does not know"

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        size = self._pages.page_size
        return tuple(tokens[index * size : (index + 1) * size + self.lookahead])

    def _evicted(self, page: int) -> None:
        self.evicted_pages += 1
        self._forget(self._by_page[page])

    def _forget(self, entry: _Entry) -> None:
        assert entry.parent is not None
        del entry.parent.children[entry.tokens]
        below = [entry]
        while below:
            gone = below.pop()
            gone.alive = False
            below.extend(gone.children.values())
            gone.children.clear()
            del self._by_page[gone.page]
            self._pages.forget(gone.page)
