"""A study of real servers whose settings are changed while they run, each change with one fault.

Whoever measures asks the server for its true settings, and is only told by those how fast it is: a block that was
measured with other settings than its candidate's shows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.tuner.study.toy_study import Outcome, ToyMachine, controller, space, study
from tuner.bench.counters import delta, parse_snapshot
from tuner.engines.base import Change, Mismatch, compare
from tuner.engines.command import CommandEngine
from tuner.launch import ports
from tuner.launch.processes import marker_text
from tuner.launch.reap import marked, reap
from tuner.launch.server import LaunchLimits, Server
from tuner.records import Failure, LaunchRecord
from tuner.study.controller import Controller
from tuner.study.policy import Policy
from tuner.study.store import StudyStore
from tuner.study.world import Machine

QUICK = LaunchLimits(stall_s=3.0, startup_s=20.0, smoke_s=3.0, info_s=2.0, grace_s=0.5, gone_s=10.0)
SERVER = Path(__file__).with_name("misbehaving_server.py")
SPACE = f"""
name: toy
engine:
  kind: command
  model: fake
  args:
    command: [{sys.executable}, -I, {SERVER}, --host, "{{host}}", --port, "{{port}}", --num-steps, "{{num_steps}}",
              --change, "{{change}}", --change-at, "{{at}}", --seconds, "30", --mode, "{{mode}}"]
    info_path: /server_info
    change: works
    at: 3
    mode: healthy
  launch: {{stall_s: 3, smoke_s: 3, token_stall_s: 2}}
workload: {{concurrency: [1, 8], max_tokens: 64}}
baseline: {{num_steps: 0}}
parameters:
  num_steps: {{low: 1, high: 6}}
budget: {{launches: 20, candidates: 6}}
profile: short
"""
GAIN = {0: 1.0, 1: 1.05, 2: 1.1, 3: 1.3, 4: 1.2, 5: 1.02, 6: 0.9}
POLICY = Policy(pairs=4)


class ChangingEngine(CommandEngine):
    """The user's own server, with one setting that can be changed while it runs."""

    hot = frozenset({"num_steps"})

    def record(self, **given: Any) -> LaunchRecord:
        """It drafts as deep as it is told, with a head; what it is told beside that, its command line says."""
        record = super().record(**given)
        drafter = "eagle3" if record.settings.get("num_steps") else "none"
        return replace(record, expected={**record.expected, "speculation": drafter})

    def change(self, record: LaunchRecord) -> Change:
        return Change("/reconfigure", {"extra": True, "num_steps": record.settings["num_steps"]})

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        info = server_info if isinstance(server_info.get("effective"), Mapping) else {}
        expected = {name: value for name, value in record.expected.items() if name != "speculation"}
        return compare(expected, info, all_told="extra" in expected)


class ChangingMachine(ToyMachine):
    """Real servers, real changes, real tokens; only how fast they are is a toy's."""

    def __init__(self, the_space: Any) -> None:
        super().__init__()
        self.real = Machine(the_space)
        self.reconfigure = self.real.reconfigure
        self.wrong: list[str] = []

    def free_port(self) -> int:
        return ports.free_port()

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> Any:
        self.starts.append(record.settings)
        return Server.start(record, marker=marker, log_path=log_path, limits=QUICK)

    def measure(self, server: Any, record: LaunchRecord, **given: Any) -> Any:
        body = {"model": "fake", "prompt": "x", "max_tokens": 512, "stream": True}
        try:
            with httpx.Client(trust_env=False, timeout=2) as client:
                before = parse_snapshot(client.get(record.base_url + "/metrics").content, 0, 1)
                text = client.post(record.base_url + "/v1/completions", json=body).text
                after = parse_snapshot(client.get(record.base_url + "/metrics").content, 2, 3)
                facts = client.get(record.base_url + "/echo").json()
            if "[DONE]" not in text or '" one"' not in text:
                raise httpx.ReadError("the stream was cut")
        except httpx.TimeoutException:
            return Outcome(None, replace(server.hung("no token for 2 s"), evidence=""))
        except httpx.HTTPError as error:
            found = server.failure(wait_s=5) or Failure("bad_protocol", "bench", str(error))
            return Outcome(None, replace(found, evidence=""))
        true = facts["in_force"]["num_steps"]
        if true != record.settings["num_steps"]:
            self.wrong.append(f"{record.settings['num_steps']} measured with {true}")
        self.speed = lambda _settings, level: 100.0 * level * GAIN[true] * 0.8 ** facts["slowness"]
        outcome = super().measure(server, record, **given)
        change = delta(before, after)
        if outcome.block is None or change is None:
            return outcome
        counters = {
            "true_steps": float(true),
            "server_generated": change.generated,
            "server_verify_steps": change.steps,
            "server_accepted": change.accepted,
            "server_drafted": change.drafted,
            **{f"accepted_at_depth_{i}": count for i, count in enumerate(change.accepted_at_depth, start=1)},
        }
        return Outcome(replace(outcome.block, counters=counters, accept_length=change.accept_length))

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        return [*reap(marker_text(marker), grace_s=0.5)]


def changing_study(folder: Path, *overrides: str, **more: Any) -> tuple[StudyStore, Controller]:
    """A study in a folder, taken up wherever it stands."""
    the_space = space(SPACE, *overrides)
    store = study(folder, the_space)
    return store, controller(store, ChangingMachine(the_space), ChangingEngine(), policy=POLICY, **more)


def orphans(uid: str) -> list[int]:
    """What is left of a study's servers."""
    return [process.pid for process in marked(marker_text({"study": uid}))]
