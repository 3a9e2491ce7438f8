"""What `measure_block` promises, against a real server: the right number, or a named reason why there is none."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from bench_harness import PROMPTS, QUICK, TIMING, wall_to_monotonic

from tuner.bench.block import measure_block
from tuner.bench.plan import WindowPlan
from tuner.errors import UsageError
from tuner.records import Block, Failure


def failed(outcome):
    assert outcome.failure is None, outcome.failure
    return {gate.name for gate in outcome.block.gates if not gate.ok} - TIMING


def gate(outcome, name):
    return next(gate for gate in outcome.block.gates if gate.name == name)


def server_tokens(server, block):
    """What the server sent inside the block's window, by its own clock and count."""
    log = np.array(server.told()["log"], dtype=float)
    start = wall_to_monotonic(block.started_at)
    return np.diff(np.interp([start, start + block.window_s], log[:, 0] / 1e9, np.cumsum(log[:, 1])))[0]


@pytest.mark.parametrize("usage", ["continuous", "final"])
@pytest.mark.parametrize(("tokens_per_chunk", "concurrency"), [(1, 1), (1, 8), (4, 8)])
def test_tokens_in_the_window_agree_with_the_servers_own_count(server, usage, tokens_per_chunk, concurrency):
    outcome = server.measure(
        {"usage": usage, "tokens_per_chunk": tokens_per_chunk},
        concurrency=concurrency,
        max_tokens=64,
        plan=WindowPlan(ramp_s=0.1, warmup_s=0.3, steady_span_s=0.1, window_s=1.0, window_requests=1, tail_s=1.0),
    )
    assert failed(outcome) == set()
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.005)
    assert sum(outcome.block.series) == pytest.approx(outcome.block.tokens, rel=1e-9)
    assert server.told()["at_once"] == concurrency


def test_a_block_is_complete_and_survives_storage(server):
    block = server.measure({"tokens_per_chunk": 4}, concurrency=8, max_tokens=33).block
    assert Block.from_dict(block.to_dict()) == block
    assert block.tokens_per_s == pytest.approx(block.tokens / block.window_s)
    assert block.per_stream_tokens_per_s == pytest.approx(block.tokens_per_s / 8)
    assert block.mean_output_tokens == 33
    assert block.achieved_concurrency == pytest.approx(8, rel=0.02)
    assert block.requests > 8
    assert block.failed_requests == 0
    assert block.success_rate == 1
    # Nine chunks 5 ms apart carry 33 tokens: time per token is a quarter of the time per chunk.
    assert block.chunk_gap_ms.p50 == pytest.approx(5, abs=1.5)
    assert block.tpot_ms.p50 == pytest.approx(8 * 5 / 32, rel=0.25)
    assert block.e2e_ms.p50 == pytest.approx(9 * 5, rel=0.3)
    assert block.e2e_ms.n == block.requests
    assert block.ttft_ms.p50 < block.e2e_ms.p50
    assert block.accept_length is None


def test_streams_reuse_their_connections(server):
    outcome = server.measure(concurrency=8)
    assert outcome.block.requests > 16
    assert outcome.block.counters["connections"] == 8


def test_the_same_seed_sends_the_same_requests_whatever_the_servers_speed(server):
    asked = []
    for seed, spec in ((1, {}), (1, {"tokens_per_chunk": 4}), (2, {})):
        server.reset()
        server.measure(spec, seed=seed)
        bodies = server.told()["asked"][1:]
        asked.append({b["seed"]: (b["messages"][0]["content"], b["max_tokens"]) for b in bodies})
    slow, fast, other = asked
    common = slow.keys() & fast.keys()
    assert len(common) == min(len(slow), len(fast)) > 8
    assert all(slow[seed] == fast[seed] for seed in common)
    assert slow != other


def test_every_sampling_field_is_explicit_and_no_text_is_sent_twice(server):
    server.measure(temperature=0.7, ignore_eos=True)
    bodies = server.told()["asked"][1:]
    for body in bodies:
        assert (body["temperature"], body["top_p"], body["stream"], body["ignore_eos"]) == (0.7, 1, True, True)
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert isinstance(body["seed"], int)
    texts = [body["messages"][0]["content"] for body in bodies]
    assert len(texts) > len(PROMPTS)
    assert len(set(texts)) == len(texts)


def test_what_a_server_was_asked_before_is_not_asked_again_where_its_cache_stays(server):
    texts = []
    for earlier in (0, 1, 2):
        server.reset()
        server.measure(earlier=earlier)
        texts.append({body["messages"][0]["content"] for body in server.told()["asked"][1:]})
    first, second, third = texts
    assert not first & second | first & third | second & third
    assert {text.split("] ")[-1] for text in second} <= {prompt.text for prompt in PROMPTS}


def test_the_first_requests_of_the_streams_have_spread_lengths(server):
    server.measure(concurrency=4, max_tokens=16)
    assert sorted(body["max_tokens"] for body in server.told()["asked"][1:5]) == [4, 8, 12, 16]


