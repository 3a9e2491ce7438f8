from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.bench.gates import gates
from tuner.bench.open_loop import arrivals, run_open_loop
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
    from dataclasses import replace

    from tests.tuner.bench.test_bench_gates import GOOD

    def gate(events: float, ceiling: float | None) -> bool | None:
        found = gates(replace(GOOD, events_per_s=events, ceiling_events_per_s=ceiling))
        return next((each.ok for each in found if each.name == "client_ceiling"), None)

    assert gate(9_999.0, 30_000.0) is True
    assert gate(10_100.0, 30_000.0) is False
    assert gate(10_100.0, None) is None
