"""The tensors that hold keys and values, and the pages they are handed out in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """Keys and values [layers, slots, G, D]; slot = page * page_size + offset. Memory is touched on first use."""

    def __init__(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.page_size, self.pages = page_size, pages
        shape = (layers, pages * page_size, kv_heads, head_dim)
        self._k = torch.empty(shape, dtype=dtype)
        self._v = torch.empty(shape, dtype=dtype)
        self._per_layer = [(self._k[i], self._v[i]) for i in range(layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [slots, G, D]."""
        return self._per_layer[index]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots (int64 [n]) in all layers; sources are read before any target is written."""
        self._k[:, target] = self._k[:, source]
        self._v[:, target] = self._v[:, source]

    @property
    def nbytes(self) -> int:
        """Size in bytes when all of it has been touched."""
        return self._k.nbytes + self._v.nbytes


class Pages:
    """Who owns which page. Rows of `table` (int32 [requests, pages each]) list a request's pages by position.

    free + owned = all, always; `check` verifies it.
    """

    def __init__(self, pages: int, page_size: int, requests: int, context_length: int) -> None:
        self.page_size = page_size
        per_request = -(-context_length // page_size)
        self._array = np.zeros((requests, per_request), dtype=np.int32)
        self.table = torch.from_numpy(self._array)
        self._count = [0] * requests
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_rows = list(range(requests - 1, -1, -1))
        self._total = pages

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free_pages)

    @property
    def total(self) -> int:
        """All pages."""
        return self._total

    def open_row(self) -> int:
        """A table row without pages. The caller limits requests to the number of rows."""
        return self._free_rows.pop()

    def grow(self, row: int, tokens: int) -> bool:
        """Give `row` the pages for this many tokens. False, and nothing changed, when there are too few."""
        have = self._count[row]
        need = -(-tokens // self.page_size) - have
        if need <= 0:
            return True
        if need > len(self._free_pages):
            return False
        self._array[row, have : have + need] = [self._free_pages.pop() for _ in range(need)]
        self._count[row] = have + need
        return True

    def close_row(self, row: int) -> None:
        """Take all pages back, and the row."""
        self._free_pages.extend(self._array[row, : self._count[row]].tolist())
        self._count[row] = 0
        self._free_rows.append(row)

    def slots(self, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Slots, int64 [n], of logical positions `at` of table rows `rows` (both int [n])."""
        pages = self._array[rows, at // self.page_size].astype(np.int64)
        return pages * self.page_size + at % self.page_size

    def check(self) -> None:
        """Raise AssertionError unless every page is free or owned exactly once."""
        owned = [page for row, n in enumerate(self._count) for page in self._array[row, :n].tolist()]
        everything = sorted(owned + self._free_pages)
        assert everything == list(range(self._total)), f"{self._total} pages, but owned + free is {len(everything)}"
