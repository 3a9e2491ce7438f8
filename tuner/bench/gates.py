"""When a block does not count. Every limit of the measurement stands here; a failed gate invalidates, never blurs.

A limit is set where the bias that it stands for reaches about 1 % of throughput, the least difference that a study
claims (`judge.verdict.PRACTICAL`), and not where a quiet machine would show it: on two cores shared with the server
a loop lags by milliseconds, and that moves nothing as long as requests take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.bench.machine import Surroundings
from tuner.bench.recount import Recount
from tuner.records import Block, Gate

MIN_SUCCESS_RATE = 0.99
"""A server that refuses or drops requests would look faster than one that serves them all."""

MIN_CONCURRENCY = 0.98
"""Of the target: time-averaged requests under way / streams."""

MAX_CLIENT_BUSY = 0.5
"""CPU time of the client's loop / wall time. Above it, queues form in the client, and its times are its own."""

MAX_CEILING_SHARE = 1 / 3
"""Events a second of the window / what the self-test found the client's processes to take. Above it, the client has
no headroom for bursts, and every decode step is a burst."""

MAX_CLIENT_STEAL = 0.04
"""CPU time of this process / all cores of a machine that also runs the server. Both blocks of a pair pay it, and
most of it does not depend on the server's speed: their ratio moves by the difference, a quarter of this at most."""

MAX_TURNAROUND_BIAS = 0.01
"""(Loop lag + time to send the next request) / mean request duration: the share of time a slot idles for our sake."""

MAX_EDGE_BIAS = 0.01
"""Longest loop lag near the window's two edges / window length: output that came in time but was stamped late."""

MAX_STOPPED_S, MAX_STOPPED_SHARE = 1.0, 0.02
"""Longest lag of the loop within the window, in seconds and of the window; it must be beyond both. A client that was
stopped (SIGSTOP, a suspended machine) sends nothing, and its server looks slow."""

MAX_TOKEN_DISAGREEMENT = 0.005
"""|client's tokens - server's counter| / counter, beyond what the moment of reading leaves open."""

MAX_UNDERCOUNTED = 0.01
"""Share of requests whose chunks are more than their tokens. Their usage is no cumulative count, so no count at all."""

MAX_UNHEARD = 0.01
"""Tokens of requests that were silent from the window's end until the load stopped, estimated / tokens of the
window."""

MAX_RECOUNT = 0.1
"""|tokens by the tokenizer - tokens told| / told, of a few answers. A model need not write a text in the tokens that
the tokenizer makes of it, so only what is grossly wrong shows: chunks or drafts taken for tokens, all counted twice."""

MAX_SHORT_OUTPUT = 0.05
"""Share of requests that ended with one token or no text although more were asked for."""

MAX_DEGENERATE = 0.2
"""Share of requests whose text is one short string over and over, or garbled: a drafter predicts loops perfectly."""

MAX_OVERRUN_TOKENS = 1
"""Tokens beyond max_tokens; some servers count the end token."""

MAX_FOREIGN_LOAD = 0.75
"""CPU time of strangers / all usable cores. The blocks of a pair stand next to each other and share most of it; what
they do not share is noise, which the intervals carry. Above this, next to nothing of the machine is the server's."""

MAX_STEAL = 0.25
"""Time that the hypervisor took / all usable cores; as above, and less even."""

MAX_THROTTLED = 0.01
"""Share of the window in which a core's clock was held down for heat: the later block of a pair is the hotter one."""

MIN_REQUESTS_PER_STREAM = 0.5
"""Requests that ended in the window / streams. Under it the window saw too little of a request's life."""

MAX_HALF_DRIFT = 0.25
"""|second half - first half| / mean of the 1-s series, where that is significant (Welch, p < 0.001): a clock drop, or
a warm-up that was not over. Only from `DRIFT_NEEDS_S` seconds on; a shorter window says nothing about it."""

DRIFT_NEEDS_S = 20
DRIFT_P = 0.001
EQUAL = 1e-9
"""Relative: seconds closer than this differ by rounding."""

