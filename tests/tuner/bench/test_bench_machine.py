"""What else the machine did is read, kept with the block, and a window that was spoiled by it does not count."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import pytest
from bench_harness import QUICK, Server
from hypothesis import given
from hypothesis import strategies as st

from tuner.bench import machine
from tuner.bench.machine import Reading, between, parse_slowdowns, parse_stat


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_strangers_load_is_seen_and_ours_is_not() -> None:
    ours: list[float] = [0.0]
    first = machine.read(lambda: ours[0] + time.process_time())
    process = multiprocessing.get_context("fork").Process(target=burn, args=(1.0,))
    process.start()
    process.join()
    last = machine.read(lambda: ours[0] + time.process_time())
    as_stranger = between(first, last)
    ours[0] = 1.0
    as_ours = between(first, machine.read(lambda: ours[0] + time.process_time()))
    assert as_stranger.foreign is not None
    assert as_ours.foreign is not None
    assert as_stranger.foreign * len(os.sched_getaffinity(0)) > 0.3
    assert as_ours.foreign < as_stranger.foreign


def test_a_block_holds_the_load_of_strangers_where_the_servers_own_is_known(server: Server) -> None:
    unknown = server.measure().block
    known = server.measure(server_cpu_s=lambda: time.monotonic()).block  # a server that takes a whole core
    assert not {"foreign_load", "cpu_stolen"} & {gate.name for gate in unknown.gates}
    gates = {gate.name: gate for gate in known.gates}
    assert gates["foreign_load"].ok
    assert 0 <= gates["cpu_stolen"].value <= 1


def test_a_machine_that_is_nearly_all_somebody_elses_does_not_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([Reading(0, 4, 10.0, 0.0, 5.0, 1.0, 7), Reading(10**9, 4, 14.5, 0.0, 6.0, 1.5, 9)])
    monkeypatch.setattr("tuner.bench.machine.read", lambda _ours: next(readings))
    block = server.measure(server_cpu_s=lambda: 0.0).block
    gates = {gate.name: gate for gate in block.gates}
    assert (gates["foreign_load"].value, gates["foreign_load"].ok) == (0.875, False)
    assert (gates["cpu_throttled"].value, gates["cpu_throttled"].ok) == (0.5, False)
    assert not block.valid


def test_a_slowed_gpu_is_named(server: Server, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, 0x0000000000000004'\necho '1, 0x0000000000000060'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    block = server.measure(plan=replace(QUICK, window_s=1.0)).block
    gate = next(gate for gate in block.gates if gate.name == "gpu_slowed")
    assert gate.detail == "GPU 1: software thermal slowdown, hardware thermal slowdown"
    assert not gate.ok


def test_cores_that_we_may_not_use_are_not_counted() -> None:
    text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 100 50 0 0 0 25 0 0\ncpu1 500 0 0 0 0 0 0 0 0 0\nintr 5\n"
    ticks = os.sysconf("SC_CLK_TCK")
    assert parse_stat(text, {0}) == (200 / ticks, 25 / ticks)
    assert parse_stat("cpu0 7 0 0 0\n", {0}) == (7 / ticks, 0)  # an old kernel


@given(st.text())
def test_whatever_nvidia_smi_says_is_read_or_left(answer: str) -> None:
    assert isinstance(parse_slowdowns(answer), tuple)


def test_what_cannot_be_read_is_unknown() -> None:
    reading = Reading(5, 2, 1.0, 0.0, 0.5, None, None)
    assert between(None, reading).foreign is None
    assert between(reading, reading).foreign is None
    assert between(reading, replace(reading, at_ns=6)).throttled is None
