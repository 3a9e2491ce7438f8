"""How many threads the algebra of the search takes: one. Its matrices are small, and a second thread costs more than it
brings; on a machine that is busy, with a server for instance, some ten times as much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy  # noqa: F401 - what is loaded later would not be found
import scipy.linalg  # noqa: F401
from threadpoolctl import ThreadpoolController


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block linear algebra takes one thread."""
    with _libraries().limit(limits=1, user_api="blas"):
        yield
