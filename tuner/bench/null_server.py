"""A server that does no work: what the load client achieves against it is the client's own ceiling.

`python -m tuner.bench.null_server` prints its port and serves chat completions as a decode loop would: every
`step_s` one chunk of `tokens_per_chunk` tokens goes to every request under way. It counts what it sends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, cast

import httptools

WORDS = ("the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog ", "and ", "then ", "sleeps. ")


@dataclass(frozen=True)
class NullOptions:
    """How the server behaves.

    `length` is the output of a request in tokens, if max_tokens does not end it before; `usage` is continuous (every
    chunk), final or none.
    """

    step_s: float = 0.02
    prefill_s: float = 0.0
    tokens_per_chunk: int = 1
    length: int = 10**9
    usage: str = "continuous"


class Answer:
    """One streamed answer. `step` is called once a decode step and returns whether it goes on."""

    def __init__(self, server: NullServer, connection: Connection, body: dict[str, Any]) -> None:
        self.server = server
        self.connection = connection
        self.body = body
        self.options = server.options
        self.limit = min(int(body.get("max_tokens", 16)), self.options.length)
        self.made = 0
        self.begin_ns = monotonic_ns() + int(self.options.prefill_s * 1e9)

    def begin(self) -> None:
        """Send the headers."""
        self.connection.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def step(self) -> bool:
        """Send one chunk of output; at the end also the finish reason, usage and the end marker."""
        if monotonic_ns() < self.begin_ns:
            return True
        count = min(self.options.tokens_per_chunk, self.limit - self.made)
        text = "".join(WORDS[(self.made + i) % len(WORDS)] for i in range(count))
        self.made += count
        ended = self.made >= self.limit
        self.server.count(count)
        data = self.event(text, "length" if ended else None)
        if ended:
            data += self.last_events()
        self.connection.write_chunk(data)
        if ended:
            self.connection.write(b"0\r\n\r\n")
        return not ended

    def event(self, text: str, finish: str | None) -> bytes:
        """One chat-completion chunk as an event."""
        usage = self.usage() if self.options.usage == "continuous" else None
        return sse({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": usage})

    def last_events(self) -> bytes:
        """What follows the last chunk."""
        usage = b"" if self.options.usage == "none" else sse({"choices": [], "usage": self.usage()})
        return usage + b"data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        """The cumulative token counts."""
        return {"prompt_tokens": 10, "completion_tokens": self.made, "total_tokens": 10 + self.made}


def sse(payload: dict[str, Any]) -> bytes:
    """An object as one server-sent event."""
    return b"data: " + json.dumps({"id": "null", "object": "chat.completion.chunk", **payload}).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """Parses requests and hands them to the server."""

    def __init__(self, server: NullServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left; its answer is dropped at the next step."""
        self.transport = None

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Request line."""
        self.url, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self.body += body

    def on_message_complete(self) -> None:
        """A whole request."""
        self.server.handle(self, self.url.decode(), self.body)

    def write(self, data: bytes) -> None:
        """Raw bytes, if the client is still there."""
        if self.transport is not None:
            self.transport.write(data)

    def write_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reply(self, status: str, content: bytes, kind: str = "application/json") -> None:
        """A whole response."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        self.write(head.encode() + content)

    def close(self) -> None:
        """Hang up, after what was written."""
        if self.transport is not None:
            self.transport.close()


def complete(words: list[str]) -> tuple[str, bytes]:
    """Every word a token, behind one that begins the text; words that it never says are none it can read."""
    if any(len(word) > 1 and f"{word} " not in WORDS for word in words):
        return "400 Bad Request", b'{"error": "not a text of mine"}'
    usage = {"prompt_tokens": 1 + len(words), "completion_tokens": 1}
    choice = {"index": 0, "text": WORDS[0], "finish_reason": "length"}
    return "200 OK", json.dumps({"choices": [choice], "usage": usage}).encode()


class NullServer:
    """Keeps the requests under way and steps them together. `make_answer` decides how one is answered."""

    def __init__(self, options: NullOptions) -> None:
        self.options = options
        self.connections = 0
        self.requests = 0
        self.tokens = 0
        self.running: list[Answer] = []
        self.log: list[tuple[int, int]] = []

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Start; returns the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        self._steps = loop.create_task(self._step_forever())
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    def count(self, tokens: int) -> None:
        """Note that tokens were made now."""
        self.tokens += tokens
        self.log.append((monotonic_ns(), tokens))

    def handle(self, connection: Connection, url: str, body: bytes) -> None:
        """Answer one request."""
        if url == "/v1/models":
            connection.reply("200 OK", json.dumps({"object": "list", "data": [{"id": "null"}]}).encode())
        elif url == "/metrics":
            connection.reply("200 OK", self.metrics().encode(), "text/plain")
        elif url == "/v1/chat/completions":
            self.requests += 1
            answer = self.make_answer(connection, json.loads(body))
            if answer is not None:
                answer.begin()
                self.running.append(answer)
        elif url == "/v1/completions":
            connection.reply(*complete(json.loads(body)["prompt"].split()))
        else:
            connection.reply("404 Not Found", b'{"error": "no such path"}')

    def make_answer(self, connection: Connection, body: dict[str, Any]) -> Answer | None:
        """The answer to a chat request; None when it was answered already."""
        return Answer(self, connection, body)

    def metrics(self) -> str:
        """The Prometheus page."""
        return f"# TYPE engine_generated_tokens_total counter\nengine_generated_tokens_total {self.tokens}\n"

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.options.step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self.running = [a for a in self.running if a.connection.transport is not None and a.step()]


async def serve_until_stdin_closes(server: NullServer) -> None:
    """Print the port, then serve for as long as the parent holds our standard input open."""
    print(await server.serve(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Serve with the options given as a JSON object in the first argument."""
    import uvloop

    options = NullOptions(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else NullOptions()
    uvloop.run(serve_until_stdin_closes(NullServer(options)))


if __name__ == "__main__":
    main()
