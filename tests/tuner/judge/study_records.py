"""Builds the stored records of an imaginary study from its log ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.judge.recommend import recommend
from tuner.records import Block, Candidate, Gate, Pair, Percentiles, Recommendation, StoredBlock

BASELINE = Candidate({"speculation": "none"})
FAST = Candidate({"speculation": "ngram", "num_steps": 3})
OTHER = Candidate({"speculation": "ngram", "num_steps": 5})
NOTHING = Percentiles(0, None, None, None, None)


def block(concurrency: int, rate: float, *, valid: bool = True, role: Any = "confirm", length: float = 60.0) -> Block:
    wobble = (0.97, 1.02, 1.0, 0.99, 1.03, 1.01, 0.98, 1.0)
    return Block(
        concurrency=concurrency,
        role=role,
        prompt_ids=("chat-01",),
        started_at=0.0,
        warmup_s=4.0,
        window_s=8.0,
        tokens=rate * 8,
        tokens_per_s=rate,
        per_stream_tokens_per_s=rate / concurrency,
        requests=20,
        failed_requests=0,
        mean_output_tokens=length,
        achieved_concurrency=float(concurrency),
        ttft_ms=NOTHING,
        tpot_ms=NOTHING,
        chunk_gap_ms=NOTHING,
        e2e_ms=NOTHING,
        accept_length=None,
        gates=(Gate("low_success_rate", 1.0 if valid else 0.5, 0.99, valid),),
        series=tuple(rate * w for w in wobble),
    )


class Study:
    def __init__(self) -> None:
        self.blocks: dict[int, StoredBlock] = {}
        self.pairs: list[Pair] = []
        self.candidates = {BASELINE.id: BASELINE}

    def store(self, candidate: Candidate, one: Block, index: int) -> int:
        number = len(self.blocks) + 1
        self.blocks[number] = StoredBlock(number, candidate.id, number, one.concurrency, one.role, index, number, one)
        return number

    def add(
        self,
        candidate: Candidate,
        concurrency: int,
        log_ratios: Sequence[float],
        *,
        role: Any = "confirm",
        valid: bool = True,
        length: float = 60.0,
    ) -> Study:
        self.candidates[candidate.id] = candidate
        for index, log_ratio in enumerate(log_ratios):
            base = self.store(BASELINE, block(concurrency, 100.0, role=role), index)
            fast = block(concurrency, 100.0 * math.exp(log_ratio), role=role, valid=valid, length=length)
            mine = self.store(candidate, fast, index)
            self.pairs.append(Pair(candidate.id, concurrency, role, index, base, mine, log_ratio))
        return self

    def recommend(self, weights: Mapping[int, float], **changes: Any) -> Recommendation:
        given: dict[str, Any] = {
            "study": "imaginary",
            "baseline": BASELINE,
            "candidates": self.candidates,
            "blocks": self.blocks,
            "pairs": self.pairs,
            "weights": weights,
            "profile": "short",
        }
        return recommend(**{**given, **changes})
