"""Signs of life while a block runs: chunk rate, time since the last output, failures in a row, loop lag."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic_ns

from tuner.bench.client import Exchange, LoadClient
from tuner.bench.fleet import Fleet, longest_s
from tuner.records import Failure

NS = 1_000_000_000
FAILURES_PER_STREAM = 5
FAILING_FOR_S = 3.0
STOPPED_S = 1.0
"""Between two looks that are to be a fifth of a second apart: we were stopped ourselves, and nobody else was silent."""


class Pulse:
    """Looks, a few times a second, at what arrived since the last look; never parses it."""

    def __init__(self, client: LoadClient | Fleet) -> None:
        self.samples: list[tuple[int, int]] = []
        self._client = client
        self._read = 0
        self._finished_chunks = 0
        self._seen: dict[int, int] = {}
        self._last_output_ns = monotonic_ns()
        self._failed: list[Exchange] = []

    def look(self) -> None:
        """Take a sample. A keep-alive comment is no output, and neither is an error body."""
        now = monotonic_ns()
        if self.samples and (gap := now - self.samples[-1][0]) > STOPPED_S * NS:
            self._last_output_ns = min(now, self._last_output_ns + gap)
        output = False
        for exchange in self._client.finished[self._read :]:
            self._finished_chunks += len(exchange.events)
            output = (self._new_output(exchange) and not exchange.hollow) or output
            self._seen.pop(exchange.number, None)
            if (not exchange.answered or exchange.hollow) and exchange.end != "cancelled":
                self._failed.append(exchange)
        self._read = len(self._client.finished)
        if not self._read and all(stream.current is None for stream in self._client.streams):
            self._last_output_ns = now  # nothing was asked yet
        chunks = self._finished_chunks
        for stream in self._client.streams:
            if stream.current is not None:
                chunks += len(stream.current.events)
                output = self._new_output(stream.current) or output
        if output:
            self._last_output_ns = now
            self._failed.clear()
        self.samples.append((now, chunks))

    def _new_output(self, exchange: Exchange) -> bool:
        start = self._seen.get(exchange.number, 0)
        self._seen[exchange.number] = len(exchange.events)
        return exchange.status == 200 and any(b"data:" in data for _, data in exchange.events[start:])

    def chunk_rate(self, start_ns: int, end_ns: int) -> float | None:
        """Chunks per second between two instants; None without two samples there."""
        inside = [sample for sample in self.samples if start_ns <= sample[0] <= end_ns]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            return None
        return (inside[-1][1] - inside[0][1]) * NS / (inside[-1][0] - inside[0][0])

    def failure(self, stall_s: float) -> Failure | None:
        """What ends the block: nothing but failures, or no output from any stream for `stall_s` seconds."""
        silent_s = (monotonic_ns() - self._last_output_ns) / NS
        failed = self._failed
        if silent_s > FAILING_FOR_S and len(failed) >= FAILURES_PER_STREAM * len(self._client.streams):
            return request_failure(failed)
        if silent_s > stall_s:
            if failed:
                return request_failure(failed)
            waiting = sum(stream.current is not None for stream in self._client.streams)
            return Failure(
                "hung_decode",
                "bench",
                f"no output for {silent_s:.0f} s from any of {waiting} requests under way; the server still accepts "
                "connections",
            )
        return None


def request_failure(failed: list[Exchange]) -> Failure:
    """The failure class when requests do nothing but fail, from how most of them ended."""
    kinds = Counter(_kind(exchange) for exchange in failed)
    kind = kinds.most_common(1)[0][0]
    last = next(exchange for exchange in reversed(failed) if _kind(exchange) == kind)
    said = last.body()[:300].decode("utf-8", "replace").strip()
    how = f"HTTP {last.status}" if last.status not in (0, 200) else last.error or last.end
    if last.answered:
        how = "HTTP 200 without a completion"
    return Failure(kind, "bench", f"{len(failed)} requests in a row failed, the last with: {how}", evidence=said)


def _kind(exchange: Exchange) -> str:
    if exchange.end in ("refused", "closed"):
        return "died_mid_bench"
    return "engine_dead_5xx" if exchange.status >= 500 else "bad_protocol"


class LagMeter:
    """Samples how late the event loop runs its timers, every 50 ms. Its timers are good to a millisecond."""

    STEP_S = 0.05

    def __init__(self) -> None:
        self.samples: list[tuple[int, float]] = []
        self._loop = asyncio.get_running_loop()
        self._set_ns = monotonic_ns()
        self._handle = self._loop.call_later(self.STEP_S, self._tick)

    def _tick(self) -> None:
        now = monotonic_ns()
        self.samples.append((now, max(0.0, (now - self._set_ns) / NS - self.STEP_S)))
        self._set_ns = now
        self._handle = self._loop.call_later(self.STEP_S, self._tick)

    def stop(self) -> None:
        """Stop sampling."""
        self._handle.cancel()

    def lags_s(self, start_ns: int, end_ns: int) -> list[float]:
        """Lags of the timers that ran between two instants."""
        return [lag for at, lag in self.samples if start_ns <= at <= end_ns]

    def longest_s(self, start_ns: int, end_ns: int) -> float:
        """The longest lag that fell into this time, also where it ended behind it; 0 without any."""
        return longest_s(self.samples, start_ns, end_ns)
