from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
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
from tuner.bench.summary import Recording, summarise
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


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3000),  # ms until its first request
            st.lists(st.tuples(st.integers(0, 400), st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.0, 4.0),
    st.floats(0.1, 4.0),
)
def test_the_tokens_of_any_window_are_those_that_were_made_in_it(streams, begin, length):
    """Each stream serves one request after another: a prompt, then chunks 50 ms apart, their tokens made evenly."""
    traces, made = [], []
    for start, requests in streams:
        at = start / 1000
        for prefill, chunk, chunks in requests:
            sent, points = at, []
            at += prefill / 1000
            made += [at + 0.05]  # the first token, then its chunk's other ones come with the next
            points.append((at + 0.05, 1))
            for i in range(chunks):
                first = at + 0.05 * (i + 1)
                made += [first + 0.05 * (j + 1) / chunk for j in range(chunk)]
                points.append((first + 0.05, 1 + chunk * (i + 1)))
            at = points[-1][0]
            traces.append(trace(points, sent=sent))
    end = begin + length
    found = tokens_between(traces, int(begin * NS), int(end * NS))
    truth = sum(begin < moment <= end for moment in made)
    # Half a token at each edge of each stream is the most that even production leaves open.
    assert abs(found - truth) <= 2 * len(streams) + 1e-6
    assert tokens_between(traces, 0, 10**12) == pytest.approx(len(made))


def recording(streams=4, step_s=0.05, chunk=3, window=(4.0, 12.0), **changes):
    """A closed loop of `streams`, 61 tokens a request: a ramp, a window, a drain in which streams end one by one."""
    traces = []
    for stream in range(streams):
        at = 0.5 * stream
        for number in range(100):
            points = [(at + 0.2 + step_s * i, 1 + chunk * i) for i in range(21)]
            traces.append(
                replace(
                    trace(points, sent=at),
                    number=100 * stream + number,
                    max_tokens=61,
                    text="one two three",
                    prompt_tokens=10,
                )
            )
            at = points[-1][0]
            if at > 13 + stream:
                break
    start, end = (int(edge * NS) for edge in window)
    given = {
        "concurrency": streams,
        "max_tokens": 61,
        "traces": tuple(traces),
        "started_at": 0.0,
        "start_ns": start,
        "end_ns": end,
        "warmup_s": 4.0,
        "warm": True,
        "warm_detail": "",
        "client_cpu_s": 0.1,
        "process_cpu_s": 0.1,
        "server_is_local": True,
        "turnaround_s": 0.0,
        "lags_s": (),
        "edge_lag_s": 0.0,
        "connections": streams,
        "before": None,
        "after": None,
    }
    return Recording(**{**given, **changes})


def test_ramp_and_drain_are_in_no_denominator():
    """61 tokens every 1.2 s on each of four streams, whatever happens before and behind the window."""
    block, _ = summarise(recording(window=(4.0, 10.0)), "screen")
    assert block.valid, [gate for gate in block.gates if not gate.ok]
    assert block.tokens_per_s == pytest.approx(4 * 61 / 1.2, rel=1e-6)
    assert block.achieved_concurrency == pytest.approx(4)
    assert block.mean_output_tokens == 61
    early, _ = summarise(recording(window=(0.0, 4.8)), "screen")
    assert "low_concurrency" in {gate.name for gate in early.gates if not gate.ok}


@given(st.integers(1, 6), st.integers(1, 8), st.floats(3.0, 8.0), st.floats(1.2, 4.0))
@settings(deadline=None)
def test_the_rate_of_a_window_is_exact_where_the_server_is_even(streams, chunk, begin, length):
    """Within what a token and a prompt at its edges leave open."""
    block, _ = summarise(recording(streams, chunk=chunk, window=(begin, begin + length)), "screen")
    each = 1 + 20 * chunk
    assert block.tokens == pytest.approx(streams * each * length / 1.2, abs=streams * (0.2 * each / 1.2 + 1) + 1e-6)


def test_a_failure_behind_the_window_takes_its_tokens_out_of_it_and_is_counted():
    seen = recording(window=(4.0, 10.0))
    broken = tuple(
        replace(one, problem="truncated") if one.sent_ns < seen.end_ns < one.end_ns else one for one in seen.traces
    )
    block, _ = summarise(replace(seen, traces=broken), "screen")
    assert block.failed_requests == 4
    assert "low_success_rate" in {gate.name for gate in block.gates if not gate.ok}


def test_what_was_silent_since_the_windows_end_is_missed_and_said_so():
    """Chunks two seconds apart, and a load that stopped before the next one came."""
    seen = recording(step_s=2.0, chunk=3, window=(30.0, 39.0))

    def unheard(traces):
        block, _ = summarise(replace(seen, traces=tuple(traces)), "screen")
        return next(gate for gate in block.gates if gate.name == "unheard_at_end")

    def stopped(one):
        kept = tuple(point for point in one.curve if point[0] < seen.end_ns)
        told = {"curve": kept, "chunks": tuple(at for at, _ in kept), "tokens": int(kept[-1][1])}
        return replace(one, cut=True, end_ns=seen.end_ns + NS, **told)

    missed = unheard(stopped(one) if one.sent_ns < seen.end_ns < one.end_ns else one for one in seen.traces)
    assert not missed.ok
    assert 0.01 < missed.value < 0.5
    assert unheard(seen.traces).value == 0


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
    assert tpot_ms(trace([(1.0, 40)])) is None  # all at once: nothing tells the time of one
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
