"""The load client: a closed loop at exact concurrency over persistent connections.

One `asyncio.Protocol` per stream, parsed by `httptools` and driven by `uvloop`. The hot path stores `(monotonic ns,
bytes)` and nothing else; what the bytes say is read after the window (`trace.py`). A stream sends its next request
from the completion callback of the last one, so no slot ever waits for a task to be scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

from tuner.errors import UsageError

RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 0.5
CONNECT_TIMEOUT_S = 5.0
BYTES_AT_LEAST = 8 << 20
BYTES_PER_TOKEN = 4096
"""Of an answer, on top of the least that is allowed; an event takes some hundreds. More is no answer to a request."""

_EXCERPT_READS = 4

End = Literal["open", "complete", "closed", "refused", "malformed", "cancelled"]


@dataclass(frozen=True)
class Target:
    """Where requests go. `https` uses the system's certificates."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """A base URL with or without a trailing `/v1`; anything that is not http(s) is a `UsageError`."""
        url = base_url if "://" in base_url else f"http://{base_url}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"'{base_url}' is not a URL: {error}. Give one such as http://127.0.0.1:30000.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{base_url}' is not an http(s) URL. Give one such as http://127.0.0.1:30000.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def base_url(self) -> str:
        """The normalised URL, without `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, api_key: str | None) -> bytes:
        """Request line and headers up to where Content-Length goes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += ["Accept: */*", "Accept-Encoding: identity"]
        if api_key:
            if any(ord(c) < 32 or ord(c) > 126 for c in api_key):
                raise UsageError("The API key holds characters that cannot stand in an HTTP header.")
            lines.append(f"Authorization: Bearer {api_key}")
        return "\r\n".join(lines).encode() + b"\r\n"


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and everything that came back, unparsed. Times are `time.monotonic_ns`.

    `begun_ns` is when its stream turned to it, `sent_ns` when it was sent: a connection may have to be made in between.
    `idle_ns` is how long its stream stood idle before it, from the end of the last answer.
    """

    number: int
    prompt_id: str
    max_tokens: int
    begun_ns: int = 0
    sent_ns: int = 0
    end_ns: int = 0
    idle_ns: int = 0
    status: int = 0
    end: End = "open"
    error: str = ""
    received: int = 0
    events: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def most_bytes(self) -> int:
        """What its answer may hold."""
        return BYTES_AT_LEAST + BYTES_PER_TOKEN * self.max_tokens

    @property
    def hollow(self) -> bool:
        """Whether a short answer is plainly no completion: empty, an error, a page. Long ones are not looked at."""
        return len(self.events) <= _EXCERPT_READS and b'"choices"' not in self.body()

    @property
    def answered(self) -> bool:
        """Whether a complete answer with status 200 arrived. What it says is another question."""
        return self.end == "complete" and self.status == 200

    def body(self) -> bytes:
        """All body bytes."""
        return b"".join(data for _, data in self.events)


Outgoing = tuple[bytes, Exchange]


class Stream(asyncio.Protocol):
    """One slot of the closed loop: sends, receives, sends again, reconnects when the server closes.

    `source` gives the next request (None: stop after the current one); `done` receives each finished exchange.
    """

    def __init__(
        self, target: Target, source: Callable[[Stream], Outgoing | None], done: Callable[[Exchange], None]
    ) -> None:
        self.current: Exchange | None = None
        self.completed = 0
        self.connections = 0
        self.connect_failures = 0
        self._target = target
        self._source = source
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._failures = 0
        self._last_end_ns = 0
        self._framed = False
        self._packed = ""
        self._answers = 0  # on this connection
        self._sent = b""
        self._stopped = False
        self._now = 0
        self._connecting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None

    # -- the outside -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and send the first request."""
        self._next()

    def stop(self) -> None:
        """Close the connection; a request under way ends as `cancelled`. Idempotent."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self.current is not None:
            self._finish("cancelled")
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport; small requests must not wait for Nagle."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self.connections += 1
        self._answers = 0
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Stamp the read once; everything in it arrived together."""
        self._now = monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer without a length ends with the connection; its finish reason tells whether it was whole.

        A server may close a connection that it has answered on at any time, for instance llama-server after each
        stream. A request that was under way to it then, of which nothing came back, is sent again on a new one.
        """
        self._transport = None
        if self.current is None:
            return
        if self._answers and not self.current.status and not self.current.events and not self._stopped:
            self._answers = 0
            again = self._connect_and_send(self._sent, self.current)
            self._connecting = asyncio.get_running_loop().create_task(again)
            return
        if exc is None and self.current.status == 200 and self.current.events and not self._framed:
            self._finish("complete")
        else:
            self._finish("closed", str(exc) if exc else "the server closed the connection")

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new answer: its framing is not known yet."""
        self._framed = False
        self._packed = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Whether the answer says where it ends, and whether its body is packed, which was not asked for."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            self._packed = value[:40].decode("latin-1")

    def on_headers_complete(self) -> None:
        """Note the status, also of an answer that never ends."""
        current = self.current
        if current is None:
            return
        current.status = self._parser.get_status_code()
        if current.sent_ns > self._now:
            self._refuse("an answer came before its request was sent: the server answered the last one twice")
        elif self._packed and current.status == 200:
            self._refuse(f"the body is encoded ({self._packed}), although no encoding was asked for")

    def on_body(self, body: bytes) -> None:
        """Store; do not look."""
        current = self.current
        if current is None or current.end != "open":
            return
        current.events.append((self._now, body))
        current.received += len(body)
        if current.received > current.most_bytes:
            del current.events[_EXCERPT_READS:]  # enough to show what came
            self._refuse(f"the answer is longer than {current.most_bytes >> 20} MiB")

    def on_message_complete(self) -> None:
        """End of one answer: hand it over and send the next request at once."""
        if self.current is None or self.current.status < 200:
            return
        self._answers += 1
        if not self._parser.should_keep_alive():
            self._drop_transport()
        self._finish("complete")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _drop_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.set_protocol(asyncio.Protocol())
            transport.abort()

    def _refuse(self, why: str) -> None:
        """End the connection, and the request under way with it; between two requests there is none."""
        self._drop_transport()
        if self.current is not None:
            self._finish("malformed", why)

    def _finish(self, end: End, error: str = "") -> None:
        exchange, self.current = self.current, None
        assert exchange is not None
        exchange.end_ns = self._last_end_ns = monotonic_ns()
        exchange.end = end
        exchange.error = error
        self._done(exchange)
        if self._stopped:
            return
        if exchange.answered and not exchange.hollow:
            self.completed += 1
            self._failures = 0
            self._next()
        else:
            self._back_off()

    def _back_off(self) -> None:
        """A server that fails at once must not be hammered: each failure doubles the wait, up to half a second."""
        delay = min(RETRY_FIRST_S * 2 ** min(self._failures, 10), RETRY_LONGEST_S)
        self._failures += 1
        self._retry = asyncio.get_running_loop().call_later(delay, self._next)

    def _next(self) -> None:
        if self._stopped:
            return
        outgoing = self._source(self)
        if outgoing is None:
            return
        data, exchange = outgoing
        exchange.begun_ns = monotonic_ns()
        self.current = exchange
        self._sent = data
        if self._transport is not None and not self._transport.is_closing():
            exchange.sent_ns = monotonic_ns()
            if self._last_end_ns:
                exchange.idle_ns = exchange.sent_ns - self._last_end_ns
            self._transport.write(data)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect_and_send(data, exchange))

    async def _connect_and_send(self, data: bytes, exchange: Exchange) -> None:
        exchange.sent_ns = monotonic_ns()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: self,
                    self._target.host,
                    self._target.port,
                    ssl=ssl.create_default_context() if self._target.tls else None,
                )
        except (OSError, TimeoutError) as error:
            self.connect_failures += 1
            if self.current is exchange:
                self._finish("refused", str(error) or f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
            return
        self.connect_failures = 0
        if self.current is exchange and self._transport is not None:
            exchange.sent_ns = monotonic_ns()
            self._transport.write(data)


class LoadClient:
    """`concurrency` streams against one server. Finished exchanges gather in `finished`, in order of their end.

    To be used inside a running loop. `requests` yields the next request; it must not run dry.
    """

    def __init__(self, target: Target, concurrency: int, requests: Iterator[Outgoing]) -> None:
        self.finished: list[Exchange] = []
        self.streams = [Stream(target, self._take, self.finished.append) for _ in range(concurrency)]
        self._requests = requests
        self._pending: list[asyncio.TimerHandle] = []

    def start(self, ramp_s: float) -> None:
        """Start the streams, spread evenly over `ramp_s`, so that prompts do not arrive as one burst."""
        step = ramp_s / len(self.streams)
        self.start_after([i * step for i in range(len(self.streams))])

    def start_after(self, delays_s: Sequence[float]) -> None:
        """Start each stream after its delay."""
        loop = asyncio.get_running_loop()
        self._pending = [
            loop.call_later(delay, stream.start) for delay, stream in zip(delays_s, self.streams, strict=True)
        ]

    def stop(self) -> None:
        """Close every connection. Requests under way end as `cancelled`."""
        for handle in self._pending:
            handle.cancel()
        for stream in self.streams:
            stream.stop()

    async def close(self) -> None:
        """As `stop`."""
        self.stop()

    @property
    def connections(self) -> int:
        """Connections opened so far."""
        return sum(stream.connections for stream in self.streams)

    def cpu_times_s(self) -> tuple[float, ...]:
        """CPU seconds of this thread, which runs the streams."""
        return (time.thread_time(),)

    @property
    def unreachable(self) -> bool:
        """Whether no stream has been able to connect for at least three tries in a row."""
        return all(stream.connect_failures >= 3 for stream in self.streams)

    def exchanges(self) -> list[Exchange]:
        """All exchanges, those under way included."""
        return self.finished + [stream.current for stream in self.streams if stream.current is not None]

    def _take(self, _stream: Stream) -> Outgoing | None:
        return next(self._requests, None)


async def exchange_once(target: Target, data: bytes, exchange: Exchange, timeout_s: float) -> Exchange:
    """One request on its own connection; returns when it ended, at the latest after `timeout_s` (`cancelled`)."""
    ended = asyncio.Event()
    outgoing = iter([(data, exchange)])
    stream = Stream(target, lambda _stream: next(outgoing, None), lambda _exchange: ended.set())
    stream.start()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()
    finally:
        stream.stop()
    return exchange


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
