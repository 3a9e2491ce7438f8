"""The toy study on an engine whose speculation can be changed while it runs, with one setting that cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.tuner.study.toy_study import Outcome, ToyEngine, ToyMachine, ToyServer, speed
from tuner.engines.base import Change, Mismatch, compare
from tuner.errors import LaunchFailed
from tuner.records import Failure, LaunchRecord

SPACE = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1, 8], max_tokens: 64}
baseline: {speculation: none, threads: 1}
parameters:
  speculation: {choices: [none, ngram]}
  num_steps: {low: 1, high: 4, when: speculation != 'none'}
  disable_batch_threshold: {choices: [never, 4], when: speculation != 'none'}
  threads: {choices: [1, 2]}
budget: {launches: 16, candidates: 40}
profile: short
"""

HOT = frozenset({"speculation", "num_steps", "disable_batch_threshold"})
START_S = 300.0
DEFAULTS = {"speculation": "none", "num_steps": 0, "disable_batch_threshold": "never"}


def hot_speed(settings: Mapping[str, Any], level: int) -> float:
    """Two threads are faster by a tenth, whatever else is set."""
    return speed(settings, level) * (1.1 if settings.get("threads") == 2 else 1.0)


class HotEngine(ToyEngine):
    hot = HOT

    def change(self, record: LaunchRecord) -> Change:
        return Change("/reconfigure", {**DEFAULTS, **{k: v for k, v in record.settings.items() if k in self.hot}})

    def mismatches(self, record: LaunchRecord, server_info: dict[str, Any]) -> list[Mismatch]:
        return compare(record.expected, server_info, all_told=True)


class HotServer(ToyServer):
    def __init__(self, machine: HotMachine, record: LaunchRecord) -> None:
        super().__init__(machine, record)
        self.in_force = {**DEFAULTS, **record.settings}
        self.changed = 0

    def server_info(self) -> dict[str, Any]:
        return {"effective": dict(self.in_force)}


@dataclass
class HotMachine(ToyMachine):
    """Launches are dear. `refuses(changes)`: why a change is answered with an error; `keeps`: settings that a change
    leaves as they were; `hot_fails(settings)`: how the server fails under load once its settings were changed;
    `hot_garbles(settings)`: whether its blocks are not valid then; `wear`: what each change costs it of its speed."""

    speed: Callable[[Mapping[str, Any], int], float] = hot_speed
    refuses: Callable[[Mapping[str, Any]], str | None] = lambda _changes: None
    keeps: frozenset[str] = frozenset()
    hot_fails: Callable[[Mapping[str, Any]], Failure | None] = lambda _settings: None
    hot_garbles: Callable[[Mapping[str, Any]], bool] = lambda _settings: False
    wear: float = 0.0
    changes: list[Mapping[str, Any]] = field(default_factory=list)
    turns: list[tuple[int, Mapping[str, Any], int]] = field(default_factory=list)
    """(number of starts so far, what is in force, level) of every block."""

    def start(self, record: LaunchRecord, **given: Any) -> HotServer:
        super().start(record, **given)
        if self.clock is not None:
            self.clock.now += START_S
        return HotServer(self, record)

    def reconfigure(self, server: HotServer, record: LaunchRecord, change: Change) -> None:
        self.changes.append(change.body)
        if why := self.refuses(change.body):
            raise LaunchFailed(Failure("reconfigure_failed", "bench", why, blame="environment"))
        server.changed += 1
        server.in_force |= {name: value for name, value in change.body.items() if name not in self.keeps}
        server.record = replace(record, port=server.record.port)

    def measure(self, server: Any, record: LaunchRecord, **given: Any) -> Outcome:
        if server.changed and (failure := self.hot_fails(record.settings)):
            return Outcome(None, failure)
        told = {name: value for name, value in record.settings.items() if name in HOT}
        assert server.in_force == {**server.in_force, **DEFAULTS, **told}, "measured with other settings than asked"
        self.turns.append((len(self.starts), dict(record.settings), given["concurrency"]))
        speed, valid = self.speed, self.valid
        self.speed = lambda settings, level: speed(settings, level) * (1 - self.wear) ** server.changed
        self.valid = lambda s, level, n: valid(s, level, n) and not (server.changed and self.hot_garbles(s))
        try:
            return super().measure(server, record, **given)
        finally:
            self.speed, self.valid = speed, valid
