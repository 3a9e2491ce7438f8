"""From traces to the figures of one window. Definitions stand in each docstring; all are functions of stored times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from tuner.bench.trace import Trace
from tuner.records import Percentiles

NS = 1_000_000_000
P99_NEEDS = 100


def tokens_until(trace: Trace, at_ns: int) -> float:
    """U(t): output tokens of one request that had arrived by `at_ns`.

    Between two counts it is interpolated, because the tokens of a chunk were made since the chunk before. The first
    token is a step: the time before it belongs to the prompt. What else came with it was made since the sending.
    """
    curve = trace.curve
    index = bisect_right(curve, at_ns, key=lambda point: point[0])
    if index == 0:
        if not curve or curve[0][1] <= 1 or at_ns <= trace.sent_ns:
            return 0.0
        t1, u1 = curve[0]
        return (u1 - 1) * (at_ns - trace.sent_ns) / (t1 - trace.sent_ns)
    t0, u0 = curve[index - 1]
    if index == len(curve):
        return u0
    t1, u1 = curve[index]
    return u0 + (u1 - u0) * (at_ns - t0) / (t1 - t0)


def tokens_between(traces: Iterable[Trace], start_ns: int, end_ns: int) -> float:
    """Output tokens inside [start, end], over all requests that did not fail."""
    return sum(
        tokens_until(trace, end_ns) - tokens_until(trace, start_ns)
        for trace in traces
        if trace.problem is None and trace.sent_ns < end_ns and trace.end_ns > start_ns
    )


def series(traces: Sequence[Trace], start_ns: int, end_ns: int) -> tuple[float, ...]:
    """Output tokens in each whole second of the window."""
    edges = range(start_ns, end_ns + 1, NS)
    return tuple(tokens_between(traces, a, b) for a, b in pairwise(edges))


def mean_in_flight(traces: Iterable[Trace], start_ns: int, end_ns: int) -> float:
    """Achieved concurrency: requests under way, averaged over the time of the window."""
    busy = sum(max(0, min(trace.end_ns, end_ns) - max(trace.sent_ns, start_ns)) for trace in traces)
    return busy / (end_ns - start_ns)


def ttft_ms(trace: Trace) -> float | None:
    """Time to first token: from sending the request to its first output."""
    return None if trace.first_ns is None else (trace.first_ns - trace.sent_ns) / 1e6


def tpot_ms(trace: Trace) -> float | None:
    """Time per output token: (last output - first output) / (tokens - 1). None under two tokens, or where all came at
    once."""
    if trace.first_ns is None or trace.last_ns is None or trace.tokens is None or trace.tokens < 2:
        return None
    if trace.last_ns == trace.first_ns:
        return None
    return (trace.last_ns - trace.first_ns) / 1e6 / (trace.tokens - 1)


def e2e_ms(trace: Trace) -> float:
    """From sending the request to the end of its answer."""
    return (trace.end_ns - trace.sent_ns) / 1e6


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Mean and percentiles of the values there are; p99 only from 100 of them."""
    data = np.array([value for value in values if value is not None], dtype=float)
    if not data.size:
        return Percentiles(0, None, None, None, None)
    p50, p90, p99 = (float(p) for p in np.percentile(data, (50, 90, 99)))
    return Percentiles(int(data.size), float(data.mean()), p50, p90, p99 if data.size >= P99_NEEDS else None)


def chunk_gaps_ms(traces: Iterable[Trace], start_ns: int, end_ns: int) -> list[float]:
    """Times between successive chunks of a request, those that end in the window. A chunk is not a token."""
    return [
        (b - a) / 1e6
        for trace in traces
        if trace.problem is None
        for a, b in pairwise(trace.chunks)
        if start_ns <= b < end_ns
    ]


def unheard_tokens(traces: Sequence[Trace], end_ns: int) -> float:
    """About how many tokens were made before `end_ns` by requests that were not heard of again after it.

    Such a request goes on at its own pace since its last chunk. One that gave nothing yet was at its prompt, but for
    what usually comes along with a first token.
    """
    firsts = [trace.curve[0][1] - 1 for trace in traces if trace.curve]
    beside_first = max(0.0, sum(firsts) / len(firsts)) if firsts else 0.0
    unheard = 0.0
    for trace in traces:
        last_ns = trace.curve[-1][0] if trace.curve else trace.last_ns
        if not trace.cut or trace.sent_ns >= end_ns or (last_ns is not None and last_ns >= end_ns):
            continue
        if last_ns is None or trace.tokens is None:
            unheard += beside_first
        elif last_ns > trace.sent_ns:
            unheard += trace.tokens * (end_ns - last_ns) / (last_ns - trace.sent_ns)
    return unheard


CHUNKS_BEYOND, CHUNKS_SHARE = 2, 1.05


def undercounted(trace: Trace) -> bool:
    """Whether fewer tokens were told than chunks came: each carries one at least, so the count is not cumulative."""
    return trace.tokens is not None and len(trace.chunks) > CHUNKS_SHARE * trace.tokens + CHUNKS_BEYOND


REPEAT_MIN_CHARS = 32
REPEAT_LONGEST_PERIOD = 8
REPEAT_SHARE = 0.8
GARBLED_SHARE = 0.05


def degenerate(text: str) -> bool:
    """Whether a text is one short string over and over (period up to 8 characters), or garbled.

    Only the extreme counts: a small model's honest answer may repeat a sentence. Garbled is more than 5 % of
    replacement characters.
    """
    if text and text.count("\ufffd") > max(1.0, GARBLED_SHARE * len(text)):
        return True
    if len(text) < REPEAT_MIN_CHARS:
        return False
    return any(
        sum(a == b for a, b in zip(text, text[period:], strict=False)) >= REPEAT_SHARE * (len(text) - period)
        for period in range(1, REPEAT_LONGEST_PERIOD + 1)
    )
