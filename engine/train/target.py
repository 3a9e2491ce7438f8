"""The frozen target as a teacher: features, final hidden states and greedy answers, in process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.build import Core
from engine.ipc.messages import SamplingParams, Submit
from engine.memory.pool import KVPool, Pages
from engine.ops.base import View

LONGEST = 1024
"""Tokens of a conversation that are trained on; longer ones are cut."""


def feature_layers(layers: int) -> tuple[int, int, int]:
    """Layers whose *outputs* EAGLE-3 reads: near the bottom, the middle and the top (EAGLE-3's own default)."""
    return 1, layers // 2 - 1, layers - 4


@dataclass(frozen=True)
class Taught:
    """One sequence: ids int64 [T], features [T, 3H], hidden [T, H] (final, normed and weighted)."""

    tokens: Tensor
    features: Tensor
    hidden: Tensor


class Teacher:
    """Runs whole sequences through the target, several at once, in a cache of its own."""

    def __init__(self, core: Core, layers: Sequence[int]) -> None:
        self.model = core.model
        self.layers = tuple(layers)
        config, page = self.model.config, 16
        self._pages = Pages(16 * LONGEST // page, page, 16, LONGEST)
        self._rows = [self._pages.open_row() for _ in range(16)]
        for row in self._rows:
            self._pages.grow(row, LONGEST)
        self._pool = KVPool(
            config.layers, 16 * LONGEST // page, page, config.kv_heads, config.head_dim, self.model.dtype
        )

    def teach(self, sequences: Sequence[Sequence[int]]) -> list[Taught]:
        """At most 16 sequences of at most `LONGEST` tokens."""
        lengths = np.array([len(s) for s in sequences])
        start = np.concatenate(([0], np.cumsum(lengths)))
        owner = np.repeat(np.arange(len(sequences)), lengths)
        at = np.arange(start[-1]) - start[owner]
        rows = np.array(self._rows)[: len(sequences)]
        tokens = torch.from_numpy(np.concatenate([np.array(s, dtype=np.int64) for s in sequences]))
        view = View(
            tokens=tokens,
            positions=torch.from_numpy(at.astype(np.int32)),
            slots=torch.from_numpy(self._pages.slots(rows[owner], at)),
            page_table=self._pages.table,
            page_size=self._pages.page_size,
            table_row=torch.from_numpy(rows.astype(np.int32)),
            row_start=torch.from_numpy(start.astype(np.int32)),
            context=torch.zeros(len(sequences), dtype=torch.int32),
            mask=None,
            mask_start=torch.full((len(sequences),), -1, dtype=torch.int64),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )
        with torch.no_grad():
            hidden, features = self.model.hidden(view, self._pool, self.layers)
        return [
            Taught(tokens[a:b], features[a:b], hidden[a:b])
            for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True)
        ]


def answer(
    core: Core, prompts: Sequence[tuple[int, ...]], tokens: int, stop: Sequence[int], temperature: float, seed: int
) -> list[list[int]]:
    """The target's answers, stop token included where one came."""
    answers: list[list[int]] = [[] for _ in prompts]
    for rid, prompt in enumerate(prompts):
        core.scheduler.submit(
            Submit(
                rid,
                prompt,
                SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + rid, stop_token_ids=tuple(stop)),
            )
        )
    while core.scheduler.busy:
        for update in core.scheduler.step():
            answers[update.rid].extend(update.token_ids)
    return answers
