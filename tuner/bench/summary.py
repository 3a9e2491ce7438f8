"""From what was recorded to a `Block`: a pure function, so that any figure can be derived again."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.bench import metrics
from tuner.bench.axes import by_axis
from tuner.bench.client import usable_cores
from tuner.bench.counters import CounterDelta, Snapshot, delta
from tuner.bench.gates import AnswerFaults, Observed, gates, half_drift
from tuner.bench.machine import Surroundings
from tuner.bench.recount import Recount
from tuner.bench.trace import Trace
from tuner.records import Block, Role

SHORT_NEEDS_TOKENS = 8

WINDOW_START = "window_start_ns"
"""Among a block's counters: where its window began, by the clock of the per-request file beside it."""


@dataclass(frozen=True)
class Recording:
    """Everything that one run of the load left behind. Window: [start_ns, end_ns], `time.monotonic_ns`; `kinds` is
    prompt id → kind."""

    concurrency: int
    max_tokens: int
    traces: tuple[Trace, ...]
    started_at: float
    start_ns: int
    end_ns: int
    warmup_s: float
    warm: bool
    warm_detail: str
    client_cpu_s: float
    process_cpu_s: float
    server_is_local: bool
    turnaround_s: float
    lags_s: tuple[float, ...]
    edge_lag_s: float
    connections: int
    before: Snapshot | None
    after: Snapshot | None
    ceiling_events_per_s: float | None = None
    stopped_s: float = 0.0
    client_processes: int = 1
    surroundings: Surroundings = field(default_factory=Surroundings)
    recount: Recount | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)


def summarise(seen: Recording, role: Role) -> tuple[Block, tuple[Trace, ...]]:
    """The block, and the traces that overlap its window in the order they were sent."""
    start, end = seen.start_ns, seen.end_ns
    window_s = (end - start) / metrics.NS
    traces = sorted((t for t in seen.traces if t.sent_ns < end and t.end_ns > start), key=lambda t: t.number)
    ended = [t for t in traces if t.end_ns < end and not t.cut]
    good = [t for t in ended if t.ok]
    failed = [t for t in traces if t.problem is not None]  # behind the window, too: its tokens are missing inside
    full = [t for t in good if t.max_tokens == seen.max_tokens]
    tokens = metrics.tokens_between(traces, start, end)
    known = [t.tokens for t in full or good if t.tokens is not None]
    first_in = [t for t in traces if t.first_ns is not None and start <= t.first_ns < end]
    seconds = metrics.series(traces, start, end)
    e2e = metrics.percentiles(metrics.e2e_ms(t) for t in good)
    change = delta(seen.before, seen.after)
    chunks = float(sum(start <= at < end for t in traces for at in t.chunks))
    found = gates(
        Observed(
            concurrency=seen.concurrency,
            window_s=window_s,
            warm=seen.warm,
            warm_detail=seen.warm_detail,
            requests=len(good),
            failed=len(failed),
            failure_detail=_most_common(failed),
            in_flight=metrics.mean_in_flight(traces, start, end),
            mean_request_s=e2e.mean / 1000 if e2e.mean else None,
            client_busy=seen.client_cpu_s / window_s,
            client_steal=seen.process_cpu_s / window_s / usable_cores() if seen.server_is_local else None,
            turnaround_s=seen.turnaround_s,
            loop_lag_s=sum(seen.lags_s) / len(seen.lags_s) if seen.lags_s else 0.0,
            edge_lag_s=seen.edge_lag_s,
            stopped_s=seen.stopped_s,
            tokens=tokens,
            unheard_tokens=metrics.unheard_tokens(traces, end),
            series=seconds,
            events_per_s=chunks / window_s,
            ceiling_events_per_s=seen.ceiling_events_per_s,
            surroundings=seen.surroundings,
            recount=seen.recount,
            **{**vars(answer_faults(traces, good)), **_counter_check(seen, change)},
        )
    )
    counters = {
        WINDOW_START: float(start),
        "client_cpu_s": seen.client_cpu_s,
        "process_cpu_s": seen.process_cpu_s,
        "client_processes": float(seen.client_processes),
        "connections": float(seen.connections),
        "chunks": chunks,
        "turnaround_ms": 1000 * seen.turnaround_s,
        "loop_lag_mean_ms": 1000 * sum(seen.lags_s) / len(seen.lags_s) if seen.lags_s else 0.0,
        "loop_lag_max_ms": 1000 * max(seen.lags_s, default=0.0),
        "prompt_tokens": float(sum(t.prompt_tokens or 0 for t in first_in)),
        "output_tokens_sd": statistics.pstdev(known) if known else 0.0,
        "finished_by_length": float(sum(t.finish == "length" for t in good)),
        "half_drift": half_drift(seconds) if len(seconds) >= 4 else 0.0,
    }
    counters |= by_axis(good, seen.kinds)
    told = [t for t in first_in if t.prompt_tokens and t.cached_tokens is not None]
    if told:
        counters["cached_share"] = sum(t.cached_tokens or 0 for t in told) / sum(t.prompt_tokens or 0 for t in told)
    if seen.ceiling_events_per_s is not None:
        counters["client_ceiling_events_per_s"] = seen.ceiling_events_per_s
    if change is not None:
        server = {
            "server_generated": change.generated,
            "server_verify_steps": change.steps,
            "server_accepted": change.accepted,
            "server_drafted": change.drafted,
            "server_emitted": change.emitted,
            "server_rounds": change.rounds,
            **{f"server_{part}_s": spent for part, spent in change.seconds.items()},
        }
        counters |= {name: value for name, value in server.items() if value is not None}
        counters |= {f"accepted_at_depth_{i}": count for i, count in enumerate(change.accepted_at_depth, start=1)}
    block = Block(
        concurrency=seen.concurrency,
        role=role,
        prompt_ids=tuple(t.prompt_id for t in traces),
        started_at=seen.started_at,
        warmup_s=seen.warmup_s,
        window_s=window_s,
        tokens=tokens,
        tokens_per_s=tokens / window_s,
        per_stream_tokens_per_s=tokens / window_s / seen.concurrency,
        requests=len(good),
        failed_requests=len(failed),
        mean_output_tokens=sum(known) / len(known) if known else 0.0,
        achieved_concurrency=metrics.mean_in_flight(traces, start, end),
        ttft_ms=metrics.percentiles(metrics.ttft_ms(t) for t in first_in if t.problem is None),
        tpot_ms=metrics.percentiles(metrics.tpot_ms(t) for t in good),
        chunk_gap_ms=metrics.percentiles(metrics.chunk_gaps_ms(traces, start, end)),
        e2e_ms=e2e,
        accept_length=change.accept_length if change else None,
        gates=found,
        series=seconds,
        counters=counters,
    )
    return block, tuple(traces)


