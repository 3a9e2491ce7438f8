"""What was seen of acceptance: in all, by depth and by prompt kind. It hangs on few settings, so blocks are pooled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.search.evidence import Measurement
from tuner.search.physics import MOST_DEPTH, Array, Physics, Terms, each_kind, of_all

FORMULA_SD = 0.03
"""Of ln of a length or of a depth's chance: what the formula gets wrong of it, and what engines count otherwise."""

PROMPTS_SD = 0.03
"""Of ln(tokens per verify step) of a block, by which prompts came into it; of a depth's share so much per depth."""

ALIKE_STEPS = 4.0
"""So many verify steps of one text tell as much as one of another."""

REQUEST_SD = 0.25
"""Of ln(tokens per verify step) of one request among those of its kind."""

SELDOM = 0.01
"""A depth that fewer steps reach is left out: its logarithm says little."""

MOST_APART = 12
"""Kinds that have chances of their own; a file may name each prompt's own."""

OTHERS = ""
"""The kinds beyond those, as one."""

ALL = -1
"""In the place of a kind: all of them together."""


@dataclass(frozen=True)
class Seen:
    """Logs of figures, one row each, with their variances.

    Row i is of terms `shape[i]`: the tokens per verify step of kind `kind[i]`, or, where `depth[i]` is above 0, the
    share of all steps that accept at least so many drafts.
    """

    terms: Terms
    shape: Array
    kind: Array
    depth: Array
    value: Array
    var: Array

    def __len__(self) -> int:
        return len(self.value)

    def expected(self, reached: Array, shares: Array) -> tuple[Array, Array, Array]:
        """The same by what `Physics.reached` says of the terms; and how it hangs on the length of each kind, and on
        what each reaches at the row's own depth: rows × kinds."""
        each = each_kind(reached)
        length = of_all(each, shares)
        steps = shares[:, None] * length / each  # of each kind among all
        value, by_each = np.log(length)[self.shape], (steps / each)[:, self.shape].T
        by_depth = np.zeros_like(by_each)
        if len(alone := np.flatnonzero(self.kind != ALL)):
            kind, its = self.kind[alone], each[self.kind[alone], self.shape[alone]]
            value[alone] = np.log(its)
            by_each[alone] = 0.0
            by_each[alone, kind] = 1 / its
        if len(deep := np.flatnonzero(self.depth)):
            chances, among = reached[:, self.shape[deep], self.depth[deep] - 1], steps[:, self.shape[deep]]
            share = np.maximum((chances * among).sum(axis=0), 1e-12)
            value[deep] = np.log(share)
            by_each[deep] *= (1 - chances / share).T
            by_depth[deep] = (among / share).T
        return value, by_each, by_depth


def kinds_of(measured: Sequence[Measurement]) -> dict[str, float]:
    """The share of tokens of each kind, in all blocks that tell them; of the rare ones together, behind the others.

    Nothing where all are of one kind.
    """
    sums: dict[str, float] = defaultdict(float)
    for one in measured:
        for kind, _, tokens, _ in one.accepted.kinds:
            if tokens > 0:
                sums[kind] += tokens
    ranked = sorted(sums, key=lambda kind: (-sums[kind], kind))
    found = {kind: sums[kind] for kind in sorted(ranked[:MOST_APART])}
    if rest := ranked[MOST_APART:]:
        found[OTHERS] = math.fsum(sums[kind] for kind in rest)
    whole = math.fsum(found.values())
    return {kind: tokens / whole for kind, tokens in found.items()} if len(found) > 1 else {}


def seen_of(physics: Physics, measured: Sequence[Measurement], terms: Terms) -> Seen:
    """What these blocks tell; `terms` has a row for each of them.

    Of a block that accepted more than its depth allows, the depth is not known: requests came and went. Of trees, whose
    levels are not of one width, only the tokens per verify step count.
    """
    distinct, which = terms.accepting
    names = {kind: i for i, kind in enumerate(physics.kinds)}
    logs: dict[int, list[float]] = defaultdict(list)
    steps: dict[tuple[int, int], tuple[float, float]] = {}
    blocks: Counter[tuple[int, int]] = Counter()
    requests: dict[tuple[int, int], tuple[float, float]] = {}
    for one, at in zip(measured, map(int, which), strict=True):
        depths, accepted = int(distinct.depth[at]), one.accepted
        length, deeper = one.accept_length or 1.0, accepted.reached[depths : depths + 1]
        if distinct.drafter[at] < 0 or depths >= MOST_DEPTH or length > depths + 1 or max(deeper, default=0) > SELDOM:
            continue
        by_depth = accepted.reached[:depths] if distinct.topk[at] == 1 and accepted.steps > 0 else ()
        if one.accept_length and len(by_depth) < depths:
            logs[at].append(math.log(max(1.0, length)))
        for depth, share in enumerate(by_depth, 1):
            blocks[at, depth] += 1
            _add(steps, (at, depth), accepted.steps, share)
        for name, count, _, mine in accepted.kinds if names else ():
            kind = names.get(name, names.get(OTHERS))
            if kind is not None and 0 < mine <= depths + 1:
                _add(requests, (at, kind), count, 1 / mine)
    rows: list[tuple[int, int, int, float, float]] = [
        (at, ALL, 0, math.fsum(several) / len(several), FORMULA_SD**2 + PROMPTS_SD**2 / len(several))
        for at, several in logs.items()
    ]
    for (at, depth), (count, share) in steps.items():
        if SELDOM <= share < 1:
            noise = ALIKE_STEPS * (1 - share) / (share * count)
            noise += (PROMPTS_SD * depth) ** 2 / blocks[at, depth]
            rows.append((at, ALL, depth, math.log(share), depth * FORMULA_SD**2 + noise))
    for (at, kind), (count, each) in requests.items():
        rows.append((at, kind, 0, max(0.0, -math.log(each)), FORMULA_SD**2 + REQUEST_SD**2 / count))
    columns = np.array(sorted(rows)).reshape(-1, 5).T
    shape, kind_, depth_ = columns[:3].astype(int)
    return Seen(distinct, shape, kind_, depth_, columns[3], columns[4])


def _add(sums: dict[tuple[int, int], tuple[float, float]], key: tuple[int, int], count: float, value: float) -> None:
    """A mean by weight, kept as its whole weight and itself."""
    if count <= 0:
        return
    before, mean = sums.get(key, (0.0, 0.0))
    sums[key] = before + count, mean + (value - mean) * count / (before + count)
