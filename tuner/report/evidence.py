"""The figures behind a decision: pairs, latencies, acceptance, time. Plain data, made of a study's records alone.

An interval here is Student's over launches, which are what is repeated, and is given from four of them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tuner.judge.intervals import ALPHA, MIN_PAIRS, t_interval
from tuner.records import Block, Pair, Recommendation, StoredBlock, Verdict
from tuner.study.axes import AxisChange, axis_changes
from tuner.study.data import StudyData
from tuner.study.decide import confirmed_verdicts, overall_ratios

MOST_SHOWN = 3
"""Candidates that latencies, acceptance and time are told of, beside the baseline."""

PARTS = ("draft", "forward", "extend", "other")
"""What a round of the engine's model process is made of, in order; `forward` is the verification."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` launches, with its 95 % interval from four on."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Evidence:
    """The pairs of one finalist at one level, or over all levels (None): a ratio each, and what they come to."""

    candidate_id: str
    concurrency: int | None
    ratios: tuple[float, ...]
    verdict: Verdict | None


@dataclass(frozen=True)
class LatencyChange:
    """One latency of one candidate beside the baseline's, in the same pairs. `change` is a ratio: above 1 is slower."""

    candidate_id: str
    concurrency: int
    name: str
    baseline_ms: float
    candidate_ms: float
    change: Estimate
    baseline_requests: int
    requests: int


