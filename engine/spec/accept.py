"""Which drafts stand: walk each tree along the tokens that the target chose.

The target chooses one token at every node, by argmax or by sampling with the coin of that position. A draft is
accepted when it is the token chosen at its parent. A draft under a node with target distribution p is then accepted
with probability p(draft), and what is emitted has exactly the distribution p: for deterministic proposals this equals
target-only tree sampling (Li et al., "EAGLE-2", 2024), and a seeded request yields the same text with speculation as
without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.spec.base import DraftTree


@dataclass(frozen=True)
class Accepted:
    """Of B requests.

    Attributes:
        length: int64 [B], tokens emitted: accepted drafts + 1.
        path: int64 [B, longest], nodes from the root to the last accepted draft; -1 behind it. The tokens chosen at
            these nodes are emitted.
    """

    length: np.ndarray
    path: np.ndarray


def accept(tree: DraftTree, chosen: np.ndarray) -> Accepted:
    """Accepted drafts, given the target's token at each node (int64 [N]). No Python loop over requests."""
    requests = len(tree.start) - 1
    if len(tree.tokens) == requests:  # no drafts
        return Accepted(np.ones(requests, dtype=np.int64), tree.start[:-1, None])
    owner = np.repeat(np.arange(requests), np.diff(tree.start))
    deepest = int(tree.depth.max(initial=0))
    path = np.full((requests, deepest + 1), -1, dtype=np.int64)
    path[:, 0] = tree.start[:-1]
    length = np.ones(requests, dtype=np.int64)
    standing = tree.depth == 0
    for depth in range(1, deepest + 1):
        nodes = np.flatnonzero(tree.depth == depth)
        parents = tree.parent[nodes]
        nodes = nodes[standing[parents] & (tree.tokens[nodes] == chosen[parents])]
        if not len(nodes):
            break
        standing[nodes] = True
        path[owner[nodes], depth] = nodes
        length[owner[nodes]] = depth + 1
    return Accepted(length, path[:, : int(length.max(initial=1))])


def ancestor_mask(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Who sees whom: concatenated uint8 [n, n] matrices of all requests, and each one's offset, int64 [B]."""
    sizes = np.diff(tree.start)
    offsets = np.concatenate(([0], np.cumsum(sizes * sizes)))
    mask = np.zeros(int(offsets[-1]), dtype=np.uint8)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    local = np.arange(len(tree.tokens)) - tree.start[owner]
    base = offsets[owner] + local * sizes[owner]
    seen = np.arange(len(tree.tokens))
    while True:  # one pass per depth: node, parent, grandparent, …
        alive = seen >= 0
        if not alive.any():
            return mask, offsets[:-1]
        mask[base[alive] + seen[alive] - tree.start[owner[alive]]] = 1
        seen = np.where(alive, tree.parent[np.maximum(seen, 0)], -1)