def test_a_server_that_takes_no_continuous_usage_is_asked_without(server):
    outcome = server.measure({"fault": "no_continuous", "usage": "final"})
    assert failed(outcome) == set()
    assert server.told()["asked"][-1]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("fault", ["split", "role_first", "half_utf8", "crlf"])
def test_bytes_may_arrive_in_any_shape(server, fault):
    outcome = server.measure({"fault": fault, "tokens_per_chunk": 2})
    assert failed(outcome) <= {"degenerate_output"}
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)
    assert outcome.block.mean_output_tokens == 16


def test_half_a_character_is_called_garbled(server):
    assert "degenerate_output" in failed(server.measure({"fault": "half_utf8"}))


def test_tokens_that_the_server_made_and_we_did_not_get_invalidate(server):
    outcome = server.measure({"fault": "phantom"}, max_tokens=32)
    assert failed(outcome) == {"tokens_disagree"}
    assert gate(server.measure(max_tokens=32), "tokens_disagree").ok


def test_a_server_that_counts_its_output_twice_is_found_out_by_its_own_tokenizer(server):
    honest = gate(server.measure(), "tokens_recounted")
    assert (honest.value, honest.ok) == (0, True)
    twice = gate(server.measure({"fault": "counts_twice"}, max_tokens=64), "tokens_recounted")
    assert not twice.ok
    assert twice.value > 0.4


def test_without_usage_the_count_is_unknown_not_guessed(server):
    outcome = server.measure({"usage": "none"})
    assert {"no_usage", "no_tokens"} <= failed(outcome)
    assert outcome.block.tokens == 0
    assert "usage" in gate(outcome, "no_usage").detail


def test_refused_requests_lower_the_success_rate_and_invalidate(server):
    outcome = server.measure({"fault": "some_503"}, concurrency=5)
    assert "low_success_rate" in failed(outcome)
    assert 0.5 < gate(outcome, "low_success_rate").value < 0.95
    assert "HTTP 503" in gate(outcome, "low_success_rate").detail


def test_a_server_that_refuses_load_does_not_beat_one_that_serves_it(server):
    outcome = server.measure({"fault": "refuse_above", "limit": 4}, concurrency=8)
    assert {"low_success_rate", "low_concurrency"} <= failed(outcome)


def test_twice_the_tokens_asked_for_is_named(server):
    outcome = server.measure({"fault": "overrun"})
    assert "token_overrun" in failed(outcome)
    assert outcome.block.mean_output_tokens == 32
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)


@pytest.mark.parametrize("usage", ["continuous", "final"])
def test_answers_that_come_in_one_piece_give_the_right_rate(server, usage):
    """Nothing comes for a fifth of a second, then forty tokens at once."""
    outcome = server.measure(
        {"fault": "in_one", "usage": usage},
        concurrency=2,
        max_tokens=40,
        plan=replace(QUICK, warmup_s=0.5, window_s=1.3, window_cap_s=2.0),
    )
    assert failed(outcome) == set()
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)
    assert outcome.block.tpot_ms.n == 0
    assert outcome.block.ttft_ms.p50 == pytest.approx(outcome.block.e2e_ms.p50, rel=0.1)


def test_tool_calls_are_output_whose_tokens_count(server):
    outcome = server.measure({"fault": "tool_calls"})
    assert failed(outcome) == {"short_output"}  # no text to look at
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)


def test_usage_of_each_chunk_alone_is_no_count(server):
    outcome = server.measure({"fault": "chunk_usage", "tokens_per_chunk": 2}, max_tokens=32)
    assert "usage_undercounts" in failed(outcome)


@pytest.mark.parametrize(("fault", "words"), [("gzip", "gzip"), ("redirect", "307")])
def test_what_was_not_asked_for_is_a_named_failure(server, fault, words):
    outcome = server.measure({"fault": fault})
    assert outcome.block is None
    assert outcome.failure.kind == "bad_protocol"
    assert words in outcome.failure.message


def test_empty_one_token_answers_under_load_are_short_output(server):
    assert "short_output" in failed(server.measure({"fault": "short_above", "limit": 3}, concurrency=6))


def test_a_repetition_loop_is_degenerate_output(server):
    assert "degenerate_output" in failed(server.measure({"fault": "loop", "tokens_per_chunk": 8}))


@pytest.mark.parametrize("fault", ["truncate", "error_event", "abort", "backwards", "plain_body"])
def test_an_answer_that_ends_badly_never_counts(server, fault):
    outcome = server.measure({"fault": fault})
    assert outcome.block is None
    assert outcome.failure.kind in ("bad_protocol", "died_mid_bench")


def test_headers_and_then_nothing_is_no_success(server):
    outcome = server.measure({"fault": "headers_then_close"})
    assert outcome.block is None
    assert outcome.failure.kind == "died_mid_bench"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("always_500", "engine_dead_5xx", "draft_worker"),
        ("unknown_model", "bad_protocol", "no such model"),
        ("not_http", "bad_protocol", ""),
    ],
)
def test_what_the_server_said_is_kept_as_evidence(server, fault, kind, words):
    outcome = server.measure({"fault": fault})
    assert outcome.failure.kind == kind
    assert words in outcome.failure.evidence


