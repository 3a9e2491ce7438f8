from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_harness import QUICK, Server

from tuner.bench import open_loop
from tuner.bench.client import Target
from tuner.bench.gates import AnswerFaults, gates, open_gates
from tuner.bench.open_loop import OpenRun, arrivals, run_open_loop
from tuner.bench.prompts import Prompt
from tuner.bench.selftest import client_ceiling
from tuner.errors import UsageError

PROMPTS = [Prompt(f"p{i}", "chat", f"question {i}") for i in range(5)]


def test_arrivals_are_poisson_and_a_function_of_the_seed() -> None:
    times = arrivals(50.0, 200.0, 3)
    assert times == arrivals(50.0, 200.0, 3) != arrivals(50.0, 200.0, 4)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)  # exponential gaps


@pytest.fixture(scope="module")
def slow_server() -> Iterator[str]:
    """Answers in 20 tokens of 20 ms, after 200 ms of prompt."""
    options = json.dumps({"step_s": 0.02, "prefill_s": 0.2, "length": 20})
    argv = [sys.executable, "-m", "tuner.bench.null_server", options]
    root = Path(__file__).parents[3]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.stdin.close()


def test_an_open_loop_sends_what_was_drawn_and_counts_from_the_arrival(slow_server: str) -> None:
    found = run_open_loop(
        slow_server,
        model="null",
        prompts=PROMPTS,
        rate=20.0,
        seconds=2.0,
        warmup_s=0.5,
        max_tokens=20,
        temperature=0.0,
        seed=1,
    )
    assert found.failed == 0
    assert found.requests == sum(at >= 0.5 for at in arrivals(20.0, 2.5, 1))
    assert found.ttft_ms.p50 is not None
    assert found.e2e_ms.p50 is not None
    assert found.ttft_ms.p50 >= 200
    assert found.e2e_ms.p50 >= 200 + 19 * 20 * 0.9
    assert found.e2e_ms.p99 is None  # under 100 requests
    # Little's law: what is under way is the rate times how long a request takes.
    assert found.in_flight == pytest.approx(20.0 * found.e2e_ms.mean / 1000, rel=0.35)


def loop(url: str, **changes: Any) -> OpenRun:
    given: dict[str, Any] = {
        "model": "null",
        "prompts": PROMPTS,
        "rate": 20.0,
        "seconds": 1.0,
        "warmup_s": 0.0,
        "max_tokens": 16,
        "temperature": 0.0,
        "seed": 1,
    }
    return run_open_loop(url, **{**given, **changes})


def test_a_stall_is_in_the_latencies_of_all_who_would_have_asked_meanwhile(server: Server) -> None:
    """A closed loop asks no more while a server stands still, and so shows a handful of slow requests at most."""
    stall = {"fault": "stall_once", "after": 200, "for_s": 1.0, "length": 4}
    found = loop(server.url, model=json.dumps(stall), rate=60.0, seconds=3.0)
    assert found.failed == 0
    # Sixty would have come in that second; half of them waited for more than half of it.
    assert found.e2e_ms.p90 is not None
    assert found.e2e_ms.p90 > 400
    assert found.e2e_ms.p50 is not None
    assert found.e2e_ms.p50 < 300
    server.reset()
    block = server.measure(stall, concurrency=2, plan=replace(QUICK, window_s=3.0, window_cap_s=3.0, stall_s=5.0)).block
    assert block.requests > 30
    assert block.e2e_ms.p90 < 300


