"""A machine whose speed is a function of the candidate: everything a study touches, without processes or time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import LaunchFailed
from tuner.records import Block, Failure, Gate, LaunchRecord, Percentiles
from tuner.space import Space, parse_space
from tuner.study.controller import Controller
from tuner.study.data import Budget
from tuner.study.policy import POLICIES, Policy
from tuner.study.store import StudyStore, create_study, open_study, study_exists

SPACE = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1, 8], max_tokens: 64}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram]}
  num_steps: {low: 1, high: 4, when: speculation != 'none'}
  disable_batch_threshold: {choices: [never, 4], when: speculation != 'none'}
rules:
  - {forbid: num_steps == 4 and disable_batch_threshold == 4, because: the toy forbids it}
budget: {launches: 14, candidates: 40}
profile: short
"""


def speed(settings: Mapping[str, Any], level: int) -> float:
    """Tokens per second: three steps are best, and speculation does not pay at eight streams."""
    base = 100.0 * level**0.7
    if settings.get("speculation", "none") == "none":
        return base
    steps = settings["num_steps"]
    if level > 4 and settings.get("disable_batch_threshold") == 4:
        return base * 0.999
    gain = {1: 1.1, 2: 1.25, 3: 1.4, 4: 1.2}[steps]
    return base * (gain if level == 1 else 1 - 0.03 * steps)


def block(
    level: int,
    role: str,
    rate: float,
    *,
    valid: bool = True,
    gate: str = "degenerate_output",
    ttft_p90: float = 50.0,
    now: float = 0.0,
) -> Block:
    latencies = Percentiles(64, 40.0, 40.0, ttft_p90, None)
    token_ms = 1000.0 * level / rate if rate else None
    return Block(
        concurrency=level,
        role=role,  # type: ignore[arg-type]
        prompt_ids=("a", "b"),
        started_at=now,
        warmup_s=1.0,
        window_s=10.0,
        tokens=rate * 10,
        tokens_per_s=rate,
        per_stream_tokens_per_s=rate / level,
        requests=64,
        failed_requests=0,
        mean_output_tokens=60.0,
        achieved_concurrency=float(level),
        ttft_ms=latencies,
        tpot_ms=Percentiles(64, token_ms, token_ms, token_ms, None),
        chunk_gap_ms=latencies,
        e2e_ms=latencies,
        accept_length=1.0,
        gates=(Gate(gate, 0.1, 0.5, valid),),
        series=(rate,) * 10,
    )


@dataclass(frozen=True)
class Mismatch:
    setting: str
    requested: Any
    effective: Any
    reason: str = ""


class ToyEngine:
    """Knows no settings of its own; what is illegal and what is not in effect are given."""

    def __init__(
        self,
        problems: Callable[[Mapping[str, Any]], list[str]] = lambda _settings: [],
        mismatches: Callable[[Mapping[str, Any]], list[Mismatch]] = lambda _settings: [],
    ) -> None:
        self._problems = problems
        self._mismatches = mismatches

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
        return self._problems(settings)

    def record(
        self,
        *,
        model: str,
        args: Mapping[str, Any],
        env: Mapping[str, str | None],
        settings: Mapping[str, Any],
        host: str,
        port: int,
    ) -> LaunchRecord:
        argv = ("toy", *(f"--{name}={value}" for name, value in settings.items()))
        return LaunchRecord("fake", "1", model, argv, dict(env), host, port, dict(settings), dict(settings), model)

    def mismatches(self, record: LaunchRecord, server_info: dict[str, Any]) -> list[Mismatch]:
        return self._mismatches(record.settings)


@dataclass(frozen=True)
class Report:
    exit_status: int | None = 0
    escalated: bool = False
    unclean: tuple[str, ...] = ()
    segments_unclaimed: tuple[str, ...] = ()


class ToyServer:
    def __init__(self, machine: ToyMachine, record: LaunchRecord) -> None:
        self.machine = machine
        self.record = record
        self.pid = 4242

    def wait_ready(self) -> None:
        self.machine.call("ready", self.record)

    def smoke(self) -> None:
        self.machine.call("smoke", self.record)

    def server_info(self) -> dict[str, Any] | None:
        return {"effective": dict(self.record.settings)}

    def failure(self, *, wait_s: float = 0.0) -> Failure | None:
        return None

    def cpu_s(self) -> float:
        return 0.0

    def stop(self) -> Report:
        self.machine.running.discard(self.record.port)
        return self.machine.report


