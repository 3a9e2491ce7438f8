import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.bench.client import Exchange
from tuner.bench.trace import read_exchange


def chunk(text=None, tokens=None, finish=None, **extra):
    data = {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]}
    if tokens is not None:
        data["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens}
    return b"data: " + json.dumps({**data, **extra}, ensure_ascii=False).encode() + b"\n\n"


def usage(tokens):
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(*reads, end="complete", status=200, max_tokens=64):
    exchange = Exchange(0, "p", max_tokens, sent_ns=0, end_ns=100, status=status, end=end)
    exchange.events = [(10 * (i + 1), data) for i, data in enumerate(reads)]
    return read_exchange(exchange)


def test_continuous_usage_is_the_curve():
    trace = read(chunk("a", 1), chunk("bc", 4), chunk("d", 5, "stop") + usage(5) + DONE)
    assert trace.ok
    assert trace.usage == "continuous"
    assert trace.curve == ((10, 1.0), (20, 4.0), (30, 5.0))
    assert (trace.tokens, trace.text, trace.finish, trace.prompt_tokens) == (5, "abcd", "stop", 7)
    assert trace.chunks == (10, 20, 30)


def test_a_final_count_is_spread_over_the_text_not_over_the_chunks():
    trace = read(chunk("a"), chunk("bcd"), chunk("", finish="length") + usage(8) + DONE)
    assert trace.usage == "final"
    assert trace.curve == ((10, 2.0), (20, 8.0))


def test_hidden_tokens_count_though_few_chunks_carry_text():
    """A parser that holds text back: three chunks, 300 tokens of 2048 asked for."""
    trace = read(chunk("a"), chunk("b"), chunk("c", finish="stop") + usage(300) + DONE, max_tokens=2048)
    assert trace.tokens == 300


def test_a_hundred_blanks_are_what_usage_says():
    assert read(chunk(" " * 100, 7, "stop") + DONE).tokens == 7


def test_no_usage_is_unknown():
    trace = read(chunk("a"), chunk("b", finish="stop") + DONE)
    assert (trace.usage, trace.tokens, trace.curve) == ("none", None, ())
    assert trace.ok


def test_reasoning_is_output_too():
    delta = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
    trace = read(b"data: " + json.dumps(delta).encode() + b"\n\n", chunk("a", 2, "stop") + DONE)
    assert trace.first_ns == 10


def test_a_role_chunk_is_no_first_token():
    trace = read(chunk(""), chunk("a", 1), chunk("b", 2, "stop") + DONE)
    assert trace.first_ns == 20


@pytest.mark.parametrize(
    ("reads", "problem"),
    [
        ([], "200 without any event"),
        ([b": ping\n\n"], "200 without any event"),
        ([chunk("a", 1)], "no finish reason"),
        ([chunk("a", 1) + DONE], "no finish reason"),
        ([chunk("a", 1, "abort") + DONE], "finish reason 'abort'"),
        ([b"data: {broken\n\n"], "an event is not JSON"),
        ([b"data: [1]\n\n"], "an event is not an object"),
        ([b'{"choices": []}'], "not a stream of events"),
        ([b'{"choices": []}\n'], "not a stream of events"),
        ([chunk("a", 1), chunk(error={"message": "out of memory"})], "out of memory"),
        ([chunk("a", 5), chunk("b", 3, "stop")], "usage went backwards"),
        ([chunk("a", -1, "stop")], "completion_tokens is -1"),
        ([chunk("a", "x", "stop")], "completion_tokens is 'x'"),
    ],
)
def test_what_cannot_be_trusted_has_a_problem(reads, problem):
    trace = read(*reads)
    assert not trace.ok
    assert problem in trace.problem


def test_a_status_other_than_200_never_counts():
    trace = read(b'{"error": "overloaded"}', status=503)
    assert trace.problem == 'HTTP 503: {"error": "overloaded"}'
    assert trace.tokens is None


def test_a_request_that_we_cut_has_no_problem_but_is_not_ok():
    trace = read(chunk("a", 1), end="cancelled")
    assert trace.problem is None
    assert not trace.ok
    assert trace.tokens == 1


WHOLE = (
    b": hello\r\n\r\n"
    + chunk("gr", 1)
    + chunk("ün — ", 4).replace(b"\n", b"\r\n")
    + chunk("😀", 6)
    + chunk(None, 7, "stop")
    + usage(7)
    + DONE
)


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=30, unique=True))
@settings(max_examples=60)
def test_events_may_be_torn_anywhere(cuts):
    edges = [0, *sorted(cuts), len(WHOLE)]
    trace = read(*(WHOLE[a:b] for a, b in pairwise(edges)))
    assert trace.ok
    assert (trace.text, trace.tokens) == ("grün — 😀", 7)
    assert trace.curve[-1][1] == 7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CHUNK = st.fixed_dictionaries(
    {},
    optional={
        "choices": JSON
        | st.lists(st.fixed_dictionaries({}, optional={"delta": JSON, "finish_reason": JSON}), max_size=2),
        "usage": JSON | st.fixed_dictionaries({}, optional={"completion_tokens": JSON}),
        "error": JSON,
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine, not a slow strategy
@given(st.lists(CHUNK.map(lambda data: b"data: " + json.dumps(data).encode() + b"\n\n") | st.binary(max_size=60)))
def test_whatever_a_server_sends_is_read_without_an_exception(reads):
    trace = read(*reads)
    assert trace.ok == (trace.problem is None)
    assert trace.tokens is None or trace.tokens >= 0


ODD = [
    b'{"choices": [{"delta": {"content": "\\ud83d"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}',
    b'{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": ' + b"9" * 400 + b"}}",
    b'{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1e999}}',
    b'{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 99999999999999}}',
    b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
    b"[" * 200_000,
]


@pytest.mark.parametrize("event", ODD, ids=lambda event: event[:90].decode())
def test_whatever_a_server_streams_can_be_read_and_written_down(event):
    trace = read(b"data: " + event + b"\n\n", DONE)
    json.dumps({"text": trace.text, "problem": trace.problem}, ensure_ascii=False).encode()
    assert all(tokens < 1e10 for _, tokens in trace.curve)
    assert trace.problem is not None or trace.text == "\ufffd"
