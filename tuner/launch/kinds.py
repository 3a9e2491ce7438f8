"""The failure classes: what each means, against whom it is held, and whether trying again can help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.records import Failure

Phase = Literal["start", "ready", "smoke", "readback", "bench", "stop"]


@dataclass(frozen=True)
class Kind:
    """One failure class. `retryable` means that the same launch may well succeed when it is tried again."""

    meaning: str
    blame: Literal["candidate", "environment"] = "candidate"
    retryable: bool = False


KINDS: dict[str, Kind] = {
    "invalid_config": Kind("The engine refused the settings."),
    "startup_crash": Kind("The server ended before it was ready."),
    "startup_hang": Kind("The server was silent and idle for the stall limit before it was ready.", retryable=True),
    "startup_timeout": Kind("The server still made progress, but was not ready within the hard limit."),
    "oom_startup": Kind("Memory ran out before the server was ready."),
    "oom_under_load": Kind("Memory ran out while requests were running."),
    "partial_init": Kind("The server came up half-built: an error of its start was swallowed."),
    "crash_on_first_decode": Kind("The server was healthy and failed on its first real completion."),
    "died_mid_bench": Kind("The server ended while it was measured."),
    "hung_decode": Kind("Requests were accepted and produced no token within the limit.", retryable=True),
    "engine_dead_5xx": Kind("The server lives and answers every completion with a server error."),
    "bad_protocol": Kind("The answer was not what an OpenAI-compatible server sends."),
    "bench_parse_error": Kind("A measurement's output could not be read."),
    "low_success_rate": Kind("Too many requests failed."),
    "short_output": Kind("Answers were far shorter than asked."),
    "degenerate_output": Kind("Answers were garbled or repeated themselves."),
    "spec_inactive": Kind("Speculation was asked for and is not in effect."),
    "capped_effective": Kind("The server runs with a lower value than was asked for."),
    "no_op_setting": Kind("A setting had no effect."),
    "reconfigure_failed": Kind("A running server did not take other settings.", "environment"),
    "port_conflict": Kind("Someone else listens on the port.", "environment", True),
    "killed_externally": Kind("Someone else ended the server.", "environment", True),
    "transient_env": Kind("The machine was not ready: a resource was still being released.", "environment", True),
    "env_broken": Kind("The machine cannot run this engine: something is missing, full or forbidden.", "environment"),
    "interrupted": Kind("The tuner was stopped in between.", "environment", True),
}


def failure(kind: str, phase: Phase, message: str, evidence: str = "", exit_status: int | None = None) -> Failure:
    """A `Failure` with the blame and the retry rule of its class.

    Raises:
        KeyError: for a class that is not in `KINDS`.
    """
    known = KINDS[kind]
    return Failure(kind, phase, message, evidence, exit_status, known.blame, known.retryable)


def table() -> str:
    """The classes as a Markdown table; docs/failures.md holds it."""
    rows = (
        f"| `{name}` | {kind.meaning} | {kind.blame} | {'yes' if kind.retryable else 'no'} |"
        for name, kind in KINDS.items()
    )
    return "\n".join(["| class | meaning | held against | tried again |", "|---|---|---|---|", *rows])
