"""What a study does to the machine, behind one narrow interface: start a server, measure a block, end leftovers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tuner.engines.base import Change
from tuner.errors import EnvironmentBroken, LaunchFailed, UsageError
from tuner.records import Block, Failure, LaunchRecord, Role
from tuner.space import Space

_FLUSH_S = 30.0
ENDING_S = 1.0
"""How long a server that has dropped a connection may take to end."""


class StopReport(Protocol):
    """How a server ended."""

    @property
    def exit_status(self) -> int | None:
        """Of the server itself; None when it could not be ended."""

    @property
    def escalated(self) -> bool:
        """Whether SIGTERM was not enough."""

    @property
    def unclean(self) -> tuple[str, ...]:
        """What is left of it, in words; empty when nothing is."""


class RunningServer(Protocol):
    """A started server. Its methods raise `LaunchFailed`."""

    @property
    def pid(self) -> int:
        """Of the server."""

    def wait_ready(self) -> object:
        """Waits until it answers."""

    def smoke(self) -> object:
        """A real completion."""

    def server_info(self) -> dict[str, Any] | None:
        """What it says about itself; None when it does not say."""

    def failure(self, *, wait_s: float = 0.0) -> Failure | None:
        """Why it has ended; None while it runs. One that is about to end may take `wait_s`."""

    @property
    def cpu_s(self) -> Callable[[], float] | None:
        """Tells the CPU seconds of its living processes so far; None where its processes are not known."""

    def stop(self) -> StopReport:
        """Ends it and all its family."""


class Outcome(Protocol):
    """A block, or the failure in its place."""

    @property
    def block(self) -> Block | None:
        """What was measured."""

    @property
    def failure(self) -> Failure | None:
        """Why nothing was."""


class World(Protocol):
    """The machine, as a study sees it."""

    def free_port(self) -> int:
        """A port that nobody listens on."""

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> RunningServer:
        """Starts a server. Raises `LaunchFailed`."""

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
    ) -> Outcome:
        """One block, of this share of the usual window. Equal seeds mean equal requests."""

    def reconfigure(self, server: RunningServer, record: LaunchRecord, change: Change) -> None:
        """Puts a running server to a record's hot settings. Raises `LaunchFailed`."""

    def keep_requests(self, outcome: Outcome, path: Path) -> None:
        """Writes the requests of a block to a file, one a line."""

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        """Ends whatever still carries a marker that begins so: pids of processes, and ids of containers."""

    def remaining(self, marker: Mapping[str, str]) -> list[int | str]:
        """What carries such a marker although it was to be ended."""

    def settle(self, report: StopReport) -> tuple[str, ...]:
        """Waits, for a bounded time, until what a server left is gone; what still is not, with what to do."""

    def neighbours(self) -> list[str]:
        """Others at work on what a server of this study would use, one sentence each."""


def flush(record: LaunchRecord, key: str | None = None) -> str | None:
    """Empty a server's prefix cache, so that no block finds the prompts of another there. What went wrong, if it did;
    a server without such a path is left alone."""
    if record.flush_path is None:
        return None
    import httpx

    from tuner.ask import ask

    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = ask("POST", record.base_url + record.flush_path, headers=headers, timeout_s=_FLUSH_S)
    except httpx.HTTPError as error:
        return f"POST {record.flush_path}: {error!r}"
    return None if answer.status == 200 else f"POST {record.flush_path}: status {answer.status}"


def reconfigure(
    record: LaunchRecord,
    change: Change,
    key: str | None = None,
    *,
    limit_s: float,
    watch: Callable[[], None] | None = None,
) -> str | None:
    """Put a running server to other hot settings. What went wrong, if it did: then nothing is known of its settings.

    The whole answer has `limit_s`; `watch` is called meanwhile, and ends the request when it raises.
    """
    import httpx

    from tuner.ask import ask

    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = record.base_url + change.path
        answer = ask("POST", url, body=change.body, headers=headers, timeout_s=limit_s, total_s=limit_s, watch=watch)
    except httpx.TimeoutException:
        return f"POST {change.path}: no answer in {limit_s:g} s"
    except httpx.HTTPError as error:
        return f"POST {change.path}: {error!r}"
    if answer.status == 200:
        return None
    return f"POST {change.path}: status {answer.status}: {answer.text[:500]}"


