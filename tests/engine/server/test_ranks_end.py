"""A model over several processes: whichever of them ends or hangs, all end, with the cause as the last thing said."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import httpx
import pytest
from test_process_ends import Stream, _gone

from tests.engine.conftest import tiny_llama


@pytest.fixture(scope="module")
def model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's heads, the toy's tokenizer, and a context long enough to be interrupted in."""
    folder = tiny_llama(
        tmp_path_factory.mktemp("ranks"),
        vocab_size=300,
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=20_000,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(toy_model / name, folder / name)
    return folder


@pytest.fixture
def begin(start: Callable, model: Path) -> Callable:
    def run(tp: int = 2, **more: object):
        settings = {"model": str(model), "dtype": "float32", "threads": 1, "tp": tp, "collective_timeout_s": 3}
        server = start("real", **{**settings, **more})
        server.wait_for(r"listening on", 60)  # every rank loads torch
        log = server.log.read_text()
        server.ranks = [int(re.search(r"rank 0 is process (\d+)", log)[1])]
        server.ranks += [int(re.search(rf"rank {rank} process (\d+)", log)[1]) for rank in range(1, tp)]
        return server

    return run


def all_end(server, cause: str, streams: list[Stream] = ()) -> None:
    assert server.end() == 1
    assert re.search(cause, server.lines()[-1]), server.log.read_text()
    assert "CRITICAL" in server.lines()[-1]
    for stream in streams:
        _, body = stream.result()
        assert "[DONE]" not in body
        assert re.search(cause, body.split("data: ")[-1])
    end = time.monotonic() + 5
    while not all(map(_gone, server.ranks)):
        assert time.monotonic() < end, "a rank is left"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_at_any_time_takes_the_server_down(begin, name: str, victim: int, seed: int) -> None:
    server = begin(3, allreduce=name)
    streams = [Stream(server.url, True, 19_000) for _ in range(2)]
    time.sleep(random.Random(f"{name}{victim}{seed}").random() * 0.5)
    os.kill(server.ranks[victim], signal.SIGKILL)
    who = f"rank {victim} of 3 .process {server.ranks[victim]}. was" if victim else "model process"
    all_end(server, f"{who} ended by signal 9 .SIGKILL", streams)


def test_a_rank_killed_in_mid_flight_takes_the_server_down(begin) -> None:
    server = begin()
    stream = Stream(server.url, True, 19_000)
    os.kill(server.ranks[1], signal.SIGKILL)
    all_end(server, rf"rank 1 of 2 \(process {server.ranks[1]}\) was ended by signal 9", [stream])


def test_a_rank_killed_while_nothing_runs_takes_the_server_down(begin) -> None:
    idle = begin()
    assert httpx.get(f"{idle.url}/server_info").json()["parallel"]["allreduce"] == "shm"
    os.kill(idle.ranks[1], signal.SIGKILL)
    all_end(idle, r"rank 1 of 2 .* was ended by signal 9")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("delay", [0.0, 0.7, 2.0])
def test_a_rank_killed_while_the_others_start_takes_the_server_down(
    start, model: Path, name: str, delay: float
) -> None:
    server = start("real", model=str(model), dtype="float32", threads=1, tp=2, allreduce=name)
    pids = server.wait_for(r"rank 0 is process (\d+), rank 1 process (\d+)", 60)
    server.ranks = [int(pids[1]), int(pids[2])]
    time.sleep(delay)
    os.kill(server.ranks[1], signal.SIGKILL)
    all_end(server, "rank 1 of 2 .* was ended by signal 9")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_named_within_the_timeout(begin, victim: int) -> None:
    server = begin()
    stream = Stream(server.url, True, 19_000)
    began = time.monotonic()
    os.kill(server.ranks[victim], signal.SIGSTOP)
    cause = (
        r"rank 0 hangs: .*rank 0 (did not arrive|has not begun a round)"
        if victim == 0
        else r"all_reduce.*rank 1 did not arrive within 3 s"
    )
    all_end(server, cause, [stream])
    assert time.monotonic() - began < 12


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_a_rank_that_is_stopped_while_the_others_start_is_named(start, model: Path, victim: int, delay: float) -> None:
    server = start("real", model=str(model), dtype="float32", threads=1, tp=2, collective_timeout_s=2)
    pids = server.wait_for(r"rank 0 is process (\d+), rank 1 process (\d+)", 60)
    server.ranks = [int(pids[1]), int(pids[2])]
    time.sleep(delay)
    os.kill(server.ranks[victim], signal.SIGSTOP)
    who = r"rank 0 hangs: it" if victim == 0 else "rank 1 of 2"
    all_end(server, rf"{who} .process {server.ranks[victim]}. has been stopped for 8 s")


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_nothing_runs_takes_the_server_down(begin) -> None:
    server = begin()
    os.kill(server.ranks[1], signal.SIGSTOP)
    all_end(server, rf"rank 1 of 2 .process {server.ranks[1]}. has been stopped for 9 s")


def test_the_server_killed_leaves_no_rank(begin) -> None:
    server = begin(3)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    end = time.monotonic() + 5
    while not all(map(_gone, server.ranks)):
        assert time.monotonic() < end, "a rank is left"
        time.sleep(0.02)


def test_a_server_told_to_end_ends_all_ranks_and_status_0(begin) -> None:
    server = begin()
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()["usage"]["completion_tokens"] == 8
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'engine_collective_calls_total\{backend="shm",op="all_reduce"\} [1-9]', metrics)
    server.process.terminate()
    assert server.end() == 0
    assert all(map(_gone, server.ranks))


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"tp": 4}, "tp: 4 ranks, but the model has 3 KV heads.*valid: 1 to 3"),
        ({"tp": 2, "allreduce": "nccl"}, "allreduce: 'nccl' cannot run here.*what can: shm, gloo"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(start, model: Path, settings: dict, cause: str) -> None:
    server = start("real", model=str(model), dtype="float32", threads=1, **settings)
    assert server.end() == 2
    assert re.search(cause, server.lines()[-1]), server.log.read_text()
