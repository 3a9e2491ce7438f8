"""One local socket between the frontend and the model process, carrying the dataclasses of `messages`.

The model process has a plain `multiprocessing.connection.Connection` (`send`, `recv`, `poll`); the frontend reads and
writes the same frames from its event loop, so that neither a busy model process nor a large prompt can block it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

_HEADER = struct.Struct("!i")
_LONGEST = 0x7FFFFFFF


def socket_pair() -> tuple[socket.socket, Connection]:
    """The frontend's end, for `Channel.open`, and the model process's, to be handed to it."""
    ours, theirs = socket.socketpair()
    return ours, Connection(theirs.detach())


class Channel(asyncio.Protocol):
    """The frontend's end.

    Args:
        on_message: called with each message, in order, on the event loop.
        on_end: called once, when the other end has closed (its process has died, at the latest) or sent what is not a
            message; with the reason for the latter, else None.
    """

    def __init__(self, on_message: Callable[[Any], None], on_end: Callable[[str | None], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._broken: str | None = None

    @classmethod
    async def open(
        cls, ours: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[str | None], None]
    ) -> Channel:
        """Takes over the frontend's end of `socket_pair`."""
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_message, on_end), sock=ours)
        return channel

    def send(self, message: Any) -> None:
        """Queues `message`; it goes out in order. What cannot go out because the other end is gone is dropped:
        `on_end` tells of that."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEADER.pack(len(data)) + data)

    def close(self) -> None:
        """Closes our end, after what was queued has gone out."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: cuts the stream into frames of a four-byte length and that many bytes."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 4:
            (length,) = _HEADER.unpack_from(received, at)
            if not 0 <= length <= _LONGEST:
                return self._break(f"a frame of {length} bytes")
            end = at + 4 + length
            if len(received) < end:
                break
            with memoryview(received) as view:
                message = pickle.loads(view[at + 4 : end])
            at = end
            self._on_message(message)
        del received[:at]

    def _break(self, reason: str) -> None:
        self._broken = f"the model process sent what is not a message ({reason})"
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._on_end(self._broken or (str(exc) if exc is not None and not isinstance(exc, ConnectionError) else None))
