"""Derives every published number of a study again from its stored records, and says which stored ones differ."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.bench import metrics
from tuner.bench.summary import WINDOW_START
from tuner.bench.trace import Trace
from tuner.records import Pair, StoredBlock
from tuner.study.data import StudyData
from tuner.study.decide import recommendation, verdicts_of
from tuner.study.score import score

CLOSE = 1e-9
"""Relative: what the order of additions may change."""


@dataclass(frozen=True)
class Difference:
    """One stored number that does not follow from the records. `what` names it."""

    what: str
    stored: Any
    derived: Any

    def __str__(self) -> str:
        return f"{self.what}: stored {self.stored!r}, derived {self.derived!r}"


@dataclass(frozen=True)
class Recomputed:
    """What was derived, by kind → how many; what differs; and what could not be derived, with why."""

    counts: dict[str, int]
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]


def recompute(data: StudyData, stored_pairs: tuple[Pair, ...], folder: Path | None = None) -> Recomputed:
    """Blocks from their requests (files under `folder`, where they are), pairs from blocks, scores and verdicts from
    pairs."""
    counts = dict.fromkeys(("blocks", "blocks from requests", "pairs", "scores", "verdicts"), 0)
    found: list[Difference] = []
    missing: list[str] = []
    without = 0
    for stored in data.blocks.values():
        counts["blocks"] += 1
        found += _block(stored)
        path = folder / "requests" / f"block-{stored.id}.jsonl.gz" if folder is not None else None
        if path is None or not path.is_file() or WINDOW_START not in stored.block.counters:
            without += not data.simulated
            continue
        try:
            traces = list(_traces(path))
        except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
            missing.append(f"requests of block {stored.id}: {path} cannot be read ({error})")
            continue
        counts["blocks from requests"] += 1
        found += _from_requests(stored, traces)
    if without:
        missing.append(f"requests of {without} blocks: their files are not here, or do not say where the window began")
    counts["pairs"] = len(data.pairs)
    found += _pairs(stored_pairs, data.pairs)
    for trial in data.trials:
        if trial.running or trial.value is None or not trial.launched:
            continue  # it was told what is known of another trial, or that nothing is
        counts["scores"] += 1
        derived = score(data, trial.candidate_id).value
        if not _same(trial.value, derived):
            found.append(Difference(f"score of trial {trial.number} ({trial.candidate_id})", trial.value, derived))
    if data.state == "done":
        derived_verdicts = verdicts_of(recommendation(data))
        counts["verdicts"] = len(derived_verdicts)
        found += _verdicts(data, derived_verdicts)
    elif data.verdicts:
        missing.append(f"verdicts: the study is not done ({data.state})")
    return Recomputed(counts, tuple(found), tuple(missing))


def _block(stored: StoredBlock) -> Iterator[Difference]:
    block, named = stored.block, f"block {stored.id}"
    if block.window_s > 0:
        yield from _differs(f"{named}, tokens per second", block.tokens_per_s, block.tokens / block.window_s)
    per_stream = block.tokens_per_s / block.concurrency
    yield from _differs(f"{named}, tokens per second and stream", block.per_stream_tokens_per_s, per_stream)


def _from_requests(stored: StoredBlock, traces: list[Trace]) -> Iterator[Difference]:
    """Tokens of the window and latencies, as `tuner.bench.summary` derives them."""
    block, named = stored.block, f"block {stored.id} from its requests"
    ended = [trace for trace in traces if not trace.cut and trace.ok]
    start = int(block.counters[WINDOW_START])
    end = start + round(block.window_s * metrics.NS)
    tokens = metrics.tokens_between(traces, start, end)
    yield from _differs(f"{named}, tokens in the window", block.tokens, tokens)
    good = [trace for trace in ended if trace.end_ns < end]
    yield from _differs(f"{named}, requests", block.requests, len(good))
    derived = metrics.percentiles(metrics.e2e_ms(trace) for trace in good)
    for name in ("mean", "p50", "p90", "p99"):
        then, now = getattr(block.e2e_ms, name), getattr(derived, name)
        if (then is None) != (now is None):
            yield Difference(f"{named}, latency {name}", then, now)
        elif then is not None:
            yield from _differs(f"{named}, latency {name}", then, now)


def _differs(what: str, stored: float, derived: float) -> Iterator[Difference]:
    if not _same(stored, derived):
        yield Difference(what, stored, derived)


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)


def _traces(path: Path) -> Iterator[Trace]:
    if not path.stat().st_size:
        raise EOFError("it is empty: the tuner ended while it was being written")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in file:
            told = json.loads(row)
            told |= {"curve": tuple((at, count) for at, count in told["curve"]), "chunks": tuple(told["chunks"])}
            yield Trace(**told)


def _pairs(stored: tuple[Pair, ...], derived: tuple[Pair, ...]) -> Iterator[Difference]:
    def key(pair: Pair) -> tuple[Any, ...]:
        return pair.candidate_id, pair.concurrency, pair.role, pair.index

    then, now = ({key(pair): pair for pair in pairs} for pairs in (stored, derived))
    for each in sorted(then.keys() | now.keys(), key=str):
        a, b = then.get(each), now.get(each)
        if (
            a is None
            or b is None
            or replace(a, log_ratio=0.0) != replace(b, log_ratio=0.0)
            or not _same(a.log_ratio, b.log_ratio)
        ):
            yield Difference(f"pair {each}", a, b)


def _verdicts(data: StudyData, derived: list[Any]) -> Iterator[Difference]:
    then = {(each.candidate_id, each.concurrency): each for each in data.verdicts}
    now = {(each.candidate_id, each.concurrency): each for each in derived}
    for key in sorted(then.keys() | now.keys(), key=str):
        a, b = then.get(key), now.get(key)
        named = f"verdict on {key[0]} " + ("overall" if key[1] is None else f"at concurrency {key[1]}")
        if a is None or b is None:
            yield Difference(named, a, b)
            continue
        for name, stored in vars(a).items():
            other = getattr(b, name)
            same = _same(stored, other) if isinstance(stored, float) and isinstance(other, float) else stored == other
            if not same:
                yield Difference(f"{named}, {name}", stored, other)
