"""What every drafter has in common: it proposes trees of draft tokens for the requests of one round.

A tree is ragged: request b owns nodes `start[b]` … `start[b+1] - 1`, its root first, parents before children. The
root is the request's bonus token, emitted but not yet in the cache; a request without a proposal has only its root,
which makes "no speculation" an ordinary round.

A new drafter is one file in this folder, named as its line in `engine.config.DRAFTERS`: a class with `register`. The
conformance tests run over every registered one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import DRAFTERS, DraftLimits, DraftShape, SpecConfig
from engine.memory.pool import Pages
from engine.model.llama import Llama
from engine.ops.base import DeviceOps, Ops, rows_of
from engine.ops.sampling import DRAFT_STREAM, coins, inverse
from engine.spec.board import Board


@dataclass(frozen=True)
class Proposal:
    """Drafts that were sampled, and from what. A draft without one was chosen, not sampled.

    Attributes:
        nodes: int64 [n], indices into the tree's nodes.
        q: float64 [n, Vd], the distribution of each over the draft vocabulary.
        hot: int64 [Vd], target ids of the draft's ids; None: they are the same.
    """

    nodes: np.ndarray
    q: Tensor
    hot: Tensor | None


@dataclass(frozen=True)
class DraftTree:
    """Nodes of B requests.

    Attributes:
        tokens: int64 [N], roots included.
        parent: int64 [N], index into these N nodes; -1 for a root.
        depth: int64 [N], 0 for a root.
        start: int64 [B + 1].
        chain: whether no node has two children, so that positions are consecutive and the mask is causal.
        proposals: of the drafts that were sampled; only in chains.
        silent: bool [B], requests whose drafts say nothing about whether the drafter works; None: all tell.
    """

    tokens: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    start: np.ndarray
    chain: bool
    proposals: tuple[Proposal, ...] = ()
    silent: np.ndarray | None = None


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
        temperature: float64 [B], above 0 where drafts are to be sampled (acceptance "rejection"), else 0.
        seeds: uint64 [B], of the requests.
    """

    rids: Sequence[int]
    rows: np.ndarray
    lengths: np.ndarray
    roots: np.ndarray
    steps: np.ndarray
    shape: DraftShape
    temperature: np.ndarray
    seeds: np.ndarray

    def subset(self, which: np.ndarray) -> Asked:
        """Only the requests at these indices."""
        rids = [self.rids[i] for i in which.tolist()]
        rows, lengths, roots, steps = (a[which] for a in (self.rows, self.lengths, self.roots, self.steps))
        return Asked(rids, rows, lengths, roots, steps, self.shape, self.temperature[which], self.seeds[which])


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
        speculating: whether the round drafted at all; while none does, a drafter's own cache may wait.
    """

    rids: Sequence[int]
    rows: np.ndarray
    first: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    features: Tensor
    emitted: Sequence[Sequence[int]]
    speculating: bool


class Resident(Protocol):
    """The part of a drafter that runs on a device, on a board's memory alone, and never waits for it.

    `drafts`, `extends`: whether `draft` and `extend` do anything; `looks_up`: whether `look_up` and `hear` do.
    `found_is_silent`: whether what is looked up says nothing about whether the drafter works.
    """

    drafts: bool
    extends: bool
    looks_up: bool
    found_is_silent: bool

    def draft(self, board: Board, deepest: int) -> None:
        """Put trees on the board, at most so deep, and as deep as its steps allow."""
        ...

    def extend(self, board: Board) -> None:
        """What the board says was accepted goes to the drafter's own cache."""
        ...

    def look_up(self, rids: Sequence[int], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """On the host: chains for these requests, at most so long, from all that they have emitted."""
        ...

    def hear(self, rids: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """On the host: what a round has emitted. Requests may have ended meanwhile."""
        ...


class NothingResident:
    """Of a drafter that has nothing to do on a device."""

    drafts = extends = looks_up = found_is_silent = False

    def draft(self, board: Board, deepest: int) -> None:
        """See `Resident.draft`."""

    def extend(self, board: Board) -> None:
        """See `Resident.extend`."""

    def look_up(self, rids: Sequence[int], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Resident.look_up`."""
        del steps
        return [()] * len(rids)

    def hear(self, rids: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """See `Resident.hear`."""


class Drafter(Protocol):
    """Proposes draft tokens. Keeps what it needs per request under the request's id or its row in the page table.

    `observes`: whether `observe` does anything. `features`: target layers whose outputs `observe` wants. `lookahead`:
    how many tokens beyond its own position an entry of the drafter's own cache depends on (a prefix that is shared
    between requests must agree in those too). `alarm_floor`: the share of first drafts that a working one never falls
    below, 0 where nothing can be said. `check`: what it should reach at start, where that is known. `identity`: of what
    it has loaded, the same on every rank. `resident`: what stands in for `propose` and `observe` in rounds that stay on
    a device; None: it has no such rounds.
    """

    name: str
    limits: DraftLimits
    observes: bool
    features: tuple[int, ...]
    lookahead: int
    alarm_floor: float
    check: Check | None
    identity: str
    resident: Resident | None

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


def only_roots(roots: np.ndarray) -> DraftTree:
    """Trees without drafts."""
    count = len(roots)
    return DraftTree(
        roots, np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64), np.arange(count + 1), chain=True
    )


class ChainBuilder:
    """Drafts chains for B requests step by step, each chosen or, where a temperature asks for it, sampled."""

    def __init__(self, ops: Ops, asked: Asked, hot: Tensor | None = None) -> None:
        """`hot` int64 [Vd]: target ids of the draft's ids; None: they are the same."""
        self._ops, self._asked, self._hot = ops, asked, hot
        self._drafts: list[np.ndarray] = []
        self._q: list[Tensor] = []
        self._sampled = np.flatnonzero(asked.temperature > 0)

    def add(self, logits: Tensor) -> np.ndarray:
        """The next draft of every request, int64 [B] target ids, given its logits [B, Vd]."""
        asked, some = self._asked, self._sampled
        ids = np.maximum(self._ops.argmax(logits).cpu().numpy(), 0)
        if len(some):
            scaled = rows_of(logits, some).cpu().double() / torch.from_numpy(asked.temperature[some]).unsqueeze(1)
            q = scaled.softmax(-1).nan_to_num(1.0 / scaled.shape[1])  # of a NaN nothing follows: any token
            position = (asked.lengths[some] + 1 + len(self._drafts)).astype(np.uint64)
            ids[some] = inverse(q, torch.from_numpy(coins(asked.seeds[some] ^ DRAFT_STREAM, position))).numpy()
            self._q.append(q)
        drafts = ids if self._hot is None else self._hot[torch.from_numpy(ids)].numpy()
        self._drafts.append(drafts)
        return drafts

    def tree(self) -> DraftTree:
        """Root b followed by as many of its drafts as were asked for."""
        asked = self._asked
        every = np.stack([asked.roots, *self._drafts], axis=1)
        kept = np.arange(every.shape[1]) <= asked.steps[:, None]
        tree = _chains(every[kept], np.concatenate(([0], np.cumsum(1 + asked.steps))))
        proposals = []
        for i, q in enumerate(self._q):
            used = asked.steps[self._sampled] > i
            nodes = tree.start[:-1][self._sampled][used] + i + 1
            if len(nodes):
                proposals.append(Proposal(nodes, q[torch.from_numpy(used)], self._hot))
        return replace(tree, proposals=tuple(proposals))


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
    place = np.full(len(first.tokens) + len(second.tokens), -1)
    place[source] = np.arange(len(source))
    second_proposals = (replace(p, nodes=p.nodes + len(first.tokens)) for p in second.proposals)
    proposals = []
    for proposal in (*first.proposals, *second_proposals):
        nodes = place[proposal.nodes]
        left = nodes >= 0
        if left.any():
            proposals.append(Proposal(nodes[left], proposal.q[torch.from_numpy(left)], proposal.hot))
    return DraftTree(
        np.concatenate((first.tokens, second.tokens))[source],
        np.where(parent < 0, -1, parent + shift),
        np.concatenate((first.depth, second.depth))[source],
        start,
        first.chain and second.chain,
        tuple(proposals),
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
        device_ops: of a device that rounds can stay on; None: there is none.
        made: drafters by name; one that others are composed of exists once.
    """

    config: SpecConfig
    target: Llama
    target_name: str
    pages: Pages
    requests: int
    positions: int
    device_ops: DeviceOps | None = None
    made: dict[str, Drafter] = field(default_factory=dict)


_FACTORIES: dict[str, Callable[[Surroundings], Drafter]] = {}


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
    for name in DRAFTERS:
        importlib.import_module(f"engine.spec.{name}")