class Machine:
    """The real machine. Prompts are read when it is made: a missing set is found before anything starts.

    `devices` are those that servers may use, where they are not all; `siblings` are the pids of other tuners that share
    this host for the same study, and `study` is how the markers of its servers begin.
    """

    def __init__(
        self,
        space: Space,
        *,
        devices: Sequence[str] = (),
        siblings: Callable[[], Iterable[int]] = tuple,
        study: Mapping[str, str] | None = None,
    ) -> None:
        from tuner.bench.plan import window_plan
        from tuner.bench.prompts import load_prompts
        from tuner.launch.processes import marker_text
        from tuner.launch.siblings import SiblingLoad

        self._workload = space.workload
        self._plan = replace(window_plan(space.profile), stall_s=space.launch.token_stall_s)
        self._launch = space.launch
        self._container = space.container
        self._api_key = api_key(space)
        self._devices = tuple(devices)
        self._blocks_on = (0, 0)
        """The server that was measured last, by its pid, and blocks so far."""
        self._siblings = SiblingLoad(siblings, marker_text(study)) if study else None
        prompts = space.workload.prompts
        tuning = load_prompts(prompts, split="tuning")
        held_out = load_prompts(prompts, split="held_out")
        self._prompts = {"look": tuning, "screen": tuning, "edge": tuning, "confirm": held_out}

    @property
    def block_s(self) -> float:
        """What a block usually takes."""
        return self._plan.estimate_s()

    def free_port(self) -> int:
        """A port that nobody listens on."""
        from tuner.launch.ports import free_port

        return free_port()

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> RunningServer:
        """Starts a server. Raises `LaunchFailed`."""
        from tuner.launch.server import LaunchLimits, Server

        wait = self._launch
        limits = LaunchLimits(
            stall_s=wait.stall_s, startup_s=wait.startup_s, smoke_s=wait.smoke_s, grace_s=wait.grace_s
        )
        return Server.start(record, marker=marker, log_path=log_path, limits=limits, api_key=self._api_key)

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
    ) -> Outcome:
        """One block, on a server whose prefix cache is empty, of this share of the usual window.

        Equal seeds mean equal requests, but that no server gets a text twice whose cache cannot be emptied.
        """
        from tuner.bench.block import BlockOutcome, measure_block
        from tuner.bench.selftest import client_ceiling

        last, earlier = self._blocks_on
        self._blocks_on = (server.pid, earlier + 1 if last == server.pid else 1)
        if problem := flush(record, self._api_key):
            kind = Failure("bad_protocol", "bench", f"the prefix cache could not be emptied before a block: {problem}")
            return BlockOutcome(None, server.failure() or kind)
        outcome = measure_block(
            record.base_url,
            model=record.served_model,
            prompts=self._prompts[role],
            concurrency=concurrency,
            role=role,
            max_tokens=self._workload.max_tokens,
            temperature=self._workload.temperature,
            plan=self._plan.shortened(share),
            seed=seed,
            ceiling_events_per_s=client_ceiling(),
            api_key=self._api_key,
            on_progress=on_progress,
            server_failure=server.failure,
            server_cpu_s=self._load(server),
            devices=self._devices,
            earlier=self._blocks_on[1] - 1 if record.flush_path is None else 0,
        )
        if self._api_key and (found := outcome.failure) is not None:
            said = {name: getattr(found, name).replace(self._api_key, "(the API key)") for name in _SAID}
            return replace(outcome, failure=replace(found, **said))
        return outcome

    def reconfigure(self, server: RunningServer, record: LaunchRecord, change: Change) -> None:
        """Puts a running server to a record's hot settings, within the time that a start may be silent.

        Raises:
            LaunchFailed: it did not take them, or has ended; that is noticed whoever still holds its connection.
        """
        from tuner.launch.kinds import failure

        def watch() -> None:
            if found := server.failure():
                raise LaunchFailed(found)

        if problem := reconfigure(record, change, self._api_key, limit_s=self._launch.stall_s, watch=watch):
            said = problem.replace(self._api_key, "(the API key)") if self._api_key else problem
            raise LaunchFailed(server.failure(wait_s=ENDING_S) or failure("reconfigure_failed", "bench", said))

    def _load(self, server: RunningServer) -> Callable[[], float] | None:
        """What tells the CPU seconds that are no stranger's: the server's and the other workers'."""
        mine, siblings = server.cpu_s, self._siblings
        if mine is None:
            return None
        return lambda: mine() + (siblings.cpu_s((os.getpid(), server.pid)) if siblings else 0.0)

    def keep_requests(self, outcome: Outcome, path: Path) -> None:
        """Writes the requests of a block to a file, one JSON object a line, compressed: all of them, or no file.

        Raises:
            EnvironmentBroken: the file cannot be written.
        """
        import gzip
        import json
        from dataclasses import asdict

        from tuner.files import write_whole

        rows = (json.dumps(asdict(trace), ensure_ascii=False) + "\n" for trace in getattr(outcome, "traces", ()))
        try:
            write_whole({path: gzip.compress("".join(rows).encode(), mtime=0)})
        except OSError as error:
            raise EnvironmentBroken(f"{path} cannot be written: {error}. The block itself is kept") from error

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        """Ends whatever still carries a marker that begins so: pids of processes, and ids of containers."""
        from tuner.launch import container
        from tuner.launch.processes import marker_text
        from tuner.launch.reap import reap

        found: list[int | str] = []
        if self._container is not None:
            # Before the processes: a client that is ended first would leave its container to run on unwatched.
            found += container.reap(marker_text(marker), (self._container.runtime,))[0]
        return found + list(reap(marker_text(marker)))

    def remaining(self, marker: Mapping[str, str]) -> list[int | str]:
        """What carries such a marker although it was to be ended."""
        from tuner.launch import container
        from tuner.launch.processes import marker_text
        from tuner.launch.reap import marked

        found: list[int | str] = [process.pid for process in marked(marker_text(marker))]
        if self._container is not None:
            found += [state.id for state in container.marked(self._container.runtime, marker_text(marker))]
        return found

    def settle(self, report: StopReport) -> tuple[str, ...]:
        """Waits, for a bounded time, until what a server left is gone; what still is not, with what to do."""
        from tuner.launch.server import StopReport as Report
        from tuner.launch.settle import settle

        return settle(report) if isinstance(report, Report) else ()

    def neighbours(self) -> list[str]:
        """Other programs on the GPUs that servers may use, one sentence each."""
        from tuner.launch import gpu

        return [
            f"process {one.pid} computes on a GPU ({one.used_mib or 'unknown'} MiB): a server of this study may not "
            "fit beside it, and its figures would be of a shared GPU"
            for one in gpu.processes(self._devices)
        ]


_SAID = ("message", "evidence")


def api_key(space: Space) -> str | None:
    """The key that the space's server wants, from the variable that the space names; None where it names none.

    Raises:
        UsageError: the variable is not set.
    """
    if space.api_key_env is None:
        return None
    if not (key := os.environ.get(space.api_key_env)):
        raise UsageError(
            f"engine.api_key_env names {space.api_key_env}, which is not set. Nothing was started; set it to the key "
            "that the server wants"
        )
    return key