MAX_LENGTH_BIAS = 0.01
"""Of a pair: share of a request's time before its first token x |ln(mean output lengths)|, beyond what chance explains.
Longer answers spread a prompt's time over more tokens, and that is no speed-up."""

LENGTH_CHANCE = 2.0
"""Standard errors of the difference of two mean lengths that chance explains."""

MAX_CACHE_BIAS = 0.01
"""Of a pair: difference of the shares of prompt tokens that came from a prefix cache x share of a request's time before
its first token: what a warmer cache saves one side, and not the other."""

MAX_LATE_S = 0.01
"""Of an open loop: 99th percentile of (actual - intended) sending, seconds. Later, the client is what is measured."""

ENVIRONMENT_GATES = frozenset(
    {
        "client_bound",
        "client_ceiling",
        "client_steals_cpu",
        "slow_turnaround",
        "loop_lag",
        "client_stopped",
        "tokens_disagree",
        "foreign_load",
        "cpu_stolen",
        "cpu_throttled",
        "gpu_slowed",
    }
)
"""Gates whose failure is the machine's, the client's or a stranger's doing, and is not held against a candidate."""


@dataclass(frozen=True, kw_only=True)
class AnswerFaults:
    """What is wrong with answers, by themselves: how many of them, but for `overrun_tokens`, the most of any.

    `unknown_tokens` counts requests whose tokens the server did not tell, `undercounted` those that had more chunks
    than tokens.
    """

    unknown_tokens: int
    usage_detail: str
    overrun_tokens: int
    short_outputs: int
    degenerate_outputs: int
    undercounted: int = 0


@dataclass(frozen=True, kw_only=True)
class Observed(AnswerFaults):
    """What the gates look at, for one window.

    `turnaround_s` is the mean time from the end of an answer to the next request, `loop_lag_s` the loop's mean lag,
    `edge_lag_s` its longest near the window's edges, `stopped_s` its longest anywhere in it. `unheard_tokens` are
    an estimate of those behind the last sign of life. `server_tokens` and `client_tokens` are counted over the same
    time, `slack_tokens` what may differ.
    """

    concurrency: int
    window_s: float
    warm: bool
    warm_detail: str
    requests: int
    failed: int
    failure_detail: str
    in_flight: float
    mean_request_s: float | None
    client_busy: float
    client_steal: float | None
    turnaround_s: float
    loop_lag_s: float
    edge_lag_s: float
    tokens: float
    series: Sequence[float]
    client_tokens: float | None = None
    server_tokens: float | None = None
    slack_tokens: float = 0.0
    stopped_s: float = 0.0
    events_per_s: float = 0.0
    ceiling_events_per_s: float | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)
    recount: Recount | None = None
    unheard_tokens: float = 0.0


