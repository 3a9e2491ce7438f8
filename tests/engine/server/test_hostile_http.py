"""Whatever bytes come: an answer in form or a closed connection, and a server that goes on as before."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.server.conftest import ToyServer
from tests.engine.server.test_connections import is_well

Start = Callable[..., ToyServer]
BODY = b'{"prompt": "abc", "max_tokens": 4}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
JSON = {"content-type": "application/json"}


def exchange(server: ToyServer, sent: bytes, patience_s: float = 15, half_close: bool = False) -> bytes:
    """All that comes back before the server closes, or stays silent for so long."""
    address = urlsplit(server.url)
    received = b""
    with socket.create_connection((address.hostname, address.port), timeout=patience_s) as client:
        with contextlib.suppress(OSError):  # it may refuse and close before it has taken all
            client.sendall(sent)
            if half_close:
                client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while part := client.recv(65536):
                received += part
    return received


def errors(received: bytes) -> list[int]:
    """Statuses of all responses in it, each of which must be in form."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), received[:80]
        status, lines = int(head.split(b" ")[1]), head.lower().split(b"\r\n")
        length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), 0)
        body, received = rest[:length], rest[length:]
        if status >= 400 and body:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        if status >= 200:
            found.append(status)
    return found


@pytest.mark.parametrize("host", [b"[", b"[::1", b"a b", b"http://[", b"\xff", b"x:99999999", b"", b"]:"])
@pytest.mark.parametrize("line", [b"GET /nowhere", b"PUT /health", b"GET /health/", b"GET /v1/models/x"])
def test_a_host_that_is_none_ends_nothing(shared: ToyServer, host: bytes, line: bytes) -> None:
    sent = line + b" HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    assert set(errors(exchange(shared, sent))) <= {400, 404, 405}
    assert is_well(shared)


@pytest.mark.parametrize(
    "target",
    [
        b"*",
        b"//",
        b"/%ff%00",
        b"/\xff",
        b"/a b",
        b"http://other/health",
        b"other:443",
        b"/health?" + b"%" * 50,
        b"?",
        b"#",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"get", b"NONSENSE", b""])
def test_any_request_line_is_answered_in_form(shared: ToyServer, method: bytes, target: bytes) -> None:
    received = exchange(shared, method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert all(status in (200, 400, 404, 405) for status in errors(received)), received
    assert is_well(shared)


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "GET"])
def test_methods_that_a_path_has_not_are_405_with_those_that_it_has(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    if method == "HEAD":
        assert not answer.content
    else:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.head("/health").status_code == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        (b"Content-Length: 34\r\nContent-Length: 35\r\n", 400),
        (b"Content-Length: -1\r\n", 400),
        (b"Content-Length: 1e3\r\n", 400),
        (b"Content-Length: 99999999999999999999999\r\n", 400),
        (b"Content-Length: 34\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Transfer-Encoding: chunked, gzip\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 400),
        (b"Content Length: 34\r\n", 400),
        (b"Content-Length : 34\r\n", 400),
        (b": x\r\n", 400),
        (b"X: \x00\r\n", 400),
    ],
)
def test_bodies_of_doubtful_length_are_refused(shared: ToyServer, more: bytes, status: int) -> None:
    assert errors(exchange(shared, HEAD + more + b"\r\n" + BODY)) == [status]
    assert is_well(shared)


@pytest.mark.parametrize(
    ("chunks", "statuses"),
    [
        (b"22\r\n" + BODY + b"\r\n0\r\n\r\n", [200]),
        (b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n", [200]),
        (b"22;name=value\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n", [200]),
        (b"zz\r\n" + BODY + b"\r\n0\r\n\r\n", [400]),
        (b"-22\r\n" + BODY, [400]),
        (b"ffffffffffffffffff\r\n" + BODY, [400]),
        (b"22\r\n" + BODY + b"XX0\r\n\r\n", [400]),
    ],
)
def test_chunked_bodies_are_read_or_refused(shared: ToyServer, chunks: bytes, statuses: list[int]) -> None:
    received = exchange(shared, HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
    assert errors(received) == statuses
    assert is_well(shared)


mutations = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "cut", "repeat"]), st.floats(0, 1), st.binary(max_size=6)
    ),
    min_size=1,
    max_size=4,
)


