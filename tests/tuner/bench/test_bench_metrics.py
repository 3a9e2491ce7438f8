from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.bench.metrics import (
    NS,
    chunk_gaps_ms,
    degenerate,
    e2e_ms,
    mean_in_flight,
    percentiles,
    series,
    tokens_between,
    tokens_until,
    tpot_ms,
    ttft_ms,
)
from tuner.bench.trace import Trace


def trace(points, *, sent=0, end=None, problem=None, cut=False):
    """`points` are (seconds, cumulative tokens)."""
    curve = tuple((int(at * NS), float(count)) for at, count in points)
    last = curve[-1][0] if curve else 0
    return Trace(
        number=0,
        prompt_id="p",
        max_tokens=64,
        sent_ns=int(sent * NS),
        end_ns=last if end is None else int(end * NS),
        problem=problem,
        cut=cut,
        usage="continuous",
        tokens=int(points[-1][1]) if points else None,
        curve=curve,
        chunks=tuple(at for at, _ in curve),
        finish="stop",
        text="",
    )


def test_tokens_of_a_straddling_chunk_are_shared_in_proportion_to_time():
    one = trace([(1.0, 1), (2.0, 5), (3.0, 9)])
    assert tokens_until(one, int(0.5 * NS)) == 0
    assert tokens_until(one, int(1.5 * NS)) == 3
    assert tokens_until(one, 2 * NS) == 5
    assert tokens_until(one, 9 * NS) == 9
    assert tokens_between([one], int(1.5 * NS), int(2.25 * NS)) == pytest.approx(3.0)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 8)), min_size=1, max_size=30),
    st.lists(st.floats(0, 40), min_size=1, max_size=6),
)
def test_adjacent_windows_add_up_to_the_total(steps, cuts):
    at, count, points = 0.0, 0, []
    for gap, tokens in steps:
        at, count = at + gap / 100, count + tokens
        points.append((at, count))
    one = trace(points)
    edges = [0, *sorted(int(cut * NS) for cut in cuts), 100 * NS]
    parts = [tokens_between([one], a, b) for a, b in pairwise(edges) if a < b]
    assert sum(parts) == pytest.approx(count)
    assert all(part >= 0 for part in parts)


def test_failed_requests_give_no_tokens_and_cut_ones_do():
    whole, failed, cut = (
        trace([(1, 1), (2, 9)]),
        trace([(1, 1), (2, 9)], problem="truncated"),
        trace([(1, 1), (2, 9)], cut=True),
    )
    assert tokens_between([whole, failed, cut], 0, 3 * NS) == 18


def test_the_series_covers_whole_seconds():
    steady = trace([(i / 10, i) for i in range(1, 51)])
    assert series([steady], NS, int(3.7 * NS)) == pytest.approx((10.0, 10.0))


def test_times_are_what_their_names_say():
    one = trace([(1.5, 1), (2.0, 4), (3.5, 11)], sent=1.0, end=3.6)
    assert ttft_ms(one) == 500
    assert tpot_ms(one) == 200
    assert e2e_ms(one) == 2600
    assert chunk_gaps_ms([one], 0, 9 * NS) == [500, 1500]
    assert chunk_gaps_ms([one], 0, 3 * NS) == [500]
    assert tpot_ms(trace([(1.0, 1)])) is None
    assert ttft_ms(trace([])) is None


def test_achieved_concurrency_is_an_average_over_time():
    half = trace([(1, 1)], sent=0, end=1)
    full = trace([(1, 1)], sent=-1, end=5)
    assert mean_in_flight([half, full], 0, 2 * NS) == pytest.approx(1.5)


def test_p99_needs_a_hundred_requests():
    assert percentiles([float(i) for i in range(99)]).p99 is None
    many = percentiles([float(i) for i in range(101)])
    assert (many.n, many.p50, many.p90, many.p99) == (101, 50, 90, 99)
    assert percentiles([None, 4.0]).n == 1
    assert percentiles([]).mean is None


@pytest.mark.parametrize(
    "text",
    ["a" * 64, "a-" * 40, "ha ha " * 20, "\n" * 50, "0000000000 " * 8, "Answer: " + "!" * 200, "né\ufffd\ufffd\ufffd"],
)
def test_loops_and_garble_are_degenerate(text):
    assert degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "aaaaaaaaaaaa",
        "The harbour is quiet at noon, and the boats lie still. Later the wind comes up, and with it the sailors.",
        "I do not know. I do not know. I do not know. I do not know.",
        "def f(x):\n        if x:\n                return [\n                        0,\n                ]\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
        "A name was lost: M\ufffdller. Everything else in this long sentence is perfectly legible, thank you.",
    ],
)
def test_honest_text_is_not(text):
    assert not degenerate(text)
