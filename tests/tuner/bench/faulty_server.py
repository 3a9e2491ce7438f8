"""A server that misbehaves as its `model` field says: a JSON object such as {"fault": "truncate", "length": 20}.

`GET /log` tells what it really sent, as [ns, tokens] on the machine's monotonic clock, and what it was asked.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import fields, replace
from time import monotonic_ns
from typing import Any

import uvloop

from tuner.bench.null_server import Answer, Connection, NullOptions, NullServer, serve_until_stdin_closes, sse

FIELDS = {field.name for field in fields(NullOptions)}


class FaultyAnswer(Answer):
    def __init__(self, server: NullServer, connection: Connection, body: dict[str, Any], spec: dict[str, Any]) -> None:
        super().__init__(server, connection, body)
        self.spec = spec
        self.fault = spec.get("fault", "")
        self.held = ""
        self.options = replace(server.options, **{k: v for k, v in spec.items() if k in FIELDS})
        self.limit = min(int(body["max_tokens"]), self.options.length)
        if self.fault == "overrun":
            self.limit = 2 * int(body["max_tokens"])

    def begin(self) -> None:
        if self.fault == "plain_body":
            self.connection.reply("200 OK", b'{"choices": [{"message": {"content": "hello"}}]}')
        elif self.fault == "until_close":
            self.connection.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            self.connection = UnframedConnection(self.connection)
        elif self.fault == "not_http":
            self.connection.write(b"\x00\x01\x02 no HTTP at all\r\n\r\n")
            self.connection.close()
        else:
            super().begin()

    def step(self) -> bool:
        if self.fault in ("plain_body", "not_http"):
            return False
        if self.fault == "headers_then_close":
            self.connection.close()
            return False
        if self.fault == "truncate" and self.made >= 5:
            self.connection.close()
            return False
        if self.fault == "hang" and self.server.tokens >= int(self.spec["after"]):
            if self.spec.get("pings"):
                self.connection.write_chunk(b": ping\n\n")
            return True
        if self.fault == "stall_once" and self.server.stalls(int(self.spec["after"]), float(self.spec["for_s"])):
            return True
        if self.fault == "die" and self.server.tokens >= int(self.spec["after"]):
            os._exit(1)
        if self.fault == "error_event" and self.made >= 5:
            self.connection.write_chunk(sse({"error": {"message": "out of memory"}}))
            self.connection.write(b"0\r\n\r\n")
            return False
        if self.fault == "warms_up":  # faster with every token, up to its pace at `after`
            self.server.credit += min(1.0, (self.server.tokens + 30) / int(self.spec["after"]))
            if self.server.credit < 1:
                return True
            self.server.credit -= 1
        if self.fault == "phantom":
            self.server.tokens += 1  # made for somebody else
        more = super().step()
        if self.fault == "closes_after" and not more:
            self.connection.close()  # after a whole answer, without a word of it before
        return more

    def event(self, text: str, finish: str | None) -> bytes:
        if self.fault == "in_one":  # an answer is made as usual, and said at its end
            self.held += text
            if finish is None:
                return b": at work\n\n"
            text = self.held
        match self.fault:
            case "tool_calls":
                call = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
                choice = {"index": 0, "delta": call, "finish_reason": finish}
                usage = self.usage() if self.options.usage == "continuous" else None
                return sse({"choices": [choice], "usage": usage})
            case "loop":
                text = "a-" * 20
            case "empty":
                text = ""
            case "abort":
                finish = finish and "abort"
            case "role_first" if self.made == self.options.tokens_per_chunk:
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                return sse({"choices": [role]}) + super().event(text, finish)
            case "half_utf8":
                return super().event("§", finish).replace(b"\\u00a7", "é".encode()[:1])
        data = super().event(text, finish)
        if self.fault == "crlf":
            data = data.replace(b"\n\n", b"\r\n\r\n")
        return data

    def usage(self) -> dict[str, int]:
        if self.fault == "backwards" and self.made % 2:
            return {"completion_tokens": max(0, self.made - 3)}
        if self.fault == "chunk_usage":
            return {"completion_tokens": self.options.tokens_per_chunk}
        if self.fault == "counts_twice":
            return {"completion_tokens": 2 * self.made}
        return super().usage()


class FaultyServer(NullServer):
    def __init__(self, options: NullOptions) -> None:
        super().__init__(options)
        self.asked: list[dict[str, Any]] = []
        self.at_once: list[int] = []
        self.credit = 0.0
        self.seen: set[str] = set()
        self.stalled_until: int | None = None

    def stalls(self, after: int, for_s: float) -> bool:
        """Whether it stands still: once, from so many tokens on, for so many seconds."""
        if self.tokens >= after and self.stalled_until is None:
            self.stalled_until = monotonic_ns() + int(for_s * 1e9)
        return self.stalled_until is not None and monotonic_ns() < self.stalled_until

    def make_answer(self, connection: Connection, body: dict[str, Any]) -> Answer | None:
        spec = json.loads(body["model"]) if body["model"].startswith("{") else {}
        self.asked.append(body)
        fault = spec.get("fault", "")
        running = len(self.running) + 1
        self.at_once.append(running)
        if fault == "some_503" and len(self.asked) % 5 == 4:
            connection.reply("503 Service Unavailable", b'{"error": "overloaded"}')
            return None
        if fault == "refuse_above" and running > int(spec["limit"]):
            connection.reply("503 Service Unavailable", b'{"error": "too many"}')
            return None
        if fault in ("hollow", "endless") and len(self.asked) > 1:  # the probe is answered
            if fault == "hollow":
                connection.reply("200 OK", b'data: {"error": {"message": "device-side assert"}}\n\ndata: [DONE]\n\n')
            else:
                connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n" + b" " * (9 << 20))
            return None
        if fault == "redirect":
            connection.write(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /v2\r\nContent-Length: 0\r\n\r\n")
            return None
        if fault == "gzip":
            data = gzip.compress(sse({"choices": []}))
            head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
            connection.write(head + data)
            return None
        if fault == "always_500":
            connection.reply("500 Internal Server Error", b"AttributeError: no attribute 'draft_worker'")
            return None
        if fault == "no_continuous" and "continuous_usage_stats" in body.get("stream_options", {}):
            connection.reply("400 Bad Request", b'{"error": "unknown field stream_options.continuous_usage_stats"}')
            return None
        if fault == "unknown_model":
            connection.reply("404 Not Found", b'{"error": "no such model"}')
            return None
        if fault == "short_above" and running > int(spec["limit"]):
            return FaultyAnswer(self, connection, {**body, "max_tokens": 1}, {**spec, "fault": "empty"})
        if fault == "garble_cold" and (said := json.dumps(body["messages"])) not in self.seen:
            self.seen.add(said)
            spec = {**spec, "fault": "half_utf8"}
        answer = FaultyAnswer(self, connection, body, spec)
        if fault == "split":
            answer.connection = SplittingConnection(connection)
        return answer

    def handle(self, connection: Connection, url: str, body: bytes) -> None:
        if url == "/log":
            told = {
                "log": self.log,
                "asked": self.asked,
                "connections": self.connections,
                "at_once": max(self.at_once, default=0),
            }
            connection.reply("200 OK", json.dumps(told).encode())
        elif url == "/reset":
            self.log, self.asked, self.at_once = [], [], []
            self.connections = self.tokens = 0
            self.stalled_until = None
            connection.reply("200 OK", b"{}")
        else:
            super().handle(connection, url, body)


class SplittingConnection:
    """Sends every byte string in pieces, so that events and chunk headers arrive torn."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    @property
    def transport(self) -> Any:
        return self.inner.transport

    def write(self, data: bytes) -> None:
        for i in range(0, len(data), 7):
            self.inner.write(data[i : i + 7])

    def write_chunk(self, data: bytes) -> None:
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            self.write(b"%x\r\n%b\r\n" % (len(part), part))


class UnframedConnection:
    """Sends bodies as they are and hangs up where they end."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    @property
    def transport(self) -> Any:
        return self.inner.transport

    def write_chunk(self, data: bytes) -> None:
        self.inner.write(data)

    def write(self, data: bytes) -> None:
        self.inner.close()


if __name__ == "__main__":
    uvloop.run(serve_until_stdin_closes(FaultyServer(NullOptions(step_s=0.005))))
