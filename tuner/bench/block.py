"""Measures one block: ramp, warm-up, a window at full concurrency with load kept on past its end, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from time import monotonic_ns
from typing import Literal

from tuner.bench import machine as machines
from tuner.bench.client import Exchange, LoadClient, Target, exchange_once
from tuner.bench.counters import Snapshot, delta, parse_snapshot
from tuner.bench.fleet import Fleet, FleetBroken, processes_needed
from tuner.bench.plan import WindowPlan
from tuner.bench.prompts import Prompt
from tuner.bench.pulse import NS, STOPPED_S, LagMeter, Pulse, request_failure
from tuner.bench.recount import recount
from tuner.bench.requests import Sampling, encode, request_sequence
from tuner.bench.summary import Recording, summarise
from tuner.bench.trace import Trace, UsageMode, read_exchange
from tuner.errors import UsageError
from tuner.records import Block, Failure, Role

POLL_S = 0.05
LOOK_EVERY_S = 0.2
REPORT_EVERY_S = 0.5
DEATH_GRACE_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
PROBE_TEXT = "Name three colours."
PROBE_TOKENS = 8
PROBE_TRIES = 3

Phase = Literal["probe", "warm-up", "window", "tail"]


@dataclass(frozen=True)
class BlockProgress:
    """Where a running block stands. `total_s` is the usual length of the phase; chunks are not tokens."""

    phase: Phase
    elapsed_s: float
    total_s: float
    requests: int
    failed_requests: int
    chunks_per_s: float | None


@dataclass(frozen=True)
class BlockOutcome:
    """A block, or the failure that prevented it. `traces` are its requests, for the per-request records."""

    block: Block | None
    failure: Failure | None
    traces: tuple[Trace, ...] = field(default=(), repr=False)


def measure_block(
    base_url: str,
    *,
    model: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    role: Role,
    max_tokens: int,
    temperature: float,
    plan: WindowPlan,
    seed: int,
    api_key: str | None = None,
    ignore_eos: bool = False,
    ceiling_events_per_s: float | None = None,
    on_progress: Callable[[BlockProgress], None] | None = None,
    server_failure: Callable[[], Failure | None] = lambda: None,
    server_cpu_s: Callable[[], float] | None = None,
    devices: Sequence[str] = (),
    earlier: int = 0,
) -> BlockOutcome:
    """Measure one concurrency level of a running server; returns when it is done.

    The n-th request is a function of `prompts`, `concurrency`, `max_tokens`, `seed` and `earlier`: give both blocks of
    a pair the same. `earlier` blocks were measured on this server before, whose prefix cache could not be emptied.
    `server_failure` is asked five times a second, in this thread, and must be quick; once it returns a failure the
    block ends with it. `server_cpu_s` gives the CPU seconds of a server on this machine so far; without it nobody
    knows whose load is a stranger's. `devices` are the GPUs that the server may use, where they are not all.
    `ceiling_events_per_s` is the client's (`selftest.client_ceiling`); a block that comes near it is invalid. A block
    that fails a gate is returned all the same, with `valid` false and the gate.

    Raises:
        UsageError: arguments that cannot be measured. Nothing was sent.
    """
    if concurrency < 1 or max_tokens < 1 or not prompts:
        raise UsageError("A block needs a concurrency and max_tokens of at least 1, and at least one prompt.")
    run = _BlockRun(
        Target.parse(base_url),
        Sampling(model, max_tokens, temperature, ignore_eos),
        prompts,
        concurrency,
        plan,
        seed,
        api_key,
        on_progress or (lambda _progress: None),
        server_failure,
        ceiling_events_per_s,
        server_cpu_s,
        devices,
        earlier,
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run.outcome(role))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


class _Ended(Exception):
    """The block cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class _WarmUp:
    """How long it took, whether it is done, and if not why not."""

    seconds: float
    done: bool
    detail: str


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection inside the window would be stamped onto whatever arrived during it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _BlockRun:
    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        concurrency: int,
        plan: WindowPlan,
        seed: int,
        api_key: str | None,
        on_progress: Callable[[BlockProgress], None],
        server_failure: Callable[[], Failure | None],
        ceiling_events_per_s: float | None,
        server_cpu_s: Callable[[], float] | None,
        devices: Sequence[str],
        earlier: int,
    ) -> None:
        self.target = target
        self.sampling = sampling
        self.prompts = prompts
        self.concurrency = concurrency
        self.plan = plan
        self.seed = seed
        self.api_key = api_key
        self.on_progress = on_progress
        self.server_failure = server_failure
        self.ceiling_events_per_s = ceiling_events_per_s
        self.server_cpu_s = server_cpu_s
        self.devices = devices
        self.earlier = earlier
        self.phase: Phase = "probe"
        self.phase_start_ns = monotonic_ns()
        self.phase_s = 0.0
        self.client: LoadClient | Fleet | None = None
        self.pulse: Pulse | None = None
        self.stopped = False
        self.next_look = 0
        self.next_report = 0

    async def outcome(self, role: Role) -> BlockOutcome:
        try:
            sampling = await self._probe()
            recording = await self._load(sampling)
        except _Ended as ended:
            return BlockOutcome(None, ended.failure)
        block, traces = summarise(recording, role)
        return BlockOutcome(block, None, traces)

    # -- probe -------------------------------------------------------------------------------------------------------

    async def _probe(self) -> Sampling:
        """One short request: does it answer at all, and which usage options does it take."""
        self._enter("probe", 1.0)
        options: tuple[tuple[str, ...], ...] = (("include_usage", "continuous_usage_stats"), ("include_usage",), ())
        for i, accepted in enumerate(options):
            sampling = replace(self.sampling, stream_options=accepted)
            exchange = await self._probe_once(sampling)
            if exchange.answered:
                trace = read_exchange(exchange)
                if trace.problem is not None:
                    raise _Ended(Failure("bad_protocol", "bench", f"a short request ended badly: {trace.problem}"))
                return sampling
            if exchange.status not in (400, 422) or i == len(options) - 1:
                break
        await self._grace()
        raise _Ended(self._probe_failure(exchange))

    async def _probe_once(self, sampling: Sampling) -> Exchange:
        limit = min(PROBE_TOKENS, sampling.max_tokens)
        data = encode(self.target, sampling, PROBE_TEXT, seed=self.seed, max_tokens=limit, api_key=self.api_key)
        for attempt in range(PROBE_TRIES):
            exchange = Exchange(-1, "probe", limit)
            task = asyncio.create_task(exchange_once(self.target, data, exchange, self.plan.stall_s))
            await self._until(task.done)
            await task
            stopped, self.stopped = self.stopped, False
            if exchange.end == "cancelled" and stopped:
                continue  # it was ourselves who could not listen
            if exchange.status < 500 or attempt == PROBE_TRIES - 1:
                break
            await asyncio.sleep(0.5)
        return exchange

    def _probe_failure(self, exchange: Exchange) -> Failure:
        if exchange.end == "cancelled":
            return Failure(
                "hung_decode", "bench", f"a short request got no complete answer within {self.plan.stall_s:.0f} s"
            )
        if exchange.end == "refused":
            return Failure("died_mid_bench", "bench", f"nothing answers at {self.target.base_url}: {exchange.error}")
        return request_failure([exchange])

    async def _grace(self) -> None:
        """Whoever watches the process may know better why, a moment later."""
        end = monotonic_ns() + int(DEATH_GRACE_S * NS)
        await self._until(lambda: monotonic_ns() >= end)

    # -- load --------------------------------------------------------------------------------------------------------

    async def _load(self, sampling: Sampling) -> Recording:
        """In one process, or in several where the warm-up shows that one cannot take what the server sends."""
        client = await self._client(sampling, 1)
        lag = LagMeter()
        try:
            with _no_collection():
                warmup = await self._begin(client)
                if (processes := self._processes_needed()) > 1:
                    await client.close()
                    client = await self._client(sampling, processes)
                    warmup = await self._begin(client)
                window_s = self.plan.window_for(_mean_request_s(client.finished, self.sampling.max_tokens))
                before = asyncio.create_task(self._snapshot())
                started_at, start_ns = time.time(), monotonic_ns()
                loops, process_cpu = client.cpu_times_s(), time.process_time()
                machine = self._read_machine(client)
                end_ns = start_ns + int(window_s * NS)
                self._enter("window", window_s)
                await self._until(lambda: monotonic_ns() >= start_ns + (end_ns - start_ns) // 2)
                gpus = asyncio.create_task(machines.slowed_gpus(self.devices))
                await self._until(lambda: monotonic_ns() >= end_ns)
                surroundings = machines.between(machine, self._read_machine(client))
                after = asyncio.create_task(self._snapshot())
                loops_s = [now - then for now, then in zip(client.cpu_times_s(), loops, strict=True)]
                process_cpu_s = time.process_time() - process_cpu
                cpu_window_s = (monotonic_ns() - start_ns) / NS
                await self._tail(client, end_ns, after)
        finally:
            await client.close()
            lag.stop()
        if isinstance(client, Fleet):
            process_cpu_s += sum(loops_s)
        lags_s = client.lags_s if isinstance(client, Fleet) else lag.lags_s
        stopped_s = (client if isinstance(client, Fleet) else lag).longest_s(start_ns, end_ns)
        # The counters may have been read a moment before the window; what ended before that is of no use.
        traces = tuple(read_exchange(exchange) for exchange in client.finished if exchange.end_ns > start_ns - NS)
        idle = [e.idle_ns for e in client.finished if e.idle_ns and start_ns <= e.sent_ns < end_ns]
        change = delta(await before, await after)
        counted = None
        if change is None or not change.steps:  # a server that speculates had its turn as its own baseline
            in_window = [t for t in traces if t.end_ns < end_ns]
            counted = await recount(self.target, self.sampling.model, in_window, self.api_key)
        edge = NS // 10
        return Recording(
            concurrency=self.concurrency,
            max_tokens=self.sampling.max_tokens,
            traces=traces,
            started_at=started_at,
            start_ns=start_ns,
            end_ns=end_ns,
            warmup_s=warmup.seconds,
            warm=warmup.done,
            warm_detail=warmup.detail,
            client_cpu_s=max(loops_s) * window_s / cpu_window_s,
            process_cpu_s=process_cpu_s * window_s / cpu_window_s,
            server_is_local=is_local(self.target.host),
            turnaround_s=sum(idle) / len(idle) / NS if idle else 0.0,
            lags_s=tuple(lags_s(start_ns, end_ns)),
            edge_lag_s=max(
                lags_s(start_ns - edge, start_ns + edge) + lags_s(end_ns - edge, end_ns + edge), default=0.0
            ),
            stopped_s=stopped_s,
            connections=client.connections,
            before=await before,
            after=await after,
            ceiling_events_per_s=self.ceiling_events_per_s and self.ceiling_events_per_s * len(loops_s),
            client_processes=len(loops_s),
            surroundings=replace(surroundings, gpus=await gpus),
            recount=counted,
            kinds={prompt.id: prompt.kind for prompt in self.prompts},
        )

    def _read_machine(self, client: LoadClient | Fleet) -> machines.Reading | None:
        """Nothing where the server is elsewhere, or nobody knows its processes."""
        server_cpu_s = self.server_cpu_s
        if server_cpu_s is None or not is_local(self.target.host):
            return None
        fleet_s = sum(client.cpu_times_s()) if isinstance(client, Fleet) else 0.0
        return machines.read(lambda: server_cpu_s() + time.process_time() + fleet_s)

    async def _client(self, sampling: Sampling, processes: int) -> LoadClient | Fleet:
        if processes > 1:
            try:
                return await Fleet.begin(
                    self.target,
                    sampling,
                    self.prompts,
                    concurrency=self.concurrency,
                    seed=self.seed,
                    api_key=self.api_key,
                    processes=processes,
                    earlier=self.earlier,
                )
            except FleetBroken as error:
                raise _Ended(_broken(str(error))) from error
        requests = request_sequence(
            self.target,
            sampling,
            self.prompts,
            concurrency=self.concurrency,
            seed=self.seed,
            api_key=self.api_key,
            earlier=self.earlier,
        )
        return LoadClient(self.target, self.concurrency, requests)

    def _processes_needed(self) -> int:
        now = monotonic_ns()
        span_s = max(self.plan.steady_span_s, 3 * LOOK_EVERY_S)
        rate = self.pulse.chunk_rate(now - int(span_s * NS), now) if self.pulse else None
        return min(self.concurrency, processes_needed(rate or 0.0, self.ceiling_events_per_s))

    async def _begin(self, client: LoadClient | Fleet) -> _WarmUp:
        self.client, self.pulse = client, Pulse(client)
        client.start(self.plan.ramp_s if self.concurrency > 1 else 0.0)
        return await self._warm_up(client, self.pulse)

    async def _warm_up(self, client: LoadClient | Fleet, pulse: Pulse) -> _WarmUp:
        plan = self.plan
        self._enter("warm-up", plan.warmup_s)
        begin = self.phase_start_ns
        least = begin + int(plan.warmup_s * NS)
        cap = begin + int(max(plan.warmup_cap_s, plan.warmup_s) * NS)

        def waiting() -> str:
            unfinished = sum(stream.completed == 0 for stream in client.streams)
            if unfinished:
                return f"{unfinished} of {self.concurrency} streams had not finished a request"
            return "" if self._steady(pulse) else "the chunk rate was still growing"

        def over() -> bool:
            now = monotonic_ns()
            return now >= cap or (now >= least and not waiting())

        await self._until(over)
        still = waiting()
        seconds = (monotonic_ns() - begin) / NS
        advice = "slow for this load, or busy with something else: end that, or lower max_tokens or the concurrency"
        detail = (
            f"{still} after {seconds:.0f} s of warm-up; the machine is {advice}"
            if still
            else "every stream finished a request; rate steady"
        )
        return _WarmUp(seconds, not still, detail)

    def _steady(self, pulse: Pulse) -> bool:
        now = monotonic_ns()
        span = int(self.plan.steady_span_s * NS)
        recent = pulse.chunk_rate(now - span, now)
        earlier = pulse.chunk_rate(now - 2 * span, now - span)
        return not recent or earlier is None or recent <= self.plan.steady_growth * earlier

    async def _tail(self, client: LoadClient | Fleet, end_ns: int, after: asyncio.Task[Snapshot | None]) -> None:
        """Load stays on until each stream's chunk across the window's end is in, and the counters are read.

        Where usage comes only at a request's end, the requests under way must end before their tokens are known.
        """
        open_then = [s.current for s in client.streams if s.current is not None and s.current.sent_ns < end_ns]
        to_the_end = _usage_mode(client.finished) == "final"
        limit_s = max(self.plan.tail_s, self.plan.window_cap_s) if to_the_end else self.plan.tail_s
        self._enter("tail", self.plan.tail_s)
        limit_ns = end_ns + int(limit_s * NS)

        def heard(exchange: Exchange) -> bool:
            if exchange.end != "open":
                return True
            return not to_the_end and _said_since(exchange, end_ns)

        await self._until(lambda: after.done() and (all(map(heard, open_then)) or monotonic_ns() >= limit_ns))
        if after.result() is None:
            return
        # The counters were read a little after the window; the streams must be known up to there, too.
        read_ns = monotonic_ns()
        limit_ns = max(limit_ns, read_ns + NS)
        streams = [s.current for s in client.streams if s.current is not None]
        await self._until(
            lambda: monotonic_ns() >= limit_ns or all(e.end != "open" or _said_since(e, read_ns) for e in streams)
        )

    async def _snapshot(self) -> Snapshot | None:
        head = self.target.head("GET", "/metrics", self.api_key) + b"Connection: close\r\n\r\n"
        exchange = await exchange_once(self.target, head, Exchange(-2, "metrics", 0), SCRAPE_TIMEOUT_S)
        return parse_snapshot(exchange.body(), exchange.sent_ns, exchange.end_ns) if exchange.answered else None

    # -- watching ----------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, usual_s: float) -> None:
        self.phase, self.phase_s, self.phase_start_ns = phase, usual_s, monotonic_ns()
        self.next_look = self.next_report = 0

    async def _until(self, done: Callable[[], bool]) -> None:
        """Sleep until `done()`, watching the server. Raises `_Ended` when the block cannot go on."""
        last = monotonic_ns()
        while not done():
            now = monotonic_ns()
            self.stopped = self.stopped or now - last > STOPPED_S * NS
            last = now
            if now >= self.next_look:
                self.next_look = now + int(LOOK_EVERY_S * NS)
                await self._look()
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        failure = self.server_failure()
        if failure is not None:
            raise _Ended(failure)
        if isinstance(self.client, Fleet) and self.client.broken:
            raise _Ended(_broken(self.client.broken))
        if self.pulse is not None and self.client is not None:
            self.pulse.look()
            failure = self.pulse.failure(self.plan.stall_s)
            if failure is not None:
                self.pulse = None
                await self._grace()
                raise _Ended(failure)
        self._report()

    def _report(self) -> None:
        now = monotonic_ns()
        if now < self.next_report:
            return
        self.next_report = now + int(REPORT_EVERY_S * NS)
        finished = self.client.finished if self.client else []
        good = sum(exchange.answered for exchange in finished)
        rate = self.pulse.chunk_rate(now - 2 * NS, now) if self.pulse else None
        elapsed = (now - self.phase_start_ns) / NS
        self.on_progress(BlockProgress(self.phase, elapsed, self.phase_s, good, len(finished) - good, rate))


def _said_since(exchange: Exchange, at_ns: int) -> bool:
    """Whether an event has come since then; a comment that keeps the connection alive is none."""
    late = takewhile(lambda event: event[0] >= at_ns, reversed(exchange.events))
    return any(b"data:" in data for _, data in late)


def _broken(what: str) -> Failure:
    return Failure("transient_env", "bench", what, retryable=True, blame="environment")


def is_local(host: str) -> bool:
    """Whether the server shares this machine, and so its cores, with the client."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _mean_request_s(finished: Sequence[Exchange], max_tokens: int) -> float | None:
    """How long a request of full length takes, going by those that ended; shortened ones are scaled up."""
    seconds = [(e.end_ns - e.sent_ns) / NS * max_tokens / e.max_tokens for e in finished if e.answered]
    return sum(seconds) / len(seconds) if seconds else None


def _usage_mode(finished: Sequence[Exchange]) -> UsageMode | None:
    last = next((exchange for exchange in reversed(finished) if exchange.answered), None)
    return read_exchange(last).usage if last is not None else None
