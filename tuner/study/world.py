"""What a study does to the machine, behind one narrow interface: start a server, measure a block, end leftovers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import EnvironmentBroken
from tuner.records import Block, Failure, LaunchRecord, Role
from tuner.space import Space

_FLUSH_S = 30.0


class StopReport(Protocol):
    """How a server ended."""

    @property
    def exit_status(self) -> int | None:
        """Of the server itself; None when it could not be ended."""

    @property
    def escalated(self) -> bool:
        """Whether SIGTERM was not enough."""

    @property
    def leftovers(self) -> tuple[int, ...]:
        """Processes that could not be ended."""


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

    def failure(self) -> Failure | None:
        """Why it has ended; None while it runs."""

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
    ) -> Outcome:
        """One block. Equal seeds mean equal requests."""

    def keep_requests(self, outcome: Outcome, path: Path) -> None:
        """Writes the requests of a block to a file, one a line."""

    def reap(self, marker: Mapping[str, str]) -> list[int]:
        """Ends whatever still carries a marker that begins so; the pids."""


def flush(record: LaunchRecord) -> str | None:
    """Empty a server's prefix cache, so that no block finds the prompts of another there. What went wrong, if it did;
    a server without such a path is left alone."""
    if record.flush_path is None:
        return None
    import httpx

    try:
        answer = httpx.post(record.base_url + record.flush_path, timeout=_FLUSH_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"POST {record.flush_path}: {error!r}"
    return None if answer.status_code == 200 else f"POST {record.flush_path}: status {answer.status_code}"


class Machine:
    """The real machine. Prompts are read when it is made: a missing set is found before anything starts."""

    def __init__(self, space: Space) -> None:
        from tuner.bench.plan import window_plan
        from tuner.bench.prompts import load_prompts

        self._workload = space.workload
        self._plan = window_plan(space.profile)
        prompts = space.workload.prompts
        self._prompts = {
            "screen": load_prompts(prompts, split="tuning"),
            "confirm": load_prompts(prompts, split="held_out"),
        }

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
        from tuner.launch.server import Server

        return Server.start(record, marker=marker, log_path=log_path)

    def measure(
        self,
        server: RunningServer,
        record: LaunchRecord,
        *,
        concurrency: int,
        role: Role,
        seed: int,
        on_progress: Callable[[Any], None],
    ) -> Outcome:
        """One block, on a server whose prefix cache is empty. Equal seeds mean equal requests."""
        from tuner.bench.block import BlockOutcome, measure_block

        if problem := flush(record):
            kind = Failure("bad_protocol", "bench", f"the prefix cache could not be emptied before a block: {problem}")
            return BlockOutcome(None, server.failure() or kind)
        return measure_block(
            record.base_url,
            model=record.served_model,
            prompts=self._prompts[role],
            concurrency=concurrency,
            role=role,
            max_tokens=self._workload.max_tokens,
            temperature=self._workload.temperature,
            plan=self._plan,
            seed=seed,
            on_progress=on_progress,
            server_failure=server.failure,
        )

    def keep_requests(self, outcome: Outcome, path: Path) -> None:
        """Writes the requests of a block to a file, one JSON object a line, compressed.

        Raises:
            EnvironmentBroken: the file cannot be written.
        """
        import gzip
        import json
        from dataclasses import asdict

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(path, "wt", encoding="utf-8") as file:
                for trace in getattr(outcome, "traces", ()):
                    file.write(json.dumps(asdict(trace), ensure_ascii=False) + "\n")
        except OSError as error:
            raise EnvironmentBroken(f"{path} cannot be written: {error}. The block itself is kept") from error

    def reap(self, marker: Mapping[str, str]) -> list[int]:
        """Ends whatever still carries a marker that begins so; the pids."""
        from tuner.launch.processes import marker_text
        from tuner.launch.reap import reap

        return reap(marker_text(marker))