def answer_faults(traces: Sequence[Trace], good: Sequence[Trace]) -> AnswerFaults:
    """What is wrong with all of these requests, and with those among them that ended well."""
    unknown = [t for t in traces if t.problem is None and t.usage == "none" and (t.chunks or not t.cut)]
    return AnswerFaults(
        unknown_tokens=len(unknown),
        usage_detail=_usage_detail(unknown, good),
        overrun_tokens=max((t.tokens - t.max_tokens for t in good if t.tokens is not None), default=0),
        short_outputs=sum(_short(t) for t in good),
        degenerate_outputs=sum(metrics.degenerate(t.text) for t in good),
        undercounted=sum(metrics.undercounted(t) for t in traces if t.ok),  # of a cut one the last count may be missing
    )


def _counter_check(seen: Recording, change: CounterDelta | None) -> dict[str, float]:
    """Client and server tokens over the same time, between the two readings of the counter.

    The server counts a step when it is made, the client when it arrives: up to one chunk of each stream is open at
    either end, beside what was made while the page was read.
    """
    if change is None or change.generated is None:
        return {}
    client = metrics.tokens_between(seen.traces, change.start_ns, change.end_ns)
    chunks = sum(change.start_ns <= at < change.end_ns for t in seen.traces for at in t.chunks)
    per_chunk = client / chunks if chunks else 1.0
    rate = client * metrics.NS / (change.end_ns - change.start_ns)
    slack = rate * change.uncertain_s + seen.concurrency * per_chunk
    return {"client_tokens": client, "server_tokens": change.generated, "slack_tokens": slack}


def _short(trace: Trace) -> bool:
    few = trace.tokens is not None and trace.tokens <= 1
    return trace.max_tokens >= SHORT_NEEDS_TOKENS and (few or not trace.text.strip())


def _most_common(failed: Sequence[Trace]) -> str:
    if not failed:
        return "requests that ended well / all that ended"
    (problem, count), *_ = Counter(t.problem or "" for t in failed).most_common(1)
    return f"{count} of {len(failed)} failures: {problem}"


def _usage_detail(unknown: Sequence[Trace], good: Sequence[Trace]) -> str:
    if not unknown:
        return "requests whose tokens the server did not tell"
    if any(t.usage != "none" for t in good):
        return f"{len(unknown)} requests were still under way when the load stopped, and usage comes only at their end"
    return "the server sends no usage, so its tokens cannot be counted; start it with usage in streams, or update it"
