"""Reads, after the window, what the stored bytes of one exchange say: tokens over time, text, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tuner.bench.client import Exchange
from tuner.foreign import count, parse

UsageMode = Literal["continuous", "final", "none"]

GOOD_FINISHES = ("stop", "length")
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One SSE event: when it arrived, the text it adds, the cumulative usage and finish reason it carries, if any."""

    at_ns: int
    text: str
    tokens: int | None
    finish: str | None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, read.

    `problem` is None for a request that ended well, else what went wrong; a request under way when the load stopped
    (`cut`) has none. `curve` holds (ns, cumulative output tokens), times rising. `tokens` is the last cumulative
    count, None where the server told none. `chunks` are the arrival times of events that carried output.
    `cached_tokens` of the prompt came from a prefix cache, where the server tells.
    """

    number: int
    prompt_id: str
    max_tokens: int
    sent_ns: int
    end_ns: int
    problem: str | None
    cut: bool
    usage: UsageMode
    tokens: int | None
    curve: tuple[tuple[int, float], ...]
    chunks: tuple[int, ...]
    finish: str | None
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the request ran to its end and ended well."""
        return self.problem is None and not self.cut

    @property
    def first_ns(self) -> int | None:
        """Arrival of the first output."""
        return self.chunks[0] if self.chunks else None

    @property
    def last_ns(self) -> int | None:
        """Arrival of the last output."""
        return self.chunks[-1] if self.chunks else None


class MalformedStream(ValueError):
    """The answer is not a stream of chat-completion chunks, or carries an error instead."""


def read_exchange(exchange: Exchange) -> Trace:
    """The trace of one exchange. Never raises: what cannot be read becomes the trace's `problem`."""
    events: list[Event] = []
    done = False
    problem: str | None = None
    cut = exchange.end in ("cancelled", "open")
    if exchange.status not in (0, 200):
        problem = f"HTTP {exchange.status}: {_excerpt(exchange.body())}"
    elif exchange.end == "refused":
        problem = f"no connection: {exchange.error}"
    elif exchange.end == "malformed":
        problem = exchange.error
    else:
        try:
            for event in _events(exchange.events, whole=not cut):
                if event is None:
                    done = True
                    break
                events.append(event)
        except MalformedStream as error:
            problem, cut = str(error), False
    finish = next((e.finish for e in reversed(events) if e.finish), None)
    if problem is None and not cut:
        if finish is None:
            problem = exchange.error or ("no finish reason" if done or events else "200 without any event")
            problem = f"truncated: {problem}"
        elif finish not in GOOD_FINISHES:
            problem = f"finish reason '{finish}'"
    mode, curve, chunks, tokens = _count(events)
    told = [e.tokens for e in events if e.tokens is not None]
    if problem is None and any(b < a for a, b in pairwise(told)):
        problem = "usage went backwards"
    if problem is None and not cut and tokens is not None and _text_after_the_count(events):
        problem = "text came after the last count of tokens: its total is not known"
    return Trace(
        number=exchange.number,
        prompt_id=exchange.prompt_id,
        max_tokens=exchange.max_tokens,
        sent_ns=exchange.sent_ns,
        end_ns=exchange.end_ns,
        problem=problem,
        cut=cut,
        usage=mode,
        tokens=tokens,
        curve=curve,
        chunks=chunks,
        finish=finish,
        text="".join(e.text for e in events),
        prompt_tokens=next((e.prompt_tokens for e in reversed(events) if e.prompt_tokens is not None), None),
        cached_tokens=next((e.cached_tokens for e in reversed(events) if e.cached_tokens is not None), None),
    )


def _count(events: list[Event]) -> tuple[UsageMode, tuple[tuple[int, float], ...], tuple[int, ...], int | None]:
    """Usage mode, curve, chunk times and total.

    Continuous usage gives the curve as it is. Where only a total came, it is spread over the events in proportion to
    their text: a chunk may hold any number of tokens, so chunks are never counted as tokens. A count behind all text is
    a total, however often it is told; what came before the first token told nothing.
    """
    counted = [e for e in events if e.tokens is not None]
    with_text = [e for e in events if e.text]
    if not counted or (with_text and not any(e.tokens for e in counted)):
        return "none", (), tuple(e.at_ns for e in with_text), None
    total = counted[-1].tokens
    assert total is not None
    first = next((e for e in counted if e.tokens), counted[-1])
    if not with_text or first.at_ns <= with_text[0].at_ns or first.at_ns < with_text[-1].at_ns:
        chunks = []
        seen = 0
        for event in events:
            grown = event.tokens is not None and event.tokens > seen
            if event.tokens is not None:
                seen = max(seen, event.tokens)
            if event.text or grown:
                chunks.append(event.at_ns)
        return "continuous", _last_per_time((e.at_ns, float(e.tokens or 0)) for e in counted), tuple(chunks), total
    length = sum(len(e.text) for e in with_text)
    points = []
    so_far = 0
    for event in with_text:
        so_far += len(event.text)
        points.append((event.at_ns, total * so_far / length))
    return "final", _last_per_time(iter(points)), tuple(e.at_ns for e in with_text), total


