"""The tensors that hold keys and values, and the pages they are handed out in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """Keys and values [layers, slots, G, D]; slot = page * page_size + offset. Memory is touched on first use."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.page_size, self.pages = page_size, pages
        shape = (layers, pages * page_size, kv_heads, head_dim)
        self._k = torch.empty(shape, dtype=dtype, device=device)
        self._v = torch.empty(shape, dtype=dtype, device=device)
        self._per_layer = [(self._k[i], self._v[i]) for i in range(layers)]
        # Copied by numpy on the host: torch wakes its OpenMP threads for a few rows (see `rows_of`).
        parts = (self._k, self._v) if self._k.device.type == "cpu" else ()
        self._on_host = [_slots(part) for part in parts]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [slots, G, D]."""
        return self._per_layer[index]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers, each [layers, slots, G, D]."""
        return self._k, self._v

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots (int64 [n], where the pool is) in all layers; sources are read before any target is written."""
        for part in self._on_host:
            part[:, target.numpy()] = part[:, source.numpy()]
        if not self._on_host:
            for whole in (self._k, self._v):
                whole.index_copy_(1, target, whole.index_select(1, source))

    @property
    def nbytes(self) -> int:
        """Size in bytes when all of it has been touched."""
        return self._k.nbytes + self._v.nbytes


def _slots(part: Tensor) -> np.ndarray:
    """The same memory as [layers, slots], each element all bytes of a slot."""
    whole = part.view(torch.uint8).numpy().reshape(*part.shape[:2], -1)
    return whole.view(f"V{whole.shape[2]}")[:, :, 0]


class Pages:
    """Who uses which page. Rows of `table` (int32 [requests, pages each]) list a request's pages by position.

    A page is free, used (by one row or, where rows share a prefix, by several), or cached: used by nobody, its content
    kept until the page is needed. free + cached + used = all, always; `check` verifies it.
    """

    def __init__(self, pages: int, page_size: int, requests: int, context_length: int) -> None:
        self.page_size = page_size
        per_request = -(-context_length // page_size)
        # Beyond a row's pages stands the one behind the last, which is nobody's: what is written there is lost.
        self._array = np.full((requests, per_request), pages, dtype=np.int32)
        self.table = torch.from_numpy(self._array)
        self._count = [0] * requests
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_rows = list(range(requests - 1, -1, -1))
        self._total = pages
        self._users = [0] * pages
        self._kept: set[int] = set()
        self._cached: dict[int, None] = {}  # kept pages without users, least recently used first
        self.on_evict: Callable[[int], None] = lambda page: None
        """Told of a cached page before it is given to somebody else."""

    @property
    def free(self) -> int:
        """Pages whose content nobody wants."""
        return len(self._free_pages)

    @property
    def cached(self) -> int:
        """Pages that no request uses and whose content is kept while there is room."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `grow` can give: free ones, then cached ones."""
        return len(self._free_pages) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self._total - self.available

    @property
    def total(self) -> int:
        """All pages."""
        return self._total

    @property
    def rows(self) -> int:
        """Rows of the table, taken or not."""
        return len(self._count)

    @property
    def rows_free(self) -> int:
        """Rows that `open_row` can give."""
        return len(self._free_rows)

    def open_row(self) -> int:
        """A table row without pages. The caller limits requests to the number of rows."""
        return self._free_rows.pop()

    def pages_of(self, row: int) -> list[int]:
        """The row's pages, by position."""
        return self._array[row, : self._count[row]].tolist()

    @property
    def kept(self) -> frozenset[int]:
        """Pages whose content is kept when their last user goes, or was when it went."""
        return frozenset(self._kept)

    def in_use(self, page: int) -> bool:
        """Whether a request holds it."""
        return self._users[page] > 0

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Let a row without pages begin with these, which are kept or used; they must not be written to."""
        assert self._count[row] == 0, "a row shares pages before it has its own"
        for page in pages:
            self._users[page] += 1
            self._cached.pop(page, None)
        self._array[row, : len(pages)] = pages
        self._count[row] = len(pages)

    def grow(self, row: int, tokens: int) -> bool:
        """Give `row` the pages for this many tokens, at the cost of cached ones, least recently used first.

        False, and nothing changed, when there are too few.
        """
        have = self._count[row]
        need = -(-tokens // self.page_size) - have
        if need <= 0:
            return True
        if need > self.available:
            return False
        for index in range(have, have + need):
            if not self._free_pages:
                self._evict()
            page = self._free_pages.pop()
            self._users[page] = 1
            self._array[row, index] = page
        self._count[row] = have + need
        return True

    def close_row(self, row: int) -> None:
        """Take all pages back, and the row. Of kept pages the last of the row will be evicted first."""
        for page in reversed(self.pages_of(row)):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._kept:
                    self._cached[page] = None
                else:
                    self._free_pages.append(page)
        self._array[row] = self._total
        self._count[row] = 0
        self._free_rows.append(row)

    def keep(self, page: int) -> None:
        """Keep the content of a used page when its last user has gone."""
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Undo `keep`: the page is free as soon as nobody uses it."""
        self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free_pages.append(page)

    def _evict(self) -> None:
        page = next(iter(self._cached))
        self.on_evict(page)
        self.forget(page)

    def slots(self, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Slots, int64 [n], of logical positions `at` of table rows `rows` (both int [n]).

        Positions for which a row has no page yet lie in a page behind all others, which a pool for drafts has to have.
        """
        pages = self._array[rows, at // self.page_size].astype(np.int64)
        return pages * self.page_size + at % self.page_size

    def check(self) -> None:
        """Raise AssertionError unless every page is free, cached or used, and has as many users as rows hold it."""
        users = Counter(page for row in range(len(self._count)) for page in self.pages_of(row))
        assert all(self._users[page] == users[page] for page in range(self._total)), "pages with wrong user counts"
        everything = sorted([*users, *self._cached, *self._free_pages])
        assert everything == list(range(self._total)), (
            f"{self._total} pages, but {self.free} free + {self.cached} cached + {len(users)} used"
        )
        assert self._cached.keys() <= self._kept, "a page is cached that nobody keeps"
