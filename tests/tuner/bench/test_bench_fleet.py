"""A load that one process cannot take is sent by several, and nothing else about a block changes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from bench_harness import PROMPTS, QUICK, Server

from tuner.bench.client import LoadClient, Target
from tuner.bench.fleet import Fleet, processes_needed
from tuner.bench.requests import Sampling, request_sequence
from tuner.records import Block

PLAN = replace(QUICK, warmup_s=0.5, window_s=1.0)


def loaders() -> list[int]:
    """Pids of this process's children that load."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"tuner.bench.fleet_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def measure_with(server: Server, ceiling: float, **changes: object) -> Block:
    outcome = server.measure(
        {"usage": "continuous"}, concurrency=6, max_tokens=40, plan=PLAN, ceiling_events_per_s=ceiling, **changes
    )
    assert outcome.failure is None, outcome.failure
    return outcome.block


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.bench.fleet.usable_cores", lambda: 2)


def test_above_a_third_of_its_ceiling_a_second_process_shares_the_load(server: Server, two_cores: None) -> None:
    alone = measure_with(server, 1e9)
    shared = measure_with(server, 100.0)
    assert (alone.counters["client_processes"], shared.counters["client_processes"]) == (1, 2)
    assert shared.counters["client_ceiling_events_per_s"] == 200.0
    assert shared.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.1)
    assert shared.achieved_concurrency == pytest.approx(6, rel=0.05)
    assert shared.failed_requests == 0
    assert shared.counters["client_cpu_s"] > 0
    assert not next(gate.ok for gate in shared.gates if gate.name == "client_ceiling")  # two cannot take it either
    assert loaders() == []


async def requests_of(client: LoadClient | Fleet, count: int) -> dict[int, tuple[str, int, int]]:
    client.start(0.0)
    end = time.monotonic() + 20
    while len([e for e in client.finished if e.answered]) < count:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    await client.close()
    return {e.number: (e.prompt_id, e.max_tokens, len(e.body()) > 0) for e in client.finished if e.answered}


def test_the_requests_are_the_same_as_from_one_process(server: Server) -> None:
    target, sampling = Target.parse(server.url), Sampling("null", 8, 0.0)
    common = {"concurrency": 5, "seed": 3, "api_key": None}

    async def both() -> tuple[dict[int, tuple[str, int, int]], dict[int, tuple[str, int, int]]]:
        one = LoadClient(target, 5, request_sequence(target, sampling, PROMPTS, **common))
        fleet = await Fleet.begin(target, sampling, PROMPTS, processes=3, **common)
        return await requests_of(one, 15), await requests_of(fleet, 15)

    one, several = asyncio.run(both())
    assert set(range(5)) <= set(one) & set(several)
    assert all(one[number] == several[number] for number in set(one) & set(several))


def test_a_process_that_is_killed_ends_the_block_and_is_not_held_against_the_candidate(
    server: Server, two_cores: None
) -> None:
    def kill_one(_progress: object) -> None:
        for pid in loaders()[:1]:
            os.kill(pid, signal.SIGKILL)

    outcome = server.measure(
        {"usage": "continuous"},
        concurrency=4,
        max_tokens=40,
        plan=replace(PLAN, window_s=5.0),
        ceiling_events_per_s=100.0,
        on_progress=kill_one,
    )
    assert outcome.block is None
    assert (outcome.failure.kind, outcome.failure.blame) == ("transient_env", "environment")
    assert "ended by itself" in outcome.failure.message or "not ready" in outcome.failure.message
    assert loaders() == []


def test_a_process_whose_parent_is_gone_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tuner.bench.fleet_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("rate", "ceiling", "needed"), [(100, None, 1), (100, 400, 1), (150, 400, 2), (950, 400, 10), (10**6, 400, 16)]
)
def test_so_many_processes_as_keep_each_well_below_a_third(monkeypatch, rate, ceiling, needed) -> None:
    monkeypatch.setattr("tuner.bench.fleet.usable_cores", lambda: 16)
    assert processes_needed(rate, ceiling) == needed