def mutated(good: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, where, data in changes:
        at = int(where * len(good))
        if kind == "replace":
            good = good[:at] + data + good[at + len(data) :]
        elif kind == "insert":
            good = good[:at] + data + good[at:]
        elif kind == "delete":
            good = good[:at] + good[at + 1 + len(data) :]
        elif kind == "cut":
            good = good[:at]
        else:
            good = good[:at] + good
    return good


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([WHOLE, CHUNKED, b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n"]), mutations, st.booleans())
def test_any_bytes_are_answered_in_form_or_dropped(
    shared: ToyServer, good: bytes, changes: list[tuple[str, float, bytes]], half_close: bool
) -> None:
    received = exchange(shared, mutated(good, changes), 0.1, half_close)
    if b"transfer-encoding: chunked" not in received:
        assert all(status < 500 for status in errors(received)), received
    assert httpx.get(f"{shared.url}/health").status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 4_000_000,
        b'{"a":' * 600_000,
        b'{"num_steps": NaN}',
        b'{"num_steps": 1e999}',
        b'{"\\ud800": 1}',
        b'{"speculation": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b'{"num_steps": ' + b"9" * 100_000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("path", ["/reconfigure", "/v1/completions", "/v1/chat/completions"])
def test_json_that_breaks_parsers_is_refused(http: httpx.Client, path: str, content: bytes) -> None:
    answer = http.post(path, content=content, headers=JSON)
    assert answer.status_code in (200, 400, 422), answer.text
    if path != "/reconfigure" or answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "a\0b",
        "\u202e\ufeff",
        "\U0010ffff",
        "e\u0301" * 50,
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ],
)
def test_any_unicode_comes_back_as_it_was(http: httpx.Client, text: str) -> None:
    size = len(text.encode())
    answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": size, "echo": True})
    assert answer.json()["choices"][0]["text"] == text * 2
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_of_a_field_given_twice_the_last_counts(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "ab", "max_tokens": 9, "max_tokens": 2}', headers=JSON)
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_a_prompt_that_fills_the_context_is_refused_and_one_below_it_is_served(http: httpx.Client) -> None:
    for length, most, status in ((512, 1, 400), (511, 1, 200), (511, 2, 400), (513, 1, 400), (510, 2, 200)):
        answer = http.post("/v1/completions", json={"prompt": "a" * length, "max_tokens": most})
        assert answer.status_code == status, (length, most)
        if status == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    whole = http.post("/v1/completions", json={"prompt": "a" * 512, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) == 512
    for huge in (2**31, 2**63, 2**64, 10**30):
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": huge}).status_code == 400


def test_what_a_request_leaves_unread_is_not_read_for_ever(start: Start) -> None:
    """A body that the answer did not wait for keeps its connection for a while, and no longer."""
    server = start(limits={"head_s": 0.5})
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 404 " in client.recv(65536)
        began = time.monotonic()
        with contextlib.suppress(OSError):  # broken pipe or reset
            while time.monotonic() < began + 5:
                client.sendall(b"a")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - began < 3
    assert is_well(server)


def test_an_answered_connection_goes_on_once_the_rest_has_come(start: Start) -> None:
    server = start(limits={"head_s": 0.5})
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
        refused = http.client.HTTPResponse(client)
        refused.begin()
        assert refused.status == 404
        assert refused.read()
        client.sendall(b"abc")
        time.sleep(0.8)
        client.sendall(WHOLE)
        assert b" 200 " in client.recv(65536)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Authorization: Bearer key", 200),
        (b"authorization:   Bearer key  ", 200),
        (b"Authorization: bearer key", 200),
        (b"Authorization: Bearer  key", 401),
        (b"Authorization: Bearer key2", 401),
        (b"Authorization: Bearer ke", 401),
        (b"Authorization: Basic a2V5", 401),
        (b"Authorization: key", 401),
        (b"Authorization:", 401),
        (b"Authorization: Bearer \xff\xff", 401),
        (b"Authorization: Bearer wrong\r\nAuthorization: Bearer key", 401),
        (b"X-Api-Key: key", 401),
    ],
)
def test_only_the_key_opens(keyed: ToyServer, header: bytes, status: int) -> None:
    sent = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n"
    assert errors(exchange(keyed, sent)) == [status]


@pytest.fixture(scope="module")
def keyed(toy_model, tmp_path_factory):  # type: ignore[no-untyped-def]
    log = tmp_path_factory.mktemp("keyed") / "server.log"
    server = ToyServer(log, "main", {"model": str(toy_model), "port": 0, "api_key": "key"})
    yield server
    server.stop()


def test_it_is_still_well(shared: ToyServer) -> None:
    assert is_well(shared)