def test_a_server_that_answers_200_with_an_error_is_not_hammered(server):
    outcome = server.measure({"fault": "hollow"}, concurrency=2, plan=replace(QUICK, warmup_cap_s=10.0))
    assert outcome.failure.kind == "bad_protocol"
    assert "200 without a completion" in outcome.failure.message
    assert "device-side assert" in outcome.failure.evidence
    # Seconds of nothing but failures, each of two streams waiting half a second in the end.
    assert len(server.told()["asked"]) < 60


def test_an_answer_without_an_end_is_cut_off(server):
    outcome = server.measure({"fault": "endless"}, concurrency=1)
    assert outcome.failure.kind == "bad_protocol"
    assert "longer than 8 MiB" in outcome.failure.message


def test_an_answer_may_end_with_its_connection(server):
    """Neither a length nor chunks, as in HTTP/1.0: the finish reason tells that the answer was whole."""
    outcome = server.measure({"fault": "until_close"})
    assert failed(outcome) == set()
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)


def test_a_connection_that_is_closed_behind_a_whole_answer_fails_no_request(server):
    outcome = server.measure({"fault": "closes_after", "length": 20})
    assert failed(outcome) == set()
    assert outcome.block.failed_requests == 0
    assert outcome.block.requests > 4
    assert outcome.block.tokens == pytest.approx(server_tokens(server, outcome.block), rel=0.02)


@pytest.mark.parametrize("pings", [False, True])
def test_silence_is_hung_decode_within_the_stall_limit(server, pings):
    begin = time.monotonic()
    plan = replace(QUICK, stall_s=1.0)
    outcome = server.measure({"fault": "hang", "after": 200, "pings": pings}, max_tokens=64, plan=plan)
    assert outcome.failure.kind == "hung_decode"
    assert outcome.block is None
    assert time.monotonic() - begin < plan.stall_s + 4


def test_nobody_there_is_a_failure_not_a_hang(own_server):
    own_server.stop()
    outcome = own_server.measure()
    assert outcome.failure.kind == "died_mid_bench"
    assert "nothing answers" in outcome.failure.message


def test_a_server_that_dies_in_the_window_ends_the_block_within_a_second(own_server):
    died: list[float] = []

    def poll() -> Failure | None:
        if own_server.process.poll() is None:
            return None
        died.append(time.monotonic())
        return Failure("died_mid_bench", "bench", "exit status 1", exit_status=1)

    kill = threading.Timer(1.0, own_server.process.kill)
    kill.start()
    outcome = own_server.measure(plan=WindowPlan(window_s=20, warmup_s=0.3, steady_span_s=0.1), server_failure=poll)
    assert outcome.failure == Failure("died_mid_bench", "bench", "exit status 1", exit_status=1)
    assert time.monotonic() - died[0] < 1.0


def test_a_death_that_nobody_watches_is_still_found(own_server):
    outcome = own_server.measure({"fault": "die", "after": 300}, plan=WindowPlan(warmup_s=0.3, steady_span_s=0.1))
    assert outcome.failure.kind == "died_mid_bench"


def test_progress_tells_every_phase(server):
    phases: list[str] = []
    server.measure(on_progress=lambda progress: phases.append(progress.phase))
    assert list(dict.fromkeys(phases)) == ["probe", "warm-up", "window", "tail"]


def test_an_error_in_the_callers_code_is_not_swallowed(server):
    def broken(_progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.measure(on_progress=broken)


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"max_tokens": 0}, {"prompts": []}])
def test_what_cannot_be_measured_is_refused(server, changes):
    with pytest.raises(UsageError):
        server.measure(**changes)
    assert server.told()["asked"] == []


def test_a_url_must_be_one():
    for url in ("ftp://x", "http://", "http://host:port"):
        with pytest.raises(UsageError, match="URL"):
            measure_block(
                url,
                model="m",
                prompts=PROMPTS,
                concurrency=1,
                role="screen",
                max_tokens=1,
                temperature=0,
                plan=QUICK,
                seed=0,
            )


def test_a_window_waits_for_a_server_that_still_warms_up(server):
    after = 500
    outcome = server.measure(
        {"fault": "warms_up", "after": after},
        concurrency=16,
        max_tokens=4,
        plan=replace(QUICK, warmup_s=0.6, steady_span_s=0.3, warmup_cap_s=8.0),
    )
    assert outcome.failure is None
    log = np.array(server.told()["log"], dtype=float)
    before = log[log[:, 0] / 1e9 < wall_to_monotonic(outcome.block.started_at)]
    assert before[:, 1].sum() > 0.8 * after, "the window began while it was still getting faster"


def test_a_server_that_garbles_what_it_has_not_seen_before_does_not_pass(server):
    """Every request is new to the server, in the second pass over the prompts too."""
    assert "degenerate_output" in failed(server.measure({"fault": "garble_cold"}))