@dataclass(frozen=True)
class Acceptance:
    """What speculation yields: tokens per verify step and request, and the share of steps that keep at least d drafts.

    `steps` is 0 where the server did not speculate at this level.
    """

    candidate_id: str
    concurrency: int
    accept_length: Estimate | None
    steps: int
    at_depth: tuple[Estimate, ...]


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of one round of the model process, by `PARTS`; `tokens` is what all requests got in one."""

    candidate_id: str
    concurrency: int
    parts_ms: tuple[Estimate, ...]
    tokens: Estimate


def shown(data: StudyData, found: Recommendation) -> tuple[str, ...]:
    """The candidates that the report looks at closely: winners and finalists, else the fastest of the search."""
    choices = (found.overall, *found.per_concurrency)
    ids = [choice.winner.id for choice in choices if choice.winner]
    ids += [choice.finalist.id for choice in choices if choice.finalist]
    ids += [finalist for confirmation in data.confirmations for finalist in confirmation.finalists]
    if not ids:
        told = [trial for trial in data.measured if trial.feasible and trial.value is not None]
        ids = [trial.candidate_id for trial in sorted(told, key=lambda trial: -(trial.value or 0.0))]
    return tuple(dict.fromkeys(ids))[:MOST_SHOWN]


def evidence(data: StudyData) -> tuple[Evidence, ...]:
    """Every finalist at every level and overall, in order of finalists; their verdicts as the decision weighs them."""
    verdicts = {(v.candidate_id, v.concurrency): v for v in confirmed_verdicts(data)}
    finalists = dict.fromkeys(f for confirmation in data.confirmations for f in confirmation.finalists)
    found = []
    for finalist in finalists:
        pairs = _pairs(data, finalist)
        overall = overall_ratios(data, pairs) if len(data.levels) > 1 else []
        by_level = {level: [p.log_ratio for p in pairs if p.concurrency == level] for level in sorted(data.levels)}
        for level, logs in [(None, overall), *by_level.items()]:
            if logs:
                ratios = tuple(math.exp(log) for log in logs)
                found.append(Evidence(finalist, level, ratios, verdicts.get((finalist, level))))
    return tuple(found)


def _pairs(data: StudyData, candidate_id: str) -> list[Pair]:
    """Of the confirmation where there are any, else of the search."""
    mine = [pair for pair in data.pairs if pair.candidate_id == candidate_id]
    return [pair for pair in mine if pair.role == "confirm"] or mine


def axes(data: StudyData, candidates: Sequence[str]) -> tuple[AxisChange, ...]:
    """Each candidate by the kind and by the length of what it was asked, beside the baseline in the same pairs."""
    return tuple(each for one in candidates for each in axis_changes(data, one, _pairs(data, one)))


LATENCIES: tuple[tuple[str, Callable[[Block], float | None], Callable[[Block], int]], ...] = (
    ("first token, p50", lambda b: b.ttft_ms.p50, lambda b: b.ttft_ms.n),
    ("first token, p90", lambda b: b.ttft_ms.p90, lambda b: b.ttft_ms.n),
    ("per token, p50", lambda b: b.tpot_ms.p50, lambda b: b.tpot_ms.n),
    ("whole request, average", lambda b: b.e2e_ms.mean, lambda b: b.e2e_ms.n),
    ("whole request, p50", lambda b: b.e2e_ms.p50, lambda b: b.e2e_ms.n),
    ("whole request, p99", lambda b: b.e2e_ms.p99, lambda b: b.e2e_ms.n),
)


def latencies(data: StudyData, candidates: Sequence[str]) -> tuple[LatencyChange, ...]:
    """What each candidate costs in latency, or saves; by level, then by what is waited for."""
    found = []
    for candidate_id in candidates:
        pairs = _pairs(data, candidate_id)
        for level in sorted(data.levels):
            sides = [
                (data.blocks[pair.baseline_block].block, data.blocks[pair.candidate_block].block)
                for pair in pairs
                if pair.concurrency == level
            ]
            for name, value, count in LATENCIES:
                told = [(value(base), value(mine)) for base, mine in sides]
                both = [(a, b) for a, b in told if a and b]
                if both:
                    change = _ratios([math.log(b / a) for a, b in both])
                    base_ms, mine_ms = fmean(a for a, _ in both), fmean(b for _, b in both)
                    requests = [sum(map(count, side)) for side in zip(*sides, strict=True)]
                    found.append(LatencyChange(candidate_id, level, name, base_ms, mine_ms, change, *requests))
    return tuple(found)


def acceptance(data: StudyData, candidates: Sequence[str]) -> tuple[Acceptance, ...]:
    """What speculation yields for each candidate at each level, where the server counts it."""
    found = []
    for candidate_id in candidates:
        for level in sorted(data.levels):
            blocks = [b for b in _blocks(data, candidate_id, level) if "server_verify_steps" in b.counters]
            if not blocks:
                continue
            drafting = [b for b in blocks if b.counters["server_verify_steps"]]
            lengths = [b.accept_length for b in drafting if b.accept_length is not None]
            depths: list[Estimate] = []
            while told := [b for b in drafting if _at(len(depths) + 1) in b.counters]:
                name = _at(len(depths) + 1)
                shares = [b.counters[name] / b.counters["server_verify_steps"] for b in told]
                depths.append(estimate(shares, floor=0.0, ceiling=1.0))
            steps = round(sum(b.counters["server_verify_steps"] for b in blocks))
            length = estimate(lengths, floor=1.0) if lengths else None
            found.append(Acceptance(candidate_id, level, length, steps, tuple(depths)))
    return tuple(found)


def _at(depth: int) -> str:
    return f"accepted_at_depth_{depth}"


def round_times(data: StudyData, candidates: Sequence[str]) -> tuple[RoundTime, ...]:
    """Where a round's time goes, the baseline first at every level; empty where the engine's counters do not tell."""
    found = []
    for level in sorted(data.levels):
        for candidate_id in (data.baseline.id, *candidates):
            blocks = [b for b in _blocks(data, candidate_id, level) if b.counters.get("server_rounds")]
            told = [b for b in blocks if all(f"server_{part}_s" in b.counters for part in PARTS)]
            if told:
                parts = tuple(
                    estimate([1000 * b.counters[f"server_{part}_s"] / b.counters["server_rounds"] for b in told], 0.0)
                    for part in PARTS
                )
                tokens = [b.counters.get("server_generated", b.tokens) / b.counters["server_rounds"] for b in told]
                found.append(RoundTime(candidate_id, level, parts, estimate(tokens, 0.0)))
    return tuple(found)


def _blocks(data: StudyData, candidate_id: str, level: int) -> list[Block]:
    """Valid blocks of the confirmation, else of the search."""

    def of(role: str) -> Iterable[StoredBlock]:
        return (
            stored
            for stored in data.blocks.values()
            if (stored.candidate_id, stored.concurrency, stored.role) == (candidate_id, level, role)
            and stored.block.valid
        )

    return [stored.block for stored in of("confirm")] or [
        stored.block for role in ("look", "screen") for stored in of(role)
    ]


def estimate(values: Sequence[float], floor: float = -math.inf, ceiling: float = math.inf) -> Estimate:
    """The mean of some launches, with an interval from `MIN_PAIRS` on that stays within what is possible."""
    if len(values) < MIN_PAIRS:
        return Estimate(fmean(values), None, None, len(values))
    found = t_interval(values, 1 - ALPHA)
    return Estimate(found.mean, max(floor, found.low), min(ceiling, found.high), len(values))


def _ratios(logs: Sequence[float]) -> Estimate:
    found = estimate(logs)
    low, high = (math.exp(end) if end is not None else None for end in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.n)
