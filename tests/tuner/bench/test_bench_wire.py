"""Servers of every shape, over a real socket: the right number or a named problem, never a wrong one or a trace."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.bench import metrics
from tuner.bench.client import Exchange, Stream, Target, exchange_once
from tuner.bench.requests import post
from tuner.bench.trace import Trace, read_exchange

WHOLE = 24
"""Tokens asked for."""


@dataclass(frozen=True)
class Shape:
    """How one answer looks on the wire. `steps` are tokens by event, `texts` what each says."""

    steps: tuple[int, ...] = (1, 3, 2)
    texts: tuple[str, ...] = ("a", "bc", " é😀")
    usage: str = "continuous"  # continuous, final, both_ends, none
    framing: str = "chunked"  # chunked, length, close
    version: str = "1.1"
    newline: bytes = b"\n"
    space: bytes = b" "
    comments: bool = False
    role_first: bool = False
    done: bool = True
    last_line_open: bool = False
    cuts: tuple[int, ...] = ()
    finish: str | None = "stop"
    field: str = "content"

    @property
    def tokens(self) -> int:
        return sum(self.steps)

    def body(self) -> bytes:
        lines: list[bytes] = []
        made = 0

        def say(payload: dict[str, Any]) -> None:
            if self.comments:
                lines.append(b": keep-alive")
                lines.append(b"")
            data = json.dumps({"object": "chat.completion.chunk", **payload}, ensure_ascii=False).encode()
            lines.append(b"data:" + self.space + data)
            lines.append(b"")

        def usage(count: int) -> dict[str, Any]:
            return {"usage": {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}}

        if self.role_first:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            say({**role, **(usage(0) if self.usage != "none" else {})})
        for i, (count, text) in enumerate(zip(self.steps, self.texts, strict=True)):
            made += count
            finish = self.finish if i == len(self.steps) - 1 else None
            choice = {"index": 0, "delta": {self.field: text}, "finish_reason": finish}
            last = i == len(self.steps) - 1
            told = usage(made) if self.usage == "continuous" or (self.usage == "both_ends" and last) else {}
            say({"choices": [choice], **told})
        if self.usage != "none":
            say({"choices": [], **usage(made)})
        if self.done:
            lines.append(b"data:" + self.space + b"[DONE]")
            lines.append(b"")
        body = self.newline.join(lines) + self.newline
        return body.rstrip(b"\r\n") if self.last_line_open else body

    def wire(self) -> list[bytes]:
        """Head and body in the pieces that are written apart."""
        body = self.body()
        edges = sorted({0, len(body), *(cut % len(body) for cut in self.cuts)})
        parts = [body[a:b] for a, b in pairwise(edges)]
        head = f"HTTP/{self.version} 200 OK\r\nContent-Type: text/event-stream\r\n"
        if self.framing == "chunked":
            head += "Transfer-Encoding: chunked\r\n"
            parts = [b"%X;note=1\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\nX-Trailer: 1\r\n\r\n"]
        elif self.framing == "length":
            head += f"Content-Length: {len(body)}\r\n"
        else:
            head += "Connection: close\r\n"
        return [head.encode() + b"\r\n", *parts]


class Wire:
    """A server that answers each request with what it is told to write; and what a loop complains of meanwhile."""

    def __init__(self) -> None:
        self.answers: list[tuple[list[bytes], bool]] = []
        self.complaints: list[dict[str, Any]] = []
        self.asked: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
                await reader.readexactly(length)
                self.asked.append(head)
                parts, close = self.answers.pop(0)
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def ask(self, *answers: tuple[list[bytes], bool], timeout_s: float = 5.0) -> list[Exchange]:
        """One request after the other on one stream; the exchanges as they ended."""

        async def run() -> list[Exchange]:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _loop, context: self.complaints.append(context))
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            target = Target.parse(f"http://127.0.0.1:{port}")
            data = post(target, "/v1/chat/completions", b"{}", None)
            self.answers = list(answers)
            found: list[Exchange] = []
            over = asyncio.Event()
            sent = iter([(data, Exchange(i, "p", WHOLE)) for i in range(len(answers))])

            def done(exchange: Exchange) -> None:
                found.append(exchange)
                if len(found) == len(answers):
                    over.set()

            stream = Stream(target, lambda _stream: next(sent, None), done)
            stream.start()
            try:
                async with asyncio.timeout(timeout_s):
                    await over.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(0.005)  # what still arrives belongs to nobody
            stream.stop()
            server.close()
            return found

        return asyncio.run(run())


def read(*answers: tuple[list[bytes], bool], timeout_s: float = 5.0) -> list[Trace]:
    wire = Wire()
    traces = [read_exchange(exchange) for exchange in wire.ask(*answers, timeout_s=timeout_s)]
    assert wire.complaints == []
    return traces


def one(shape: Shape) -> Trace:
    (trace,) = read((shape.wire(), shape.framing == "close"))
    return trace


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    steps = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    text = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
    texts = [draw(text) for _ in steps]
    return Shape(
        tuple(steps),
        tuple(texts),
        usage=draw(st.sampled_from(["continuous", "final", "both_ends", "none"])),
        framing=draw(st.sampled_from(["chunked", "length", "close"])),
        version="1.1",
        newline=draw(st.sampled_from([b"\n", b"\r\n"])),
        space=draw(st.sampled_from([b" ", b""])),
        comments=draw(st.booleans()),
        role_first=draw(st.booleans()),
        done=draw(st.booleans()),
        last_line_open=draw(st.booleans()),
        cuts=tuple(draw(st.lists(st.integers(0, 4000), max_size=12))),
        finish=draw(st.sampled_from(["stop", "length"])),
        field=draw(st.sampled_from(["content", "reasoning_content", "reasoning"])),
    )


@given(shapes())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_shape_of_a_whole_answer_gives_its_text_and_its_number_of_tokens(shape: Shape) -> None:
    trace = one(shape)
    assert trace.ok, trace.problem
    assert trace.text == "".join(shape.texts)
    assert trace.tokens == (None if shape.usage == "none" else shape.tokens)
    assert (trace.usage == "none") == (shape.usage == "none")
    if trace.tokens is not None:
        assert metrics.tokens_until(trace, trace.end_ns + 1) == pytest.approx(shape.tokens)
        assert metrics.tokens_until(trace, trace.sent_ns) == 0
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(trace.curve))


@given(shapes(), st.integers(0, 4000), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_answer_that_breaks_off_anywhere_is_whole_or_has_a_problem(shape: Shape, at: int, open_: bool) -> None:
    """Its connection closes after some byte: what was not told is never made up."""
    data = b"".join(shape.wire())
    at = at % len(data)
    (trace,) = read(([data[:at]], True)) if not open_ else read(([data[:at]], False), timeout_s=0.05) or [None]
    if trace is None:  # it never ended: that is a stall, and the block's to find
        return
    if trace.ok:
        assert trace.finish == shape.finish
        assert trace.tokens in (None, shape.tokens)
        assert trace.text == "".join(shape.texts)
    else:
        assert trace.problem


def test_an_answer_that_broke_off_before_its_usage_has_no_count_of_zero() -> None:
    """Many servers tell usage 0 with the role; text that came since was not counted by it."""
    shape = Shape(usage="final", done=False)
    wire = b"".join(shape.wire())
    whole = wire.index(b'{"object": "chat.completion.chunk", "choices": [], "usage"')
    (trace,) = read(([wire[:whole]], True))
    assert trace.usage == "none"
    assert trace.tokens is None
    assert trace.curve == ()


@pytest.mark.parametrize("counts", [(3, 0), (0, 3, 0), (5, 4)])
def test_a_count_that_falls_is_a_problem_whenever_it_is_told(counts: tuple[int, ...]) -> None:
    text = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    told = b"".join(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % count for count in counts)
    (trace,) = read(([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + text + told], True))
    assert trace.problem == "usage went backwards"


def test_text_after_the_last_count_is_a_problem_by_name() -> None:
    """A server that counts every second event, say, and breaks off between two counts."""
    told = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"completion_tokens": 3}}\n\n'
    more = b'data: {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    (trace,) = read(([head + told + more], True))
    assert not trace.ok
    assert trace.problem
    assert "text came after the last count" in trace.problem
    (counted,) = read(([head + told + more + b'data: {"usage": {"completion_tokens": 4}}\n\n'], True))
    assert counted.ok
    assert counted.tokens == 4


USAGE = {
    "a float": 3.5,
    "a whole float": 3.0,
    "a string": "3",
    "true": True,
    "negative": -1,
    "2**63": 2**63,
    "NaN": float("nan"),
    "an infinity": float("inf"),
    "a list": [3],
    "an object": {},
}


@pytest.mark.parametrize("value", USAGE.values(), ids=USAGE.keys())
def test_a_usage_that_is_no_count_is_named(value: object) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    body = b"data: " + json.dumps({**event, "usage": {"completion_tokens": value}}).encode() + b"\n\ndata: [DONE]\n\n"
    (trace,) = read(([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body], False))
    assert not trace.ok
    assert trace.problem is not None
    assert "completion_tokens" in trace.problem or "not JSON" in trace.problem


def reply(body: bytes, head: str = "", status: str = "200 OK", version: str = "1.1") -> list[bytes]:
    return [f"HTTP/{version} {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body]


GOOD = Shape().body()
ODD: dict[str, tuple[list[bytes], bool, str]] = {
    "gzip": (reply(gzip.compress(GOOD), "Content-Encoding: gzip\r\n"), False, "encoded (gzip)"),
    "a redirect": (reply(b"", "Location: /elsewhere\r\n", "307 Temporary Redirect"), False, "HTTP 307"),
    "no content": ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, "HTTP 204"),
    "503": (reply(b"busy", "Retry-After: 3600\r\n", "503 Service Unavailable"), False, "HTTP 503: busy"),
    "429": (reply(b"slower", "", "429 Too Many Requests"), False, "HTTP 429: slower"),
    "a page": (reply(b"<html>Sign in</html>"), False, "200 without any event"),
    "nothing": (reply(b""), False, "200 without any event"),
    "closes": ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], True, "closed"),
    "an upgrade": ([b"HTTP/1.1 101 Other\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"], True, "HTTP 101"),
    "a bad chunk": ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], False, "not HTTP"),
    "a short length": ([b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + GOOD], False, "200 without any event"),
    "not HTTP": ([b"\x16\x03\x01 hello"], False, "not HTTP"),
    "an error event": (reply(b'event: error\ndata: {"message": "out of memory"}\n\n' + GOOD), False, "out of memory"),
    "an error object": (reply(b'data: {"object": "error", "message": "no"}\n\n' + GOOD), False, "reported an error"),
    "an unknown end": (reply(Shape(finish="eos_token").body()), False, "finish reason 'eos_token'"),
    "no end": (reply(Shape(finish=None).body()), False, "no finish reason"),
    "two answers": (
        reply(GOOD.replace(b'"choices": [{', b'"choices": [{"index": 1, "delta": {"content": "x"}}, {', 1)),
        False,
        "more than the one answer",
    ),
    "a second choice": (reply(GOOD.replace(b'"index": 0', b'"index": 1', 1)), False, "more than the one answer"),
    "old Mac lines": (reply(GOOD.replace(b"\n", b"\r")), False, "200 without any event"),
}


@pytest.mark.parametrize(("parts", "close", "problem"), ODD.values(), ids=ODD.keys())
def test_what_is_no_answer_is_named_and_the_next_one_still_counts(
    parts: list[bytes], close: bool, problem: str
) -> None:
    first, second = read((parts, close), (Shape().wire(), False))
    assert not first.ok
    assert first.problem is not None
    assert problem in first.problem
    assert second.tokens == Shape().tokens or second.problem  # what was left on the connection is not taken for it


@pytest.mark.parametrize(
    "shape",
    [
        replace(Shape(), version="1.0", framing="close"),
        replace(Shape(), version="1.0", framing="length"),
        replace(Shape(), framing="close", last_line_open=True, done=False),
        replace(Shape(), usage="final", last_line_open=True, done=False),
        replace(Shape(), cuts=tuple(range(0, 4000, 1))),
    ],
)
def test_old_versions_missing_marks_and_single_bytes_do_no_harm(shape: Shape) -> None:
    assert one(shape).tokens == shape.tokens


def test_a_byte_order_mark_hides_nothing() -> None:
    (trace,) = read((reply(b"\xef\xbb\xbf" + GOOD), False))
    assert (trace.tokens, trace.text) == (Shape().tokens, "".join(Shape().texts))


def test_garbage_behind_an_answer_is_nobodys_and_no_trace_is_printed() -> None:
    whole = b"".join(Shape().wire())
    first, second = read(([whole + b"<!-- trailing -->"], False), (Shape().wire(), False))
    assert first.tokens == Shape().tokens
    assert second.problem is None or "not HTTP" in second.problem
    (last,) = read(([whole + b"<!-- trailing -->"], False))  # nothing else was asked for
    assert last.tokens == Shape().tokens


def test_an_answer_given_twice_is_not_the_next_requests() -> None:
    whole = b"".join(Shape().wire())
    first, second, third = read(([whole + whole], False), (Shape().wire(), False), (Shape().wire(), False))
    assert first.ok
    assert second.problem is not None
    assert "before its request" in second.problem
    assert third.ok


def test_one_that_is_asked_once_leaves_nothing_behind_either() -> None:
    async def run() -> list[Any]:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"".join(Shape().wire()) + b"\r\ngarbage\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        target = Target.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        exchange = await exchange_once(target, post(target, "/x", b"", None), Exchange(0, "p", WHOLE), 2.0)
        server.close()
        assert read_exchange(exchange).tokens == Shape().tokens
        return complaints

    assert asyncio.run(run()) == []


def test_no_encoding_is_asked_for() -> None:
    wire = Wire()
    wire.ask((Shape().wire(), False))
    assert b"Accept-Encoding: identity" in wire.asked[0]


def test_an_event_of_megabytes_is_read_in_no_time_and_a_line_without_end_is_no_answer() -> None:
    text = "x" * (3 << 20)
    big = Shape(steps=(1, 1), texts=(text, "y"))
    assert one(big).text == text + "y"
    endless = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    endless += [b"10000\r\n" + b"z" * 65536 + b"\r\n"] * 200
    (trace,) = read((endless, True))
    assert trace.problem is not None
    assert "longer than" in trace.problem


def curve(trace: Trace) -> list[float]:
    return [tokens for _, tokens in trace.curve]


def arrived(*events: dict[str, Any]) -> Trace:
    """Events 10 ms apart, the first 10 ms after the sending."""

    def reads() -> Iterator[tuple[int, bytes]]:
        for i, event in enumerate(events, start=1):
            yield i * 10_000_000, b"data: " + json.dumps(event).encode() + b"\n\n"

    exchange = Exchange(0, "p", WHOLE, sent_ns=0, end_ns=10_000_000 * (len(events) + 1), status=200, end="complete")
    exchange.events = list(reads())
    return read_exchange(exchange)


def event(text: str | None, tokens: int | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    told: dict[str, Any] = {"choices": [{"index": 0, "delta": {**content, **delta}, "finish_reason": finish}]}
    return told if tokens is None else {**told, "usage": {"completion_tokens": tokens}}


def test_a_total_told_twice_at_the_end_is_still_a_total() -> None:
    """With the last chunk and behind it, and a zero before the first token: all of it was not made at the end."""
    trace = arrived(event("", 0), event("a"), event("b"), event("cd", 8, "length"), {**event(None, 8), "choices": []})
    assert trace.usage == "final"
    assert curve(trace) == [2, 4, 8]


def test_tool_calls_are_output_without_text() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}
    trace = arrived(event(None, 1, **call), event(None, 4, **call), event(None, 6, "stop"))
    assert (trace.tokens, len(trace.chunks)) == (6, 3)


def test_an_answer_in_one_piece_has_no_time_per_token_and_is_spread_over_its_making() -> None:
    trace = arrived(event("a whole answer", None, "stop"), {**event(None, 21), "choices": []})
    assert trace.tokens == 21
    assert metrics.ttft_ms(trace) == pytest.approx(10)
    assert metrics.tpot_ms(trace) is None
    assert metrics.tokens_until(trace, 5_000_000) == pytest.approx(10)
    assert metrics.tokens_until(trace, 10_000_000) == 21


def test_counts_that_do_not_count_up_are_found_out() -> None:
    by_chunk = arrived(*(event("word ", 1) for _ in range(20)), event("end", 1, "stop"))
    assert by_chunk.ok
    assert metrics.undercounted(by_chunk)
    assert not metrics.undercounted(arrived(*(event("word ", i) for i in range(1, 20)), event("end", 20, "stop")))
    falling = arrived(event("one two", 2), event("three", 1), event("end", 3, "stop"))
    assert falling.problem == "usage went backwards"
