"""What every drafter has in common: it proposes trees of draft tokens for the requests of one round.

A tree is ragged: request b owns nodes `start[b]` … `start[b+1] - 1`, its root first, parents before children. The
root is the request's bonus token, emitted but not yet in the cache; a request without a proposal has only its root,
which makes "no speculation" an ordinary round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.config import SpecConfig


@dataclass(frozen=True)
class DraftTree:
    """Nodes of B requests.

    Attributes:
        tokens: int64 [N], roots included.
        parent: int64 [N], index into these N nodes; -1 for a root.
        depth: int64 [N], 0 for a root.
        start: int64 [B + 1].
        chain: whether no node has two children, so that positions are consecutive and the mask is causal.
    """

    tokens: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    start: np.ndarray
    chain: bool


@dataclass(frozen=True)
class DraftLimits:
    """What a drafter can do at most; settings beyond it are refused by name."""

    max_depth: int
    max_topk: int


class Drafter(Protocol):
    """Proposes draft tokens. Keeps what it needs per request under the request's id."""

    name: str
    limits: DraftLimits

    def add(self, rid: int, tokens: Sequence[int]) -> None:
        """A request begins (or begins again after preemption) with these committed tokens."""
        ...

    def extend(self, rid: int, tokens: Sequence[int]) -> None:
        """Tokens that were committed to the request since."""
        ...

    def propose(self, rids: Sequence[int], roots: Sequence[int], num_steps: Sequence[int]) -> DraftTree:
        """Trees under the requests' bonus tokens `roots`, each at most `num_steps` deep (0: the root alone)."""
        ...

    def release(self, rid: int) -> None:
        """The request has ended or was preempted."""
        ...


def roots_and_chains(roots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftTree:
    """Chains: request b's root followed by drafts[b]."""
    lengths = np.fromiter((1 + len(draft) for draft in drafts), dtype=np.int64, count=len(drafts))
    start = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter(
        (token for root, draft in zip(roots, drafts, strict=True) for token in (root, *draft)),
        dtype=np.int64,
        count=int(start[-1]),
    )
    at = np.arange(len(tokens))
    depth = at - np.repeat(start[:-1], lengths)
    return DraftTree(tokens, np.where(depth == 0, -1, at - 1), depth, start, chain=True)


_FACTORIES: dict[str, Callable[[SpecConfig], Drafter]] = {}


def register(name: str) -> Callable[[Callable[[SpecConfig], Drafter]], Callable[[SpecConfig], Drafter]]:
    """Class decorator: make the drafter known under its setting's name."""

    def add(factory: Callable[[SpecConfig], Drafter]) -> Callable[[SpecConfig], Drafter]:
        _FACTORIES[name] = factory
        return factory

    return add


def make_drafter(config: SpecConfig) -> Drafter:
    """The configured drafter. `SpecConfig.problems` has already refused unknown names."""
    from engine.spec import ngram, none  # noqa: F401  (each registers itself)

    return _FACTORIES[config.speculation](config)


def registered() -> tuple[str, ...]:
    """Names of all drafters."""
    from engine.spec import ngram, none  # noqa: F401

    return tuple(_FACTORIES)
