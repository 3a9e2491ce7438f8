"""What every drafter has in common: it proposes trees of draft tokens for the requests of one round.

A tree is ragged: request b owns nodes `start[b]` … `start[b+1] - 1`, its root first, parents before children. The
root is the request's bonus token, emitted but not yet in the cache; a request without a proposal has only its root,
which makes "no speculation" an ordinary round.

A new drafter is one file in this folder: a class with `register`, listed in `_MODULES`. The conformance tests run over
every registered one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.config import DraftLimits, DraftShape, SpecConfig
from engine.memory.pool import Pages
from engine.model.llama import Llama


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
class Check:
    """How a drafter was seen to do: tokens emitted per verify step after this prompt, greedily, at depth 3."""

    prompt: Sequence[int]
    accept_length: float


@dataclass(frozen=True)
class Asked:
    """B requests that want drafts.

    Attributes:
        rids: their ids.
        rows: int64 [B], rows in the page table.
        lengths: int64 [B], committed tokens with keys and values; the root stands at this position.
        roots: int64 [B], the bonus tokens.
        steps: int64 [B], depth allowed for each; 0: the root alone.
        shape: of the round; `steps` are at most its `num_steps`.
    """

    rids: Sequence[int]
    rows: np.ndarray
    lengths: np.ndarray
    roots: np.ndarray
    steps: np.ndarray
    shape: DraftShape

    def subset(self, which: np.ndarray) -> Asked:
        """Only the requests at these indices."""
        rids = [self.rids[i] for i in which.tolist()]
        return Asked(rids, self.rows[which], self.lengths[which], self.roots[which], self.steps[which], self.shape)


@dataclass(frozen=True)
class Seen:
    """What a round committed to the cache: of C requests, the T tokens at consecutive positions.

    Attributes:
        rids: of the requests.
        rows: int64 [C], rows in the page table.
        first: int64 [C], position of each request's first token here.
        start: int64 [C + 1], where each request's tokens begin in what follows.
        tokens: int64 [T].
        following: int64 [T], the token after each; a request's last one may be its new bonus token.
        features: [T, F], outputs of the target's layers that the drafter reads; F is 0 for one that reads none.
        emitted: what each request has emitted, empty while its prompt is being run.
    """

    rids: Sequence[int]
    rows: np.ndarray
    first: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    features: Tensor
    emitted: Sequence[Sequence[int]]


class Drafter(Protocol):
    """Proposes draft tokens. Keeps what it needs per request under the request's id or its row in the page table.

    `features`: target layers whose outputs `observe` wants. `lookahead`: how many tokens beyond its own position an
    entry of the drafter's own cache depends on (a prefix that is shared between requests must agree in those too).
    `alarm_floor`: the share of first drafts that a working one never falls below, 0 where nothing can be said.
    `check`: what it should reach at start, where that is known.
    """

    name: str
    limits: DraftLimits
    features: tuple[int, ...]
    lookahead: int
    alarm_floor: float
    check: Check | None

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """A request begins (or begins again after preemption) with these tokens. None of them has been run yet, but
        for a prefix that it shares with earlier requests."""
        ...

    def propose(self, asked: Asked) -> DraftTree:
        """Trees under the requests' bonus tokens, at most as deep as asked."""
        ...

    def observe(self, seen: Seen) -> None:
        """The round's outcome: emitted tokens, and true features for the drafter's own cache."""
        ...

    def release(self, rid: int) -> None:
        """The request has ended or was preempted."""
        ...


def roots_and_chains(roots: Sequence[int] | np.ndarray, drafts: Sequence[Sequence[int]]) -> DraftTree:
    """Chains: request b's root followed by drafts[b]."""
    lengths = np.fromiter((1 + len(draft) for draft in drafts), dtype=np.int64, count=len(drafts))
    start = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter(
        (token for root, draft in zip(roots, drafts, strict=True) for token in (root, *draft)),
        dtype=np.int64,
        count=int(start[-1]),
    )
    return _chains(tokens, start)


def padded_chains(roots: np.ndarray, drafts: np.ndarray, lengths: np.ndarray) -> DraftTree:
    """Chains: root [B] followed by the first lengths[b] of drafts [B, S]."""
    every = np.concatenate((roots[:, None], drafts), axis=1)
    kept = np.arange(every.shape[1]) <= lengths[:, None]
    return _chains(every[kept], np.concatenate(([0], np.cumsum(1 + lengths))))


def _chains(tokens: np.ndarray, start: np.ndarray) -> DraftTree:
    at = np.arange(len(tokens))
    depth = at - np.repeat(start[:-1], np.diff(start))
    return DraftTree(tokens, np.where(depth == 0, -1, at - 1), depth, start, chain=True)


def joined(first: DraftTree, second: DraftTree, from_second: np.ndarray) -> DraftTree:
    """One tree for all requests: `from_second` [B] tells for each whether its nodes come from `second`.

    `second` holds only those requests, in the same order.
    """
    sizes = np.diff(first.start).copy()
    sizes[from_second] = np.diff(second.start)
    start = np.concatenate(([0], np.cumsum(sizes)))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    local = np.arange(start[-1]) - start[owner]
    base = first.start[:-1].copy()
    base[from_second] = second.start[:-1] + len(first.tokens)
    source = base[owner] + local
    parent = np.concatenate((first.parent, second.parent))[source]
    shift = start[owner] - np.where(from_second[owner], base[owner] - len(first.tokens), base[owner])
    return DraftTree(
        np.concatenate((first.tokens, second.tokens))[source],
        np.where(parent < 0, -1, parent + shift),
        np.concatenate((first.depth, second.depth))[source],
        start,
        first.chain and second.chain,
    )


@dataclass(frozen=True)
class Surroundings:
    """What a drafter is built from.

    Attributes:
        config: the settings.
        target: the model that verifies.
        target_name: for messages.
        pages: whose slots also address a drafter's own cache.
        requests: at most at once.
        positions: longest sequence, drafts included.
        made: drafters by name; one that others are composed of exists once.
    """

    config: SpecConfig
    target: Llama
    target_name: str
    pages: Pages
    requests: int
    positions: int
    made: dict[str, Drafter] = field(default_factory=dict)


_FACTORIES: dict[str, Callable[[Surroundings], Drafter]] = {}
_MODULES = ("none", "ngram", "eagle3", "draft_model", "hybrid")


def register(name: str) -> Callable[[Callable[[Surroundings], Drafter]], Callable[[Surroundings], Drafter]]:
    """Decorator of a class or function: make the drafter known under its setting's name."""

    def add(factory: Callable[[Surroundings], Drafter]) -> Callable[[Surroundings], Drafter]:
        _FACTORIES[name] = factory
        return factory

    return add


def make_drafter(name: str, surroundings: Surroundings) -> Drafter:
    """The drafter of this name, loaded.

    Raises:
        InvalidConfig: what it needs is not given.
        ModelNotFound, ModelBroken: what it needs does not fit; see engine.errors.
    """
    _load()
    if name not in surroundings.made:
        surroundings.made[name] = _FACTORIES[name](surroundings)
    return surroundings.made[name]


def registered() -> tuple[str, ...]:
    """Names of all drafters."""
    _load()
    return tuple(_FACTORIES)


def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"engine.spec.{module}")