def gates(seen: Observed) -> tuple[Gate, ...]:
    """Every gate with its value, limit and verdict. A gate is named after what is wrong when it fails."""
    total = seen.requests + seen.failed
    ended = max(1, seen.requests)
    success = seen.requests / total if total else 0.0
    found = [
        _at_most("not_warm", 0.0 if seen.warm else 1.0, 0.0, seen.warm_detail),
        _at_most("no_tokens", 0.0 if seen.tokens > 0 else 1.0, 0.0, "no output token arrived in the window"),
        *_answer_gates(seen, ended, total),
        _at_most(
            "unheard_at_end",
            seen.unheard_tokens / seen.tokens if seen.tokens > 0 else 0.0,
            MAX_UNHEARD,
            "tokens of requests that were silent since the window's end, estimated / tokens of the window",
        ),
        _at_least("low_success_rate", success, MIN_SUCCESS_RATE, seen.failure_detail),
        _at_least("low_concurrency", seen.in_flight / seen.concurrency, MIN_CONCURRENCY, "requests under way / target"),
        _at_least(
            "too_few_requests",
            total / seen.concurrency,
            MIN_REQUESTS_PER_STREAM,
            "requests ended per stream; lower max_tokens or use the full profile",
        ),
        _at_most("client_bound", seen.client_busy, MAX_CLIENT_BUSY, "CPU share of the load client's loop"),
    ]
    if seen.ceiling_events_per_s is not None:
        share = seen.events_per_s / seen.ceiling_events_per_s
        detail = f"{seen.events_per_s:.0f} events/s of the {seen.ceiling_events_per_s:.0f} that the client can take"
        found.append(_at_most("client_ceiling", share, MAX_CEILING_SHARE, detail))
    if seen.client_steal is not None:
        found.append(
            _at_most("client_steals_cpu", seen.client_steal, MAX_CLIENT_STEAL, "CPU of this process / all cores")
        )
    if seen.mean_request_s:
        bias = (seen.turnaround_s + seen.loop_lag_s) / seen.mean_request_s
        found.append(_at_most("slow_turnaround", bias, MAX_TURNAROUND_BIAS, "slot idle / request duration"))
    found += [
        _at_most("loop_lag", seen.edge_lag_s / seen.window_s, MAX_EDGE_BIAS, "lag at the window's edges / window"),
        _at_most(
            "client_stopped",
            seen.stopped_s,
            max(MAX_STOPPED_S, MAX_STOPPED_SHARE * seen.window_s),
            "longest time, in seconds, in which the client itself did not run",
        ),
    ]
    if seen.server_tokens is not None and seen.client_tokens is not None:
        apart = abs(seen.client_tokens - seen.server_tokens)
        value = max(0.0, apart - seen.slack_tokens) / max(1.0, seen.server_tokens)
        detail = f"client {seen.client_tokens:.1f}, server {seen.server_tokens:.0f}, slack {seen.slack_tokens:.1f}"
        found.append(_at_most("tokens_disagree", value, MAX_TOKEN_DISAGREEMENT, detail))
    if seen.recount is not None:
        detail = f"told {seen.recount.told}, {seen.recount.recounted} by the server's tokenizer; some may be hidden"
        found.append(_at_most("tokens_recounted", seen.recount.apart, MAX_RECOUNT, detail))
    found += _machine_gates(seen.surroundings)
    if len(seen.series) >= DRIFT_NEEDS_S:
        found.append(_at_most("not_steady", half_drift(seen.series), MAX_HALF_DRIFT, "second half against first"))
    return tuple(found)


def open_gates(*, late_s: float, requests: int, failed: int, tokens: float, faults: AnswerFaults) -> tuple[Gate, ...]:
    """Gates of an open loop. `late_s` is the 99th percentile of how late requests were sent."""
    total = requests + failed
    success = requests / total if total else 0.0
    return (
        _at_most("client_late", late_s, MAX_LATE_S, "p99 of actual - intended sending, s"),
        _at_most("no_tokens", 0.0 if tokens > 0 else 1.0, 0.0, "no output token arrived in the counted time"),
        _at_least("low_success_rate", success, MIN_SUCCESS_RATE, "requests that ended well / all"),
        *_answer_gates(faults, max(1, requests), total),
    )


def _answer_gates(seen: AnswerFaults, ended: int, total: int) -> tuple[Gate, ...]:
    return (
        _at_most("no_usage", float(seen.unknown_tokens), 0.0, seen.usage_detail),
        _at_most(
            "usage_undercounts",
            seen.undercounted / max(1, total),
            MAX_UNDERCOUNTED,
            "share of requests with more chunks than tokens: usage does not count up",
        ),
        _at_most(
            "token_overrun",
            float(seen.overrun_tokens),
            float(MAX_OVERRUN_TOKENS),
            "most tokens beyond max_tokens in one answer",
        ),
        _at_most("short_output", seen.short_outputs / ended, MAX_SHORT_OUTPUT, "share of empty or one-token answers"),
        _at_most(
            "degenerate_output", seen.degenerate_outputs / ended, MAX_DEGENERATE, "share of looping or garbled answers"
        ),
    )


def _machine_gates(seen: Surroundings) -> list[Gate]:
    found = []
    if seen.foreign is not None:
        detail = "CPU time of other programs / all cores; end them, or measure when they are done"
        found.append(_at_most("foreign_load", seen.foreign, MAX_FOREIGN_LOAD, detail))
    if seen.steal is not None:
        found.append(_at_most("cpu_stolen", seen.steal, MAX_STEAL, "time that the hypervisor took / all cores"))
    if seen.throttled is not None:
        detail = "share of the window in which a core was held down for heat; cool the machine"
        found.append(_at_most("cpu_throttled", seen.throttled, MAX_THROTTLED, detail))
    if seen.gpus:
        found.append(_at_most("gpu_slowed", float(len(seen.gpus)), 0.0, "; ".join(seen.gpus)))
    return found


