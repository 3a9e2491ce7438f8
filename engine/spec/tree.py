"""Trees of draft tokens: grown breadth first from a drafter's scores, then cut to the best nodes.

The expansion is EAGLE-2's (Li et al., 2024): at every step the K best beams are run, each offers its K best children,
and all of them are candidates for the N - 1 nodes that are verified. B requests, K branches, M candidates.
"""

from __future__ import annotations

import numpy as np

from engine.spec.base import DraftTree


class Candidates:
    """Grows B trees in step with the drafter. A candidate's parent is the index of another, -1 for the root."""

    def __init__(self, topk: int, scores: np.ndarray, tokens: np.ndarray) -> None:
        """The first step: log-probabilities and tokens of the root's K children, both [B, K], best first."""
        self._topk = topk
        self._scores, self._tokens = [scores], [tokens]
        self._parents = [np.full_like(tokens, -1)]
        self._beams = np.broadcast_to(np.arange(topk), tokens.shape)
        self._beam_scores = scores
        self.count = topk

    def grow(self, scores: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Children of the K beams: log-probabilities given the parent, and tokens, both [B, K, K].

        Returns the next beams: for each, which of the K run beams is its parent, and its token, both int64 [B, K].
        """
        b, k = tokens.shape[0], self._topk
        total = (self._beam_scores[:, :, None] + scores).reshape(b, k * k)
        best = np.argsort(-total, axis=1, kind="stable")[:, :k]
        self._scores.append(total)
        self._tokens.append(tokens.reshape(b, k * k))
        self._parents.append(np.repeat(self._beams, k, axis=1))
        self._beams = self.count + best
        self._beam_scores = np.take_along_axis(total, best, axis=1)
        self.count += k * k
        return best // k, np.take_along_axis(self._tokens[-1], best, axis=1)

    def select(self, roots: np.ndarray, num_draft_tokens: int, steps: np.ndarray) -> DraftTree:
        """The best nodes of each request, at most `num_draft_tokens` with the root and `steps` [B] deep.

        A path's score never rises and ties go to the earlier candidate, so a node's parent is always chosen before it.
        """
        k = self._topk
        scores, tokens, parents = (np.concatenate(x, axis=1) for x in (self._scores, self._tokens, self._parents))
        at = np.arange(self.count)
        depth = np.where(at < k, 1, 2 + (at - k) // (k * k))
        scores = np.where((depth <= steps[:, None]) & ~np.isnan(scores), scores, -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : num_draft_tokens - 1]
        kept = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(kept, order, np.isfinite(np.take_along_axis(scores, order, axis=1)), axis=1)
        sizes = 1 + kept.sum(axis=1)
        start = np.concatenate(([0], np.cumsum(sizes)))
        place = start[:-1, None] + np.cumsum(kept, axis=1)  # index of each kept candidate among all nodes
        above = np.where(parents < 0, start[:-1, None], np.take_along_axis(place, np.maximum(parents, 0), axis=1))
        out = DraftTree(
            np.empty(start[-1], dtype=np.int64),
            np.full(start[-1], -1, dtype=np.int64),
            np.zeros(start[-1], dtype=np.int64),
            start,
            chain=False,
        )
        out.tokens[start[:-1]] = roots
        where = place[kept]
        out.tokens[where] = tokens[kept]
        out.parent[where] = above[kept]
        out.depth[where] = np.broadcast_to(depth, kept.shape)[kept]
        return out
