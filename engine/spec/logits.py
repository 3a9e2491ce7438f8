"""What a request does to its logits before a token is chosen, and what it is told about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ipc.messages import TokenLogprob
from engine.request import Request

_ROWS = 64
"""Normalised at a time: a prompt's logits are large, and their float64 copies would be twice that."""


def adjust(logits: Tensor, tokens: np.ndarray, parent: np.ndarray, request: Request) -> None:
    """Apply a request's penalties and bias to the rows of its tree, float32 [n, V], in place.

    Args:
        tokens: int64 [n], drafts of the tree; its root, first, is the request's last token.
        parent: int64 [n], -1 for the root. A node's penalties count the drafts on its path, as if they had been output:
            where it is accepted they have been, so that speculation changes no distribution.
    """
    sampling = request.sampling
    prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
    bias_ids = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.int64)
    bias = torch.tensor([value for _, value in sampling.logit_bias], dtype=torch.float32)
    paths: list[list[int]] = []
    for node in range(len(tokens)):
        paths.append([] if node == 0 else [*paths[parent[node]], int(tokens[node])])
        row = logits[node]
        said, times = np.unique(np.array(output + paths[node], dtype=np.int64), return_counts=True)
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.union1d(said, np.array(prompt, dtype=np.int64)))
            values = row[seen]
            factor = sampling.repetition_penalty
            row[seen] = torch.where(values > 0, values / factor, values * factor)
        if sampling.presence_penalty or sampling.frequency_penalty:
            lost = sampling.presence_penalty + sampling.frequency_penalty * times
            row[torch.from_numpy(said)] -= torch.from_numpy(lost.astype(np.float32))
        row[bias_ids] += bias


def forbid_ends(logits: Tensor, depth: np.ndarray, request: Request, said: int) -> None:
    """Put the request's end tokens out of reach where its output would be too short, in place.

    Args:
        logits: of its tree, float32 [n, V].
        depth: int64 [n], of the nodes.
        said: tokens of its output up to the root.
    """
    early = np.flatnonzero(said + depth < request.sampling.min_tokens)
    logits[torch.from_numpy(early).unsqueeze(1), torch.tensor(sorted(request.stop_ids))] = float("-inf")


def logprobs(logits: Tensor, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each row of logits [n, V]: the log-probability of its token in `ids` (-1 for none), and the `top` largest."""
    found = []
    for first in range(0, len(ids), _ROWS):
        part = logits[first : first + _ROWS].double()
        normaliser = part.logsumexp(-1, keepdim=True)
        chosen = torch.tensor(ids[first : first + _ROWS]).clamp(min=0).unsqueeze(1)
        values = (part.gather(1, chosen) - normaliser).squeeze(1).tolist()
        best = part.topk(min(top, part.shape[1]), dim=-1)
        best_values, best_ids = (best.values - normaliser).tolist(), best.indices.tolist()
        for value, its_values, its_ids in zip(values, best_values, best_ids, strict=True):
            found.append(TokenLogprob(value, tuple(zip(its_ids, its_values, strict=True))))
    return found
