"""The load client in several processes, for servers that send more events than one process can take.

Each process runs its share of the streams and stamps what arrives; twenty times a second it hands the raw bytes over.
The parent holds a mirror of every exchange, so that nothing else of a block knows where its streams run. Times are
`time.monotonic_ns`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from tuner.bench.client import End, Exchange, Target, usable_cores
from tuner.bench.gates import MAX_CEILING_SHARE
from tuner.bench.prompts import Prompt
from tuner.bench.requests import Sampling

NS = 1_000_000_000
START_S = 30.0
CLOSE_S = 10.0
HEADROOM = 0.75
"""Of the share of its ceiling that a process may reach: the load is not the same all the time."""

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Job:
    """What one process does: streams `index`, `index + processes`, … of a block, with the same requests as in one."""

    target: Target
    sampling: Sampling
    prompts: tuple[Prompt, ...]
    concurrency: int
    seed: int
    api_key: str | None
    index: int
    processes: int
    earlier: int = 0


@dataclass(frozen=True)
class Start:
    """When stream 0 starts, and how long after it each further one does."""

    at_ns: int
    step_s: float


@dataclass(frozen=True)
class Stop:
    """Close every connection, send the last update and end."""


@dataclass(frozen=True, slots=True)
class Change:
    """News of one exchange: `events` are those from index `start` on, in place of what the parent may hold there."""

    number: int
    prompt_id: str
    max_tokens: int
    sent_ns: int
    end_ns: int
    idle_ns: int
    status: int
    end: End
    error: str
    received: int
    start: int
    events: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class StreamState:
    """`current` is the number of the exchange under way."""

    current: int | None
    completed: int
    connections: int
    connect_failures: int


@dataclass(frozen=True)
class Update:
    """What happened in one process since its last update; `cpu_s` is its thread's CPU time so far."""

    at_ns: int
    cpu_s: float
    lags: tuple[tuple[int, float], ...]
    finished: tuple[Change, ...]
    streams: tuple[StreamState, ...]
    under_way: tuple[Change, ...]


@dataclass(slots=True)
class MirroredStream:
    """One slot of the closed loop in another process, as of its last update."""

    current: Exchange | None = None
    completed: int = 0
    connections: int = 0
    connect_failures: int = 0


@dataclass
class _Worker:
    process: asyncio.subprocess.Process
    streams: list[MirroredStream]
    reading: asyncio.Task[None] | None = None
    open: dict[int, Exchange] = field(default_factory=dict)
    cpu: list[tuple[int, float]] = field(default_factory=list)


class FleetBroken(Exception):
    """A process of the load client has ended by itself; nothing that was measured counts."""