def pair_gates(baseline: Sequence[Block], candidate: Sequence[Block]) -> tuple[Gate, ...]:
    """Gates of blocks that are compared with one another, at one level: what differs beside the settings.

    Of several blocks a side their means count, by their requests.
    """
    found = []
    sides = [side for side in map(_side, (baseline, candidate)) if side is not None]
    if len(sides) == 2:
        one, other = sides
        before_first = (one.before_first + other.before_first) / 2
        shift = math.log(other.length / one.length)
        chance = math.hypot(one.spread / math.sqrt(one.requests), other.spread / math.sqrt(other.requests))
        detail = f"answers of {other.length:.0f} tokens against {one.length:.0f}"
        bias = before_first * max(0.0, abs(shift) - LENGTH_CHANCE * chance)
        found.append(_at_most("output_length_shift", bias, MAX_LENGTH_BIAS, detail))
        if one.cached is not None and other.cached is not None:
            detail = f"{100 * other.cached:.1f} % of the prompts' tokens were cached, against {100 * one.cached:.1f} %"
            bias = before_first * abs(other.cached - one.cached)
            found.append(_at_most("warm_cache", bias, MAX_CACHE_BIAS, detail))
    return tuple(found)


@dataclass(frozen=True)
class _Side:
    """`length` in tokens, `spread` its coefficient of variation, `before_first` the share of a request's time."""

    requests: int
    length: float
    spread: float
    before_first: float
    cached: float | None


def _side(blocks: Sequence[Block]) -> _Side | None:
    """One side of a comparison; None where it does not tell latencies (a simulation) or lengths."""
    told = [b for b in blocks if b.requests and b.mean_output_tokens > 0 and b.ttft_ms.mean and b.e2e_ms.mean]
    requests = sum(b.requests for b in told)
    if not requests:
        return None

    def mean(value: Callable[[Block], float]) -> float:
        return sum(value(b) * b.requests for b in told) / requests

    cached = [b for b in told if "cached_share" in b.counters]
    return _Side(
        requests,
        mean(lambda b: b.mean_output_tokens),
        # Older blocks do not tell the spread; answers vary by about their length.
        mean(lambda b: b.counters.get("output_tokens_sd", b.mean_output_tokens) / b.mean_output_tokens),
        min(1.0, mean(lambda b: (b.ttft_ms.mean or 0.0) / (b.e2e_ms.mean or 1.0))),
        sum(b.counters["cached_share"] * b.requests for b in cached) / sum(b.requests for b in cached)
        if cached
        else None,
    )


def half_drift(series: Sequence[float]) -> float:
    """|second half - first half| / mean where the halves differ significantly, else 0; of four values or more."""
    from scipy import stats

    data = np.asarray(series, dtype=float)
    half = len(data) // 2
    first, second = data[:half], data[-half:]
    mean = float(data.mean())
    if mean <= 0 or float(np.ptp(data)) <= EQUAL * mean:
        return 0.0
    change = float(second.mean() - first.mean())
    variances = [float(part.var(ddof=1)) / half for part in (first, second)]
    spread = sum(variances)
    if spread <= (EQUAL * mean) ** 2:
        return abs(change) / mean
    freedom = spread**2 / sum(variance**2 / (half - 1) for variance in variances)
    significant = 2 * float(stats.t.sf(abs(change) / math.sqrt(spread), freedom)) < DRIFT_P
    return abs(change) / mean if significant else 0.0


def _at_most(name: str, value: float, limit: float, detail: str) -> Gate:
    return Gate(name, round(value, 6), limit, bool(value <= limit), detail)


def _at_least(name: str, value: float, limit: float, detail: str) -> Gate:
    return Gate(name, round(value, 6), limit, bool(value >= limit), detail)
