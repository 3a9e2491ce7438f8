"""A misbehaving server in its own process, and the plan by which the tests measure it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tuner.bench.block import BlockOutcome, measure_block
from tuner.bench.plan import WindowPlan
from tuner.bench.prompts import Prompt

SERVER = Path(__file__).parent / "faulty_server.py"
PROMPTS = [Prompt(f"p{i}", ("chat", "code")[i % 2], f"question number {i}") for i in range(20)]
QUICK = WindowPlan(
    ramp_s=0.05,
    warmup_s=0.25,
    warmup_cap_s=3.0,
    steady_span_s=0.1,
    window_s=0.4,
    window_cap_s=3.0,
    tail_s=1.0,
    stall_s=5.0,  # a shared machine stands still for a second now and then
)
TIMING = {"loop_lag", "slow_turnaround", "client_steals_cpu", "client_bound"}
"""Gates about the machine: on one that also runs other tests, they may fail, and rightly."""


class Server:
    def __init__(self) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/log").json()
        return told

    def reset(self) -> None:
        httpx.get(f"{self.url}/reset")

    def measure(self, spec: dict[str, Any] | None = None, **changes: Any) -> BlockOutcome:
        given: dict[str, Any] = {
            "model": json.dumps(spec) if spec else "null",
            "prompts": PROMPTS,
            "concurrency": 4,
            "role": "screen",
            "max_tokens": 16,
            "temperature": 0.0,
            "plan": QUICK,
            "seed": 1,
        }
        return measure_block(self.url, **{**given, **changes})

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wall_to_monotonic(at: float) -> float:
    return at - (time.time() - time.monotonic())
