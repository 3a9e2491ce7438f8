"""One HTTP connection, with the limits that uvicorn has not: a client must not hold what it does not use.

| limit | what happens |
|---|---|
| `MAX_HEAD_BYTES` of request line and headers | 431, closed |
| `HEAD_S` from the connection, or from the first byte of a further request, to the end of its headers | 408, closed |
| `HEAD_S` from the response to the end of a body that it did not wait for | closed |
| less than `STALL_BYTES` taken in `STALL_S` while 64 KiB or more wait | aborted, its generation with it |
| more connections than there are file descriptors for | 503 with Retry-After, closed |

Errors at this level are JSON as well.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.server.client import RETRY_AFTER_S
from engine.server.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 30.0
STALL_S = 30.0
STALL_BYTES = 4096

_RESERVED_FILES = 64
"""Descriptors for everything that is not a client's connection."""


def raise_file_limit() -> int | None:
    """Allow this process as many open files as it may have; how many connections that leaves room for, if limited."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else max(1, hard - _RESERVED_FILES)


class Connection(HttpToolsProtocol):
    """See above. `most` connections are served at a time; None: any number."""

    most: int | None = None
    head_s = HEAD_S
    stall_s = STALL_S

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_open = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        if self.most is not None and len(self.connections) > self.most:
            self._refuse(503, "too many connections; try again later", f"retry-after: {RETRY_AFTER_S}\r\n")
            return
        self._head_timer = self.loop.call_later(self.head_s, self._head_too_slow)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self.transport.is_closing():
            return
        if self._head_open:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_s, self._head_too_slow)
        super().data_received(data)
        if self._head_open and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._head_open = False
        self._cancel_head_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse(431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._cancel_rest_timer()
        self._head_open, self._head_bytes = True, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called when a response has been written. What is left of its request's body is read, but not for ever."""
        super().on_response_complete()
        if not self._head_open and self.cycle.response_complete and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(self.head_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called for what is not HTTP."""
        if not self.transport.is_closing():
            self._refuse(400, "this is not a valid HTTP request")

    def pause_writing(self) -> None:
        """Called by the event loop when 64 KiB wait for the client. Nothing is added until it took most."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """Called by the event loop."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._cancel_head_timer()
        self._cancel_rest_timer()
        super().connection_lost(exc)  # calls resume_writing

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # its own answer is not the next one's fault
            self._head_timer = self.loop.call_later(self.head_s, self._head_too_slow)
        elif self._head_bytes:
            self._refuse(408, f"no complete request within {self.head_s:g} s")
        else:
            self.transport.close()

    def _watch_stall(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_stall, waiting)

    def _check_stall(self, waiting: int) -> None:
        if waiting - self.transport.get_write_buffer_size() >= STALL_BYTES:
            self._watch_stall()
            return
        self._stall_timer = None
        self.logger.warning("a client took next to nothing for %g s; its connection is aborted", self.stall_s)
        self.transport.abort()

    def _refuse(self, status: int, message: str, more_headers: str = "") -> None:
        """Answer without the application, where no answer has begun, and close."""
        self._cancel_head_timer()
        cycle = self.cycle
        reading = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if reading:  # its body is at fault: this is its answer
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or reading:
            body = json.dumps(error_body(status, message)).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n{more_headers}connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
