"""The machine of a study on a virtual clock: launches and blocks come from the simulator, without a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.engines.base import Change
from tuner.engines.simulated.blocks import BLOCK_S, BlockSource, Clock, profile_truth
from tuner.engines.simulated.machine import Fault, Work, fault_at_start, fault_under_load
from tuner.engines.simulated.noise import Noise
from tuner.engines.simulated.profiles import profile_named
from tuner.errors import LaunchFailed
from tuner.records import Block, Failure, LaunchRecord, Role
from tuner.space import Space
from tuner.study.world import Machine, RunningServer, StopReport, World

__all__ = ["Clock", "SimulatedWorld", "virtual", "world_of"]


def virtual(space: Space) -> bool:
    """Whether a space is simulated on a virtual clock."""
    return space.simulation is not None and space.simulation.clock == "virtual"


def world_of(space: Space, seed: int) -> World:
    """What stands behind a space: the machine, or a simulation of it on a clock of its own."""
    return SimulatedWorld(space, seed, Clock()) if virtual(space) else Machine(space)


@dataclass(frozen=True)
class _Report:
    """An orderly end: there was nothing to end."""

    exit_status: int | None = 0
    escalated: bool = False
    unclean: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Outcome:
    block: Block | None
    failure: Failure | None = None


@dataclass
class _Server:
    """A launch that exists on paper; `settings` are all that the server was last told."""

    settings: Mapping[str, Any]
    pid: int = 0

    def wait_ready(self) -> None:
        """At once."""

    def smoke(self) -> None:
        """Nothing can be sent."""

    def server_info(self) -> dict[str, Any]:
        """What was asked for is in effect."""
        return {"simulated": True, "effective": dict(self.settings)}

    def failure(self, *, wait_s: float = 0.0) -> Failure | None:
        """It runs."""
        return None

    def cpu_s(self) -> float:
        """It computes nothing."""
        return 0.0

    def stop(self) -> StopReport:
        """Nothing is left."""
        return _Report()


class SimulatedWorld:
    """Implements `World`. The noise of a study that is continued goes on from a seed of its own.

    `speed` is a factor on all tokens per second: hosts of one kind differ by some.
    """

    def __init__(self, space: Space, seed: int, clock: Clock, speed: float = 1.0) -> None:
        assert space.simulation is not None
        self._profile = profile_named(space.simulation.profile)
        self._work = Work(output_tokens=space.workload.max_tokens)
        noise = Noise().times(space.simulation.noise)
        truth = profile_truth(self._profile, self._work)
        self._source = BlockSource(lambda settings, level: speed * truth(settings, level), noise, seed, clock=clock)
        self._fixed = {name: value for name, value in space.args.items() if not name.startswith("simulation.")}
        self.block_s = BLOCK_S

    def free_port(self) -> int:
        """No port is listened on; an export shows this one."""
        return 8000

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> RunningServer:
        """Raises `LaunchFailed` where the machine would not come up."""
        self._source.launch()
        settings = {**self._fixed, **record.settings}
        if fault := fault_at_start(self._profile, settings):
            raise LaunchFailed(_failure(fault, "start"))
        return _Server(settings)

    def measure(
        self,
        server: RunningServer,
        record: LaunchRecord,
        *,
        concurrency: int,
        role: Role,
        seed: int,
        on_progress: Callable[[Any], None],
        share: float = 1.0,
    ) -> _Outcome:
        """One block from the model; `seed` and progress have no meaning here."""
        settings = {**self._fixed, **record.settings}
        if fault := fault_under_load(self._profile, settings, concurrency, self._work):
            return _Outcome(None, _failure(fault, "bench"))
        return _Outcome(self._source.block(settings, concurrency, role, share))

    def reconfigure(self, server: RunningServer, record: LaunchRecord, change: Change) -> None:
        """Raises `LaunchFailed` where a machine with these settings would not come up."""
        settings = {**self._fixed, **record.settings}
        if fault := fault_at_start(self._profile, settings):
            raise LaunchFailed(_failure(fault, "bench"))
        assert isinstance(server, _Server)
        server.settings = {**settings, **change.body}

    def keep_requests(self, outcome: object, path: Path) -> None:
        """There are none."""

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        """Nothing runs."""
        return []

    def remaining(self, marker: Mapping[str, str]) -> list[int | str]:
        """Nothing runs."""
        return []

    def settle(self, report: StopReport) -> tuple[str, ...]:
        """Nothing is left."""
        return ()

    def neighbours(self) -> list[str]:
        """None."""
        return []


def _failure(fault: Fault, phase: Any) -> Failure:
    return Failure(fault.kind, phase, f"{fault.message} (simulated)")