def _text_after_the_count(events: list[Event]) -> bool:
    """Whether output came that no count includes: an answer that broke off before its usage, say."""
    last = max(i for i, e in enumerate(events) if e.tokens is not None)
    return any(e.text for e in events[last + 1 :])


def _last_per_time(points: Iterator[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    kept: list[tuple[int, float]] = []
    for point in points:
        if kept and kept[-1][0] == point[0]:
            kept[-1] = point
        else:
            kept.append(point)
    return tuple(kept)


def _events(reads: list[tuple[int, bytes]], *, whole: bool) -> Iterator[Event | None]:
    """Events in order, None for `[DONE]`. An event has the time of the read that completed it.

    Of a `whole` answer the last line counts without a line end, where it is complete.
    """
    named_error = False
    for at_ns, line in _lines(reads, whole=whole):
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if named_error:
                raise MalformedStream(f"the server reported an error in the stream: {_excerpt(payload)}")
            if payload == b"[DONE]":
                yield None
            elif payload:
                yield _event(at_ns, payload)
        elif line.startswith(b"event:"):
            named_error = line[6:].strip() == b"error"
        elif not line:
            named_error = False
        elif line.startswith(b"{"):
            raise MalformedStream(f"not a stream of events: {_excerpt(line)}")


def _lines(reads: list[tuple[int, bytes]], *, whole: bool) -> Iterator[tuple[int, bytes]]:
    """Lines without their ends. A line may be of megabytes, in as many reads: it is joined once."""
    begun: list[bytes] = []
    at_ns = 0
    first = True
    for at_ns, data in reads:
        head, found, rest = data.partition(b"\n")
        if not found:
            begun.append(data)
            continue
        line = b"".join((*begun, head))
        yield at_ns, (line.removeprefix(BOM) if first else line).rstrip(b"\r")
        first = False
        *lines, last = rest.split(b"\n")
        for line in lines:
            yield at_ns, line.rstrip(b"\r")
        begun = [last] if last else []
    if begun:
        line = b"".join(begun).rstrip(b"\r")
        line = line.removeprefix(BOM) if first else line
        if line.startswith(b"{") or (whole and _complete(line)):
            yield at_ns, line


def _complete(line: bytes) -> bool:
    """Whether a line that nothing follows is one: an answer may be torn anywhere."""
    payload = line.removeprefix(b"data:").strip()
    if payload == b"[DONE]":
        return True
    try:
        parse(payload)
    except ValueError:
        return False
    return line.startswith(b"data:")


def _event(at_ns: int, payload: bytes) -> Event:
    try:
        # A server may cut a character in half between events; its token still counts.
        data = parse(payload, strict=True)
    except ValueError as error:
        raise MalformedStream(f"an event is not JSON: {_excerpt(payload)}") from error
    if not isinstance(data, dict):
        raise MalformedStream(f"an event is not an object: {_excerpt(payload)}")
    if data.get("error") or data.get("object") == "error":
        raise MalformedStream(f"the server reported an error in the stream: {_excerpt(payload)}")
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if choice.get("index") or (isinstance(choices, list) and len(choices) > 1):
        raise MalformedStream(f"more than the one answer that was asked for: {_excerpt(payload)}")
    delta = choice.get("delta")
    text = ""
    if isinstance(delta, dict):
        text = "".join(value for key in TEXT_FIELDS if isinstance(value := delta.get(key), str))
    finish = choice.get("finish_reason")
    usage = data.get("usage")
    tokens, prompt_tokens, cached = _usage(usage) if isinstance(usage, dict) else (None, None, None)
    return Event(at_ns, text, tokens, finish if isinstance(finish, str) else None, prompt_tokens, cached)


def _usage(usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    try:
        tokens = count(usage.get("completion_tokens"))
    except ValueError as error:
        raise MalformedStream(f"usage.completion_tokens {error}") from error
    details = usage.get("prompt_tokens_details")
    try:
        return (
            tokens,
            count(usage.get("prompt_tokens")),
            count(details.get("cached_tokens") if isinstance(details, dict) else None),
        )
    except ValueError:  # nothing is made of what is no count
        return tokens, None, None


def _excerpt(data: bytes, limit: int = 200) -> str:
    text = data[:limit].decode("utf-8", "replace").strip()
    return text + ("…" if len(data) > limit else "") or "(empty)"
