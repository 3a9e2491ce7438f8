"""The open loop: requests arrive when they arrive, whether the server keeps up or not; latency from that moment on.

A closed loop sends less while the server stalls, and so hides the stall. Here arrival times are drawn beforehand
(Poisson, from a seed), and a latency counts from the intended time of sending, also where the client itself was late.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic_ns

from tuner.bench import metrics
from tuner.bench.client import Exchange, Outgoing, Stream, Target
from tuner.bench.gates import open_gates
from tuner.bench.prompts import Prompt
from tuner.bench.requests import Sampling, request_sequence
from tuner.bench.summary import answer_faults
from tuner.bench.trace import Trace, read_exchange
from tuner.errors import UsageError
from tuner.records import Gate, Percentiles

NS = 1_000_000_000
DRAIN_S = 120.0
"""After the last arrival, requests under way get this long; what is not done then counts as failed."""

MAX_LENGTH = 1 << 20
"""Requests of one run, at most."""


@dataclass(frozen=True)
class OpenRun:
    """One open-loop run. `rate` is of arrivals a second, over `seconds`; the first `warmup_s` of them are sent and not
    counted. Latencies are from the intended time of sending, of requests that ended well; `late_ms` is how late they
    were sent. `in_flight` is the mean number under way in the counted time, `tokens_per_s` their output in it."""

    rate: float
    seconds: float
    warmup_s: float
    seed: int
    requests: int
    failed: int
    failure: str
    tokens_per_s: float
    in_flight: float
    late_ms: Percentiles
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    gates: tuple[Gate, ...]

    @property
    def valid(self) -> bool:
        """Whether every gate passed."""
        return all(gate.ok for gate in self.gates)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrival in [0, seconds): a Poisson process, the same for the same arguments."""
    draw = random.Random(f"arrivals:{seed}")
    times: list[float] = []
    at = draw.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate)
    return times


def run_open_loop(
    base_url: str,
    *,
    model: str,
    prompts: Sequence[Prompt],
    rate: float,
    seconds: float,
    warmup_s: float,
    max_tokens: int,
    temperature: float,
    seed: int,
    api_key: str | None = None,
) -> OpenRun:
    """Sends requests at `rate` a second for `warmup_s + seconds`; returns when all have ended.

    Raises:
        UsageError: a rate or time that makes no sense, or more requests than one run may hold.
    """
    if not rate > 0 or not seconds > 0 or warmup_s < 0 or not prompts:
        raise UsageError("An open loop needs a rate and a time above 0, and at least one prompt.")
    if rate * (seconds + warmup_s) > MAX_LENGTH:
        raise UsageError(f"{rate:g} requests/s for {seconds:g} s are more than {MAX_LENGTH} requests; give less.")
    times = arrivals(rate, warmup_s + seconds, seed)
    target = Target.parse(base_url)
    sampling = Sampling(model, max_tokens, temperature)
    # No cut first lengths: nothing starts together here.
    source = request_sequence(target, sampling, prompts, concurrency=1, seed=seed, api_key=api_key)
    next(source)
    began_ns, finished = asyncio.run(_send(target, times, source))
    start_ns = began_ns + int(warmup_s * NS)
    end_ns = began_ns + int((warmup_s + seconds) * NS)
    return _summary(finished, rate, seconds, warmup_s, seed, start_ns, end_ns)


@dataclass(frozen=True)
class _Sent:
    intended_ns: int
    exchange: Exchange


async def _send(target: Target, times: Sequence[float], source: Iterator[Outgoing]) -> tuple[int, list[_Sent]]:
    """One connection per request under way, kept for later ones."""
    sent: list[_Sent] = []
    waiting: dict[int, Outgoing] = {}
    idle: list[Stream] = []
    streams: list[Stream] = []
    owner: dict[int, Stream] = {}
    ended = 0

    def take(stream: Stream) -> Outgoing | None:
        return waiting.pop(id(stream), None)

    def done(exchange: Exchange) -> None:
        nonlocal ended
        ended += 1
        idle.append(owner.pop(exchange.number))

    began_ns = monotonic_ns() + NS // 10
    try:
        for at in times:
            intended_ns = began_ns + int(at * NS)
            await asyncio.sleep(max(0.0, (intended_ns - monotonic_ns()) / NS))
            data, exchange = next(source)
            if idle:
                stream = idle.pop()
            else:
                stream = Stream(target, take, done)
                streams.append(stream)
            owner[exchange.number] = stream
            waiting[id(stream)] = (data, exchange)
            sent.append(_Sent(intended_ns, exchange))
            stream.start()
        limit_ns = monotonic_ns() + int(DRAIN_S * NS)
        while ended < len(sent) and monotonic_ns() < limit_ns:
            await asyncio.sleep(0.02)
    finally:
        for stream in streams:
            stream.stop()
    return began_ns, sent


def _summary(
    sent: Sequence[_Sent], rate: float, seconds: float, warmup_s: float, seed: int, start_ns: int, end_ns: int
) -> OpenRun:
    traces = [(one.intended_ns, read_exchange(one.exchange)) for one in sent]
    counted = [(at, trace) for at, trace in traces if at >= start_ns]
    good = [(at, trace) for at, trace in counted if trace.ok]
    failed = [trace for _, trace in counted if not trace.ok]
    begun = [one.exchange.begun_ns - one.intended_ns for one in sent if one.intended_ns >= start_ns]
    late = metrics.percentiles(ns / 1e6 for ns in begun)
    everything: list[Trace] = [trace for _, trace in traces]
    late_s = sorted(ns / NS for ns in begun)  # the time to make a connection is the server's
    worst = late_s[min(len(late_s) - 1, int(0.99 * len(late_s)))] if late_s else 0.0
    overlapping = [trace for trace in everything if trace.sent_ns < end_ns and trace.end_ns > start_ns]
    tokens = metrics.tokens_between(overlapping, start_ns, end_ns)
    gates = open_gates(
        late_s=worst,
        requests=len(good),
        failed=len(failed),
        tokens=tokens,
        faults=answer_faults(overlapping, [trace for _, trace in good]),
    )
    return OpenRun(
        rate=rate,
        seconds=seconds,
        warmup_s=warmup_s,
        seed=seed,
        requests=len(good),
        failed=len(failed),
        failure=next((trace.problem or "not done in time" for trace in failed), ""),
        tokens_per_s=tokens / seconds,
        in_flight=metrics.mean_in_flight(everything, start_ns, end_ns),
        late_ms=late,
        ttft_ms=metrics.percentiles(
            None if trace.first_ns is None else (trace.first_ns - at) / 1e6 for at, trace in good
        ),
        tpot_ms=metrics.percentiles(metrics.tpot_ms(trace) for _, trace in good),
        e2e_ms=metrics.percentiles((trace.end_ns - at) / 1e6 for at, trace in good),
        gates=gates,
    )
