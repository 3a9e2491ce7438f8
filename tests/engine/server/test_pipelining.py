"""A client that sends several requests at once and leaves is that client's affair."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

BODY = b'{"prompt": "abc", "max_tokens": 4}'
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: " + str(len(BODY)).encode() + b"\r\n\r\n" + BODY
)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [POST + GET, POST * 3, GET * 5, POST + GET + POST])
@pytest.mark.parametrize("leave", ["close", "half", "reset"])
def test_pipelined_requests_of_a_client_that_leaves_do_not_end_the_server(
    start: Callable[..., object], sent: bytes, leave: str
) -> None:
    server = start()
    address = urlsplit(server.url)  # type: ignore[attr-defined]
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port)) as client:
            if leave == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            client.sendall(sent)
            if leave == "half":
                client.shutdown(socket.SHUT_WR)
        time.sleep(0.05)
    time.sleep(0.3)
    assert server.process.poll() is None, server.log.read_text()  # type: ignore[attr-defined]
    assert httpx.get(f"{server.url}/health").status_code == 200  # type: ignore[attr-defined]
