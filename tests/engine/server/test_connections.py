"""A client that is slow, rude or one of too many costs nobody but itself."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from tests.engine.server.conftest import ToyServer

Start = Callable[..., ToyServer]
BODY = b'{"prompt": "abc", "max_tokens": 4}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"


def connect(server: ToyServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=15)


def read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_well(server: ToyServer) -> bool:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 4})
    return bool(answer.json()["choices"][0]["text"] == "abab")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"this is not HTTP\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
    ],
    ids=["noise", "header", "long header", "endless header", "long url", "many headers"],
)
def test_errors_below_the_application_are_json_too(shared: ToyServer, sent: bytes, status: int) -> None:
    with connect(shared) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert is_well(shared)


def test_a_request_that_trickles_in_is_given_up(start: Start) -> None:
    server = start(limits={"head_s": 0.4, "BODY_S": 0.4})
    with connect(server) as head, connect(server) as body, connect(server) as silent:
        began = time.monotonic()
        head.sendall(HEAD % len(BODY))
        body.sendall(HEAD % len(BODY) + b"\r\n" + BODY[:5])
        assert read_all(head).startswith(b"HTTP/1.1 408 ")
        assert body.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b""
        assert time.monotonic() - began < 5
    assert is_well(server)


def test_a_pause_between_requests_is_not_a_slow_request(start: Start) -> None:
    server = start(limits={"head_s": 0.3})
    with connect(server) as client:
        for _ in range(2):
            client.sendall(HEAD % len(BODY) + b"\r\n" + BODY)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == 200
            assert len(answer.read()) == int(answer.headers["content-length"])
            time.sleep(0.6)


def test_a_client_that_reads_a_byte_now_and_then_is_held_back_and_then_cut_off(start: Start) -> None:
    server = start(limits={"stall_s": 1.0}, context_length=2_000_000, kv_tokens=2_000_000)
    address = urlsplit(server.url)
    body = b'{"prompt": "abc", "max_tokens": 1000000, "stream": true, "logprobs": 20, "n": 16}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall(HEAD % len(body) + b"\r\n" + body)
        end = time.monotonic() + 60
        while "next to nothing" not in server.log.read_text():
            assert time.monotonic() < end, "never cut off"
            client.recv(1)
            assert is_well(server), "one slow reader holds up others"
            time.sleep(0.05)
    end = time.monotonic() + 5
    while "engine_http_running 0.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end, "its generation goes on"


def test_beyond_the_queue_requests_are_refused_and_told_when_to_come_again(start: Start) -> None:
    server = start(max_running_requests=1, max_waiting_requests=1)
    waiting = {"prompt": "<|silent|>", "max_tokens": 5}
    url = f"{server.url}/v1/completions"

    def wait() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(url, json=waiting, timeout=20)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 5
    while "engine_http_running 2.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end
    for stream in (False, True):
        answer = httpx.post(url, json={"prompt": "ab", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) > 0


def test_more_connections_than_files_are_refused_with_a_503(start: Start) -> None:
    server = start(limits={"files": 104})
    clients = [connect(server) for _ in range(60)]  # 40 are served, as 64 files are the server's own
    try:
        answers = [client.recv(65536) for client in clients[45:]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer for answer in answers)
        clients[0].sendall(HEAD % len(BODY) + b"\r\n" + BODY)
        assert clients[0].recv(65536).startswith(b"HTTP/1.1 200 ")
    finally:
        for client in clients:
            client.close()
    assert is_well(server)


async def one_of_many(host: str, port: int) -> int:
    """Status of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HEAD % len(BODY) + b"Connection: close\r\n\r\n" + BODY)
    answer = await reader.read()
    writer.close()
    assert answer.endswith(b"}")
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(("requests", "kept"), [(3000, 20_000), (500, 100)])
def test_thousands_at_once_are_all_answered(start: Start, requests: int, kept: int) -> None:
    server = start(max_running_requests=1, max_waiting_requests=kept)
    address = urlsplit(server.url)

    async def all_of_them() -> list[int]:
        host, port = str(address.hostname), int(address.port or 0)
        return await asyncio.gather(*(one_of_many(host, port) for _ in range(requests)))

    statuses = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert set(statuses) == {200} if kept > requests else set(statuses) <= {200, 429}
    assert statuses.count(200) > 0
    assert is_well(server)


def test_large_bodies_that_come_at_once_are_refused_beyond_a_size_of_all(start: Start) -> None:
    server = start(limits={"MAX_UNREAD_BYTES": 300_000, "BODY_S": 1.0})
    clients = [connect(server) for _ in range(4)]
    try:
        for client in clients[:2]:
            client.sendall(HEAD % 200_000 + b"\r\n" + b" " * 140_000)
        time.sleep(0.2)
        clients[2].sendall(HEAD % 200_000 + b"\r\n" + b" " * 140_000)
        refused = clients[2].recv(65536)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in refused
        assert is_well(server)
        assert all(b"408 " in client.recv(65536) for client in clients[:2])
        padded = b" " * 200_000 + BODY
        clients[3].sendall(HEAD % len(padded) + b"\r\n" + padded)
        assert clients[3].recv(65536).startswith(b"HTTP/1.1 200 ")
    finally:
        for client in clients:
            client.close()


def test_request_ids_are_kept_or_made_and_logged(start: Start) -> None:
    server = start(log_format="json")
    url = server.wait_for(r'listening on (http[^ "]+)')[1] + "/v1/completions"
    kept = httpx.post(url, json={"prompt": "a"}, headers={"X-Request-ID": "abc:1.2-3_4"})
    assert kept.headers["x-request-id"] == "abc:1.2-3_4"
    made = [httpx.post(url, json={"prompt": "a"}, headers={"x-request-id": bad}) for bad in ("", "a b", "x" * 129)]
    ids = [answer.headers["x-request-id"] for answer in made]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    refused = httpx.post(url, json={})
    server.process.terminate()
    assert server.end() == 0
    lines = [json.loads(line) for line in server.lines()]
    told = {line["request_id"]: line for line in lines if "request_id" in line}
    assert set(ids) | {"abc:1.2-3_4", refused.headers["x-request-id"]} <= set(told)
    assert told["abc:1.2-3_4"]["status"] == 200
    assert told[refused.headers["x-request-id"]]["status"] == 400