def test_a_late_client_is_in_its_latencies_and_invalid(slow_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send = open_loop._send

    async def late(target: Target, times: Sequence[float], source: Iterator[Any]) -> Any:
        """Arrivals of a second sooner than they are sent."""
        began_ns, sent = await send(target, times, source)
        return began_ns - 10**9, [replace(one, intended_ns=one.intended_ns - 10**9) for one in sent]

    usual = loop(slow_server, rate=10.0)
    monkeypatch.setattr(open_loop, "_send", late)
    delayed = loop(slow_server, rate=10.0, warmup_s=0.0)
    failed = {gate.name for gate in delayed.gates if not gate.ok}
    assert "client_late" in failed
    assert usual.ttft_ms.p50 is not None
    assert delayed.ttft_ms.p50 is not None
    assert delayed.ttft_ms.p50 > usual.ttft_ms.p50 + 800


@pytest.mark.parametrize(
    ("spec", "gate"),
    [
        ({"usage": "none"}, "no_usage"),
        ({"usage": "none"}, "no_tokens"),
        ({"fault": "overrun"}, "token_overrun"),
        ({"fault": "loop", "tokens_per_chunk": 8}, "degenerate_output"),
        ({"fault": "chunk_usage"}, "usage_undercounts"),
        ({"fault": "some_503"}, "low_success_rate"),
        ({"fault": "truncate"}, "low_success_rate"),
    ],
)
def test_an_open_loop_has_the_gates_of_a_closed_one(server: Server, spec: dict[str, Any], gate: str) -> None:
    found = loop(server.url, model=json.dumps(spec))
    assert not found.valid
    assert gate in {each.name for each in found.gates if not each.ok}


def test_each_gate_of_an_open_loop_lets_its_limit_pass_and_nothing_beyond() -> None:
    fine = AnswerFaults(unknown_tokens=0, usage_detail="", overrun_tokens=1, short_outputs=5, degenerate_outputs=20)
    given: dict[str, Any] = {"late_s": 0.01, "requests": 100, "failed": 1, "tokens": 1.0, "faults": fine}

    def failed(**changes: Any) -> set[str]:
        return {gate.name for gate in open_gates(**{**given, **changes}) if not gate.ok}

    assert failed() == set()
    assert failed(late_s=0.0101) == {"client_late"}
    assert failed(failed=2) == {"low_success_rate"}
    assert failed(tokens=0.0) == {"no_tokens"}
    for name, changes in {
        "no_usage": {"unknown_tokens": 1},
        "token_overrun": {"overrun_tokens": 2},
        "short_output": {"short_outputs": 6},
        "degenerate_output": {"degenerate_outputs": 21},
        "usage_undercounts": {"undercounted": 2},
    }.items():
        assert failed(faults=replace(fine, **changes)) == {name}


def test_nobody_at_home_is_a_failed_run_with_the_cause() -> None:
    found = run_open_loop(
        "http://127.0.0.1:9",
        model="null",
        prompts=PROMPTS,
        rate=20.0,
        seconds=0.3,
        warmup_s=0.0,
        max_tokens=4,
        temperature=0.0,
        seed=1,
    )
    assert not found.valid
    assert "no connection" in found.failure


def test_senseless_rates_are_refused() -> None:
    for rate, seconds in ((0.0, 1.0), (1.0, 0.0), (1e9, 1e9)):
        with pytest.raises(UsageError):
            run_open_loop(
                "http://127.0.0.1:9",
                model="m",
                prompts=PROMPTS,
                rate=rate,
                seconds=seconds,
                warmup_s=0.0,
                max_tokens=4,
                temperature=0.0,
                seed=1,
            )


def test_the_client_states_its_ceiling() -> None:
    assert client_ceiling() > 5_000  # 200 µs an event: a tenth of what a slow machine does
    assert client_ceiling() == client_ceiling()


def test_a_block_near_the_clients_ceiling_is_refused() -> None:
    from tests.tuner.bench.test_bench_gates import GOOD

    def gate(events: float, ceiling: float | None) -> bool | None:
        found = gates(replace(GOOD, events_per_s=events, ceiling_events_per_s=ceiling))
        return next((each.ok for each in found if each.name == "client_ceiling"), None)

    assert gate(9_999.0, 30_000.0) is True
    assert gate(10_100.0, 30_000.0) is False
    assert gate(10_100.0, None) is None