class Fleet:
    """As `LoadClient`, in `processes` processes. To be made by `Fleet.begin`, inside a running loop."""

    def __init__(self, concurrency: int) -> None:
        self.finished: list[Exchange] = []
        self.streams: list[MirroredStream] = [MirroredStream() for _ in range(concurrency)]
        self.broken: str | None = None
        self._workers: list[_Worker] = []
        self._lags: list[tuple[int, float]] = []
        self._closing = False

    @classmethod
    async def begin(
        cls,
        target: Target,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        *,
        concurrency: int,
        seed: int,
        api_key: str | None,
        processes: int,
        earlier: int = 0,
    ) -> Fleet:
        """Starts the processes; returns when each is ready to load.

        Raises:
            FleetBroken: one did not start. Nothing was sent, and none is left.
        """
        fleet = cls(concurrency)
        try:
            for index in range(processes):
                job = Job(target, sampling, tuple(prompts), concurrency, seed, api_key, index, processes, earlier)
                await fleet._add(job)
            async with asyncio.timeout(START_S):
                while not all(worker.cpu for worker in fleet._workers):
                    if fleet.broken:
                        raise FleetBroken(fleet.broken)
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            await fleet.close()
            raise FleetBroken(f"a process of the load client was not ready within {START_S:.0f} s") from error
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def start(self, ramp_s: float) -> None:
        """Start the streams, spread evenly over `ramp_s`."""
        start = Start(monotonic_ns() + NS // 20, ramp_s / len(self.streams))
        for worker in self._workers:
            _send(worker.process, start)

    async def close(self) -> None:
        """End the processes; requests under way end as `cancelled`. What they had received by then is in."""
        self._closing = True
        for worker in self._workers:
            with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended, and said so already
                _send(worker.process, Stop())
                assert worker.process.stdin is not None
                worker.process.stdin.close()
        reading = [worker.reading for worker in self._workers if worker.reading is not None]
        if reading:
            await asyncio.wait(reading, timeout=CLOSE_S)
        for worker in self._workers:
            if worker.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    async with asyncio.timeout(1):
                        await worker.process.wait()
                        continue
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
                    await worker.process.wait()

    @property
    def connections(self) -> int:
        """Connections opened so far."""
        return sum(stream.connections for stream in self.streams)

    def cpu_times_s(self) -> tuple[float, ...]:
        """CPU seconds of each process's thread, as of its last update."""
        return tuple(worker.cpu[-1][1] for worker in self._workers)

    def lags_s(self, start_ns: int, end_ns: int) -> list[float]:
        """Lags of the timers that ran between two instants, of all loops."""
        first = bisect_left(self._lags, start_ns, key=lambda sample: sample[0])
        last = bisect_right(self._lags, end_ns, key=lambda sample: sample[0])
        return [lag for _, lag in self._lags[first:last]]

    def longest_s(self, start_ns: int, end_ns: int) -> float:
        """The longest lag of any loop that fell into this time, also where it ended behind it."""
        return longest_s(self._lags, start_ns, end_ns)

    async def _add(self, job: Job) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tuner.bench.fleet_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        worker = _Worker(process, self.streams[job.index :: job.processes])
        self._workers.append(worker)
        worker.reading = asyncio.create_task(self._read(worker))
        _send(process, job)

    async def _read(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        try:
            while True:
                head = await worker.process.stdout.readexactly(LENGTH.size)
                data = await worker.process.stdout.readexactly(LENGTH.unpack(head)[0])
                self._take(worker, pickle.loads(data))
        except asyncio.IncompleteReadError:
            if not self._closing:
                status = await worker.process.wait()
                self.broken = f"process {worker.process.pid} of the load client ended by itself (status {status})"

    def _take(self, worker: _Worker, update: Update) -> None:
        worker.cpu.append((update.at_ns, update.cpu_s))
        if update.lags:
            self._lags = sorted([*self._lags, *update.lags])
        for change in update.finished:
            exchange = _apply(worker, change)
            del worker.open[change.number]
            self.finished.append(exchange)
        for change in update.under_way:
            _apply(worker, change)
        for stream, state in zip(worker.streams, update.streams, strict=True):
            stream.current = None if state.current is None else worker.open[state.current]
            stream.completed, stream.connections = state.completed, state.connections
            stream.connect_failures = state.connect_failures


def processes_needed(events_per_s: float, ceiling_events_per_s: float | None) -> int:
    """Processes for a load of so many events a second, given what one could take; at most one a core."""
    if not ceiling_events_per_s:
        return 1
    share = events_per_s / (ceiling_events_per_s * MAX_CEILING_SHARE)
    return 1 if share <= 1 else min(usable_cores(), max(2, math.ceil(share / HEADROOM)))


def _apply(worker: _Worker, change: Change) -> Exchange:
    exchange = worker.open.get(change.number)
    if exchange is None:
        exchange = worker.open[change.number] = Exchange(change.number, change.prompt_id, change.max_tokens)
    exchange.sent_ns, exchange.end_ns, exchange.idle_ns = change.sent_ns, change.end_ns, change.idle_ns
    exchange.status, exchange.end, exchange.error = change.status, change.end, change.error
    exchange.received = change.received
    exchange.events[change.start :] = change.events
    return exchange


def _send(process: asyncio.subprocess.Process, message: object) -> None:
    assert process.stdin is not None
    data = pickle.dumps(message)
    process.stdin.write(LENGTH.pack(len(data)) + data)


def longest_s(samples: Iterable[tuple[int, float]], start_ns: int, end_ns: int) -> float:
    """The longest lag of a loop that fell into this time, also where it ended behind it; 0 without any.

    `samples` are (end of a lag, its seconds).
    """
    return max((lag for at, lag in samples if at >= start_ns and at - lag * NS <= end_ns), default=0.0)
