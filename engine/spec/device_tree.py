"""`engine.spec.tree` on a device: the same trees from the same scores, of fixed size and without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.spec.board import NO_TOKEN, Board


class DeviceCandidates:
    """See `engine.spec.tree.Candidates`. R trees, K branches, M candidates."""

    def __init__(self, topk: int, scores: Tensor, tokens: Tensor) -> None:
        """The first step: log-probabilities, float64, and tokens, int64, of the root's K children, both [R, K]."""
        self._topk = topk
        self._scores, self._tokens = [scores], [tokens]
        self._parents = [torch.full_like(tokens, -1)]
        self._beams = torch.arange(topk, device=tokens.device).expand_as(tokens)
        self._beam_scores = scores
        self.count = topk

    def grow(self, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Children of the K beams, both [R, K, K]; the next beams' parents among the run ones, and their tokens."""
        r, k = tokens.shape[0], self._topk
        total = (self._beam_scores.unsqueeze(2) + scores).reshape(r, k * k)
        best = (-total).sort(dim=1, stable=True).indices[:, :k]
        self._scores.append(total)
        self._tokens.append(tokens.reshape(r, k * k))
        self._parents.append(self._beams.repeat_interleave(k, dim=1))
        self._beams = self.count + best
        self._beam_scores = total.gather(1, best)
        self.count += k * k
        return best // k, self._tokens[-1].gather(1, best)

    def select(self, board: Board) -> None:
        """Put the best nodes of each request on the board, as many as it has rows for and as deep as it allows."""
        k, m, n = self._topk, self.count, board.rows
        scores, tokens, parents = (torch.cat(x, dim=1) for x in (self._scores, self._tokens, self._parents))
        at = torch.arange(m, device=scores.device)
        depth = torch.where(at < k, 1, 2 + (at - k) // (k * k)).expand_as(scores)
        allowed = (depth <= board.steps.unsqueeze(1)) & ~scores.isnan()
        scores = torch.where(allowed, scores, float("-inf"))
        order = (-scores).sort(dim=1, stable=True).indices[:, : n - 1]
        # In the order of the candidates parents come before children; what is not kept comes last.
        kept = torch.where(scores.gather(1, order).isfinite(), order, m).sort(dim=1).values
        exists = kept < m
        source = kept.clamp(max=m - 1)
        place = torch.zeros(len(scores), m + 1, dtype=torch.int64, device=scores.device)
        place.scatter_(1, kept, torch.arange(1, kept.shape[1] + 1, device=scores.device).expand_as(kept))
        above = parents.gather(1, source)
        above = torch.where(above < 0, 0, place.gather(1, above.clamp(min=0)))
        board.tokens[:, 0], board.parent[:, 0], board.depth[:, 0] = board.root, -1, 0
        board.tokens[:, 1:] = torch.where(exists, tokens.gather(1, source), NO_TOKEN)
        board.parent[:, 1:] = torch.where(exists, above, 0)
        board.depth[:, 1:] = torch.where(exists, depth.gather(1, source), 1)
        board.size.copy_(1 + exists.sum(dim=1))