@dataclass
class Outcome:
    block: Block | None
    failure: Failure | None = None


@dataclass
class ToyMachine:
    """Counts what is done to it. `fails(phase, settings, count)` may return a failure; `count` is of that launch."""

    speed: Callable[[Mapping[str, Any], int], float] = speed
    fails: Callable[[str, Mapping[str, Any], int], Failure | None] = lambda _phase, _settings, _count: None
    valid: Callable[[Mapping[str, Any], int, int], bool] = lambda _settings, _level, _count: True
    gate: str = "degenerate_output"
    starts: list[Mapping[str, Any]] = field(default_factory=list)
    measured: list[tuple[str, int, str, int]] = field(default_factory=list)
    reaped: list[Mapping[str, str]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    report: Report = Report()
    """How every server ends."""
    settles: Callable[[], tuple[str, ...]] = tuple
    """What is still left of one whose stop was unclean."""
    others: tuple[str, ...] = ()
    clock: Any = None
    block_s: float = 10.0
    first_start_s: float = 0.0
    """What the first start takes, into a cold cache."""

    def free_port(self) -> int:
        return 30000 + len(self.starts)

    def call(self, phase: str, record: LaunchRecord) -> None:
        if failure := self.fails(phase, record.settings, len(self.starts)):
            raise LaunchFailed(failure)

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> ToyServer:
        assert not self.running, "two servers at once"
        self.starts.append(record.settings)
        self.call("start", record)
        if isinstance(self.clock, Clock) and len(self.starts) == 1:
            self.clock.now += self.first_start_s
        self.running.add(record.port)
        return ToyServer(self, record)

    def measure(
        self,
        server: ToyServer,
        record: LaunchRecord,
        *,
        concurrency: int,
        role: str,
        seed: int,
        on_progress: Callable[[Any], None],
        share: float = 1.0,
    ) -> Outcome:
        if failure := self.fails(f"bench{concurrency}", record.settings, len(self.starts)):
            return Outcome(None, failure)
        if isinstance(self.clock, Clock):
            self.clock.now += self.block_s
        self.measured.append((str(sorted(record.settings.items())), concurrency, role, seed))
        count = sum(each[:3] == self.measured[-1][:3] for each in self.measured)
        # A little noise, the same for the same request seed and candidate: what is measured is a pure function.
        noise = 1 + 0.001 * math.sin(seed % 1000 + len(record.settings))
        rate = self.speed(record.settings, concurrency) * noise
        valid = self.valid(record.settings, concurrency, count)
        return Outcome(block(concurrency, role, rate, valid=valid, gate=self.gate))

    def keep_requests(self, outcome: Outcome, path: Path) -> None:
        assert path.name.startswith("block-")

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        self.reaped.append(dict(marker))
        self.running.clear()
        return []

    def remaining(self, marker: Mapping[str, str]) -> list[int | str]:
        return []

    def settle(self, report: Report) -> tuple[str, ...]:
        return self.settles()

    def neighbours(self) -> list[str]:
        return list(self.others)


def space(text: str = SPACE, *overrides: str) -> Space:
    return parse_space(text, source="toy.yaml", overrides=overrides)


class Clock:
    """Stands still unless a block is measured."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def study(folder: Path, the_space: Space | None = None, name: str = "toy") -> StudyStore:
    """The toy study in `folder`, created or opened."""
    url = f"sqlite:///{folder / 'study.db'}"
    the_space = the_space or space()
    if study_exists(name, url):
        return open_study(name, url, Clock())
    budget = Budget(**the_space.budget.model_dump())
    return create_study(
        name, space=the_space, space_text="", fingerprint={}, seed=7, budget=budget, storage=url, clock=Clock()
    )


def controller(
    store: Any,
    machine: Any,
    engine: Any = None,
    *,
    policy: Policy = POLICIES["short"],
    folder: Path | None = None,
    **more: Any,
) -> Controller:
    machine.clock = getattr(store, "clock", None)
    folder = folder or Path(store.engine.url.database).parent
    return Controller(store, engine or ToyEngine(), machine, policy=policy, folder=folder, **more)
