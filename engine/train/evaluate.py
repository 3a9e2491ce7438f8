"""How many tokens a verify step would emit with this head: rounds simulated on the target's own greedy answers.

Top-1 accuracy flatters: rounds begin right after a miss, at hard places. So rounds are walked as the engine would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.eagle3 import HeadShape
from engine.train.head import Unroll
from engine.train.target import Taught


@dataclass(frozen=True)
class Acceptance:
    """Of greedy chains: tokens emitted per verify step, and acceptance at each depth given the one before it."""

    accept_length: float
    by_depth: tuple[float, ...]
    rounds: int


def simulate(
    shape: HeadShape,
    weights: dict[str, Tensor],
    embedding: Tensor,
    kept: Tensor,
    taught: Sequence[Taught],
    prompt_lengths: Sequence[int],
    steps: int,
) -> Acceptance:
    """Chains of `steps` drafts over these sequences, whose answers must be greedy ones of the target.

    embedding [V, H]; kept int64 [Vd], target ids of draft ids.
    """
    emitted = rounds = 0
    reached, passed = [0] * steps, [0] * steps
    lm_head = weights["lm_head"].to(embedding.dtype)
    for one, prompt in zip(taught, prompt_lengths, strict=True):
        n = len(one.tokens)
        rows = n - steps - 1
        if rows <= prompt:
            continue
        unroll = Unroll(shape, weights, one.features[None, :rows])
        right = []
        with torch.no_grad():
            for j in range(steps):
                hidden = unroll.step(embedding[one.tokens[1 + j : 1 + j + rows]][None])
                draft = kept[(hidden[0] @ lm_head.t()).float().max(-1).indices]
                right.append(draft == one.tokens[2 + j : 2 + j + rows])
        correct = torch.stack(right).tolist()
        at = prompt - 1  # the first answer token comes from the prompt itself; drafting begins behind it
        while at < rows:
            accepted = 0
            while accepted < steps:
                reached[accepted] += 1
                if not correct[accepted][at]:
                    break
                passed[accepted] += 1
                accepted += 1
            emitted += accepted + 1
            rounds += 1
            at += accepted + 1
    by_depth = tuple(p / r if r else 0.0 for p, r in zip(passed, reached, strict=True))
    return Acceptance(emitted / max(rounds, 1), by_depth, rounds)
