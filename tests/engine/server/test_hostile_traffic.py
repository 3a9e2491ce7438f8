"""The engine itself behind HTTP, with a small random model: whatever some clients do, the others' answers stay as they
are on a quiet server, and every page comes back."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.engine.conftest import tiny_llama
from tests.engine.server.conftest import ToyServer

RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"
SETTINGS = {
    "dtype": "float32",
    "threads": 1,
    "page_size": 4,
    "kv_tokens": 1200,
    "prefill_tokens": 24,
    "max_running_requests": 24,
    "spec": {"speculation": "ngram", "num_steps": 3, "num_draft_tokens": 4, "ngram_min": 1, "ngram_max": 3},
    "limits": {"head_s": 1.0, "stall_s": 1.0, "BODY_S": 1.0},
}
WITNESSES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The quick brown fox jumps over the lazy dog. " * 2, "max_tokens": 40}),
    ("/v1/completions", {"prompt": "abc abc abc", "max_tokens": 60, "temperature": 0.9, "seed": 7, "n": 2}),
    (
        "/v1/completions",
        {"prompt": ["ab", "cd ef"], "n": 2, "max_tokens": 30, "echo": True, "logprobs": 2, "stop": ["\x01", "q"]},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 50, "min_tokens": 45},
    ),
    ("/v1/completions", {"prompt": "x" * 120, "max_tokens": 20, "repetition_penalty": 1.3, "temperature": 0}),
]


@pytest.fixture(scope="module")
def engine(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    folder = tiny_llama(tmp_path_factory.mktemp("small") / "model", vocab_size=264)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(toy_model / name, folder / name)
    log = tmp_path_factory.mktemp("hostile") / "server.log"
    server = ToyServer(log, "real", {"model": str(folder), "port": 0, **SETTINGS})
    server.wait_for("listening on", 60)
    yield server
    server.stop()
    assert server.process.returncode == 0, log.read_text()[-3000:]


def answers(server: ToyServer) -> list[Any]:
    """What the witnesses are told, asked all at once: half of them streamed."""

    def ask(number: int) -> Any:
        path, body = WITNESSES[number % len(WITNESSES)]
        if "temperature" not in body:
            body = {**body, "temperature": 0}
        if number % 2 and "logprobs" not in body:
            text = httpx.post(server.url + path, json={**body, "stream": True}, timeout=60).text
            found: dict[int, str] = {}
            for event in text.removesuffix("\n\n").split("\n\n")[:-1]:
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    part = choice["text"] if "text" in choice else choice["delta"]["content"]
                    found[choice["index"]] = found.get(choice["index"], "") + part
            return sorted(found.items())
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [
            (c["index"], c["text"] if "text" in c else c["message"]["content"]) for c in answer.json()["choices"]
        ] + _logprobs(answer.json())

    with ThreadPoolExecutor(len(WITNESSES) * 2) as pool:
        return list(pool.map(ask, range(len(WITNESSES) * 2)))


def _logprobs(answer: dict[str, Any]) -> list[Any]:
    """Rounded: the last bits of float32 sums depend on the batch."""
    told = [
        choice["logprobs"]["token_logprobs"]
        for choice in answer["choices"]
        if "token_logprobs" in (choice["logprobs"] or {})
    ]
    return [[None if value is None else round(value, 3) for value in values] for values in told]


@pytest.fixture(scope="module")
def quiet(engine: ToyServer) -> list[Any]:
    first = answers(engine)
    assert answers(engine) == first
    return first


def connect(server: ToyServer, buffer: int | None = None) -> socket.socket:
    address = urlsplit(server.url)
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(10)
    client.connect((address.hostname, address.port))
    return client


def post(path: str = "/v1/completions", **body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def leave_in_mid_stream(server: ToyServer, stop: threading.Event) -> None:
    body = post(prompt="abcdef", max_tokens=200, stream=True, ignore_eos=True)
    for how in itertools.cycle(("close", "reset", "half")):
        if stop.is_set():
            return
        clients = [connect(server) for _ in range(40)]
        for number, client in enumerate(clients):
            with contextlib.suppress(OSError):  # one that was held up too long has been given up
                client.sendall(body)
                if number % 2:
                    client.recv(64)  # the first token has come
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            elif how == "half":
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_WR)
            client.close()


def leave_while_the_prompt_runs(server: ToyServer, stop: threading.Event) -> None:
    for number in itertools.count():
        if stop.is_set():
            return
        text = f"{number} " + "long prompt " * 18
        for more in (
            {"echo": True, "logprobs": 1, "max_tokens": 0},
            {"n": 4},
            {"prompt": [text] * 3},
            {"stream": True},
        ):
            with connect(server) as client, contextlib.suppress(OSError):
                client.sendall(post(**{"prompt": text, "max_tokens": 5, **more}))
                time.sleep(0.01)


def read_a_byte_now_and_then(server: ToyServer, stop: threading.Event) -> None:
    body = post(prompt="ab", max_tokens=200, n=12, stream=True, logprobs=20, ignore_eos=True)
    clients = [connect(server, 2048) for _ in range(4)]
    for client in clients:
        client.sendall(body)
    while not stop.wait(0.2):
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(1)
    for client in clients:
        client.close()


def send_a_byte_now_and_then(server: ToyServer, stop: threading.Event) -> None:
    whole = post(prompt="ab", max_tokens=2)
    clients = [connect(server) for _ in range(50)]
    for at in itertools.count():
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(whole[at % len(whole) : at % len(whole) + 1])
        if stop.wait(0.05):
            break
    for client in clients:
        client.close()


def send_nonsense(server: ToyServer, stop: threading.Event) -> None:
    bad = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: [\r\n\r\n",
        post(prompt="a", max_tokens=10**9),
        post(prompt="a" * 5000, max_tokens=5),
        post("/reconfigure", **{"num_steps": "many"}),
        post(prompt="a", stream=True)[:-3],
        post(prompt="a", max_tokens=3) * 20,
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n\r\nffffffff\r\n",
    ]
    for sent in itertools.cycle(bad):
        if stop.is_set():
            return
        with connect(server) as client, contextlib.suppress(OSError):
            client.sendall(sent)
            client.settimeout(0.05)
            client.recv(65536)


def change_settings(server: ToyServer, stop: threading.Event) -> None:
    changes: list[dict[str, Any]] = [
        {"speculation": "none"},
        {"speculation": "ngram", "num_steps": 5, "num_draft_tokens": 6},
        {"spec_version": "v2"},
        {"num_steps": 1, "num_draft_tokens": 2},
        {"disable_batch_threshold": 2},
        {"spec_version": "v1", "disable_batch_threshold": "never"},
    ]
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for change in itertools.cycle(changes):
            if stop.is_set():
                break
            until_accepted(http, change)
            assert http.post("/flush_cache").status_code == 200
        spec = {name: SETTINGS["spec"][name] for name in ("speculation", "num_steps", "num_draft_tokens")}  # type: ignore[index]
        until_accepted(http, {**spec, "spec_version": "v1"})


def until_accepted(http: httpx.Client, change: dict[str, Any]) -> None:
    """Another change may be under way."""
    while (answer := http.post("/reconfigure", json=change)).status_code == 409:
        time.sleep(0.01)
    assert answer.status_code == 200, answer.text


KINDS: list[Callable[[ToyServer, threading.Event], None]] = [
    leave_in_mid_stream,
    leave_while_the_prompt_runs,
    read_a_byte_now_and_then,
    send_a_byte_now_and_then,
    send_nonsense,
    change_settings,
]


def settled(server: ToyServer) -> dict[str, float]:
    """The counters once nothing runs. The model process has then checked its pages itself, or it has ended."""
    end = time.monotonic() + 30
    while True:
        lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
        found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
        if not found["engine_running_requests"] + found["engine_waiting_requests"] + found["engine_http_running"]:
            return found
        assert time.monotonic() < end, "something is left running"
        time.sleep(0.05)


def held_up_by(server: ToyServer, kinds: list[Callable[..., None]], quiet: list[Any]) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(len(kinds)) as pool:
        rude = [pool.submit(kind, server, stop) for kind in kinds]
        try:
            time.sleep(0.2)
            for _ in range(3):
                assert answers(server) == quiet
        finally:
            stop.set()
        for one in rude:
            one.result()
    counters = settled(server)
    free, cached, used, total = (counters[f"engine_kv_pages{part}"] for part in ("_free", "_cached", "_used", ""))
    assert free + cached + used == total
    assert used == 0
    assert answers(server) == quiet


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nobodys_answer_shows_what_others_do(engine: ToyServer, quiet: list[Any], kind: Callable[..., None]) -> None:
    held_up_by(engine, [kind], quiet)


def test_a_context_filled_to_the_last_token_is_served(engine: ToyServer) -> None:
    url = f"{engine.url}/v1/completions"
    for prompt, most, status in ((255, 1, 200), (256, 1, 400), (1, 255, 200), (1, 256, 400), (200, 56, 200)):
        body = {"prompt": [97] * prompt, "max_tokens": most, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.json()["usage"]["completion_tokens"] == most
    scored = httpx.post(url, json={"prompt": [97] * 256, "max_tokens": 0, "echo": True, "logprobs": 1}, timeout=60)
    assert len(scored.json()["choices"][0]["logprobs"]["token_logprobs"]) == 256


def test_nor_when_they_do_it_all_at_once(engine: ToyServer, quiet: list[Any]) -> None:
    held_up_by(engine, KINDS, quiet)
    assert settled(engine)["engine_preemptions_total"] > 0
