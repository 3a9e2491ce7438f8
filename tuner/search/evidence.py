"""What a search has seen, as the model takes it: figures of candidates, and which of them do not work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tuner.records import Candidate, Setting

BLOCK_SD = 0.015
"""Of the log of a block's throughput, where nothing better is known: within a launch, and between launches."""


class Accepted(NamedTuple):
    """What became of a block's drafts.

    Of its verify `steps`, `reached[d - 1]` is the share that accepted at least d drafts, in a row from the first on.
    `kinds` is (prompt kind, requests that ended well, their tokens, their tokens per verify step). Either is empty
    where it is not told.
    """

    steps: float = 0.0
    reached: tuple[float, ...] = ()
    kinds: tuple[tuple[str, float, float, float], ...] = ()


class Measurement(NamedTuple):
    """One candidate at one level of concurrency.

    `accept_length` is tokens per verify step, the others are 90th percentiles of latencies; None where one is not told.
    `sd` is the standard deviation of ln(tokens_per_s) that measuring adds.
    """

    candidate: Candidate
    level: int
    tokens_per_s: float
    accept_length: float | None = None
    ttft_p90_ms: float | None = None
    tpot_p90_ms: float | None = None
    e2e_p90_ms: float | None = None
    sd: float = BLOCK_SD
    accepted: Accepted = Accepted()


@dataclass(frozen=True)
class Evidence:
    """All that is known of a space so far.

    `failed` are candidates without a result; `crashed` those of them whose own launch ended so.
    """

    measured: tuple[Measurement, ...] = ()
    failed: tuple[Candidate, ...] = ()
    crashed: tuple[Candidate, ...] = ()


def complete(settings: Mapping[str, Setting], fixed: Mapping[str, Setting]) -> dict[str, Setting]:
    """A candidate's settings with the fixed ones of its space beneath them."""
    return {**fixed, **settings}
