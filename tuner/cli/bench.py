"""`tuner bench URL`: measures a running server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tuner.ask import Compressed, TooLong, ask
from tuner.bench.block import BlockProgress, measure_block
from tuner.bench.client import Target
from tuner.bench.open_loop import OpenRun, run_open_loop
from tuner.bench.plan import PROFILES, WindowPlan, window_plan
from tuner.bench.prompts import Prompt, load_prompts, shipped_sets
from tuner.bench.selftest import client_ceiling
from tuner.errors import EnvironmentBroken, LaunchFailed, TunerError, UsageError
from tuner.records import Block, Failure, mark

ASK_TIMEOUT_S = 10.0
RUNS, MOST_LEVELS = 10_000, 100
"""Runs that are told apart, by the second they begin in, and levels of one."""


def command(
    url: Annotated[str, typer.Argument(help="Base URL of an OpenAI-compatible server, with or without /v1.")],
    concurrency: Annotated[str, typer.Option(help="Concurrent requests; several levels as 1,8,32.")] = "1,8",
    max_tokens: Annotated[int, typer.Option(help="Output tokens per request, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    prompts: Annotated[str, typer.Option(help="A prompt set that ships (its tuning part), or a JSONL file.")] = "mixed",
    profile: Annotated[str, typer.Option(help=f"Length of the windows: {', '.join(PROFILES)}.")] = "short",
    model: Annotated[str | None, typer.Option(help="Model to ask for; default: the first one served.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TUNER_API_KEY", help="Sent as a bearer token.")] = None,
    seed: Annotated[int, typer.Option(help="Order of the prompts, and seed of the sampling.")] = 0,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop instead: requests a second, arriving at random; latencies from the arrival."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of the open loop.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Measure a running server at each concurrency: throughput, latencies, and whether the figures hold."""
    try:
        texts = load_prompts(prompts, split="tuning" if prompts in shipped_sets() else "all")
        asked = Asked(prompts, len(texts), max_tokens, temperature, seed, model)
        if rate is not None:
            code = bench_open(
                url,
                rate=rate,
                seconds=seconds,
                warmup_s=window_plan(profile).warmup_s,
                asked=asked,
                prompts=texts,
                api_key=api_key,
                as_json=as_json,
            )
        else:
            code = bench(
                url,
                levels=parse_levels(concurrency),
                asked=asked,
                prompts=texts,
                plan=window_plan(profile),
                api_key=api_key,
                as_json=as_json,
            )
    except TunerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class Asked:
    """What is asked of the server: `count` prompts of a set or file, so many tokens of each answer at most."""

    prompts: str
    count: int
    max_tokens: int
    temperature: float
    seed: int
    model: str | None = None

    def check(self) -> None:
        """Raises `UsageError` where it makes no sense."""
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens {self.max_tokens}: must be at least 1")
        if not 0 <= self.temperature <= 2:
            raise UsageError(f"--temperature {self.temperature}: must lie between 0 and 2")

    @property
    def sentence(self) -> str:
        """The same for a person."""
        part = ", its tuning part" if self.prompts in shipped_sets() else ""
        greedy = " (greedy)" if self.temperature == 0 else ""
        return (
            f"{self.count} prompts ({self.prompts}{part}), up to {self.max_tokens} tokens each at temperature "
            f"{self.temperature:g}{greedy}"
        )


def _window(plan: WindowPlan) -> str:
    return f"{plan.window_s:g} to {plan.window_cap_s:g} s behind {plan.warmup_s:g} s or more of warm-up"


def bench(
    url: str,
    *,
    levels: list[int],
    asked: Asked,
    prompts: list[Prompt],
    plan: WindowPlan,
    api_key: str | None,
    as_json: bool,
) -> int:
    """Measure and print; returns the exit code: 0, or 1 when no level gave a valid block.

    Raises:
        UsageError: arguments that make no sense; nothing was sent.
        EnvironmentBroken: nothing answers at the URL, or it is no OpenAI-compatible server.
        LaunchFailed: the server failed at the first level; later failures are printed and end the run.
    """
    asked.check()
    target = Target.parse(url)
    target.head("GET", "/v1/models", api_key)
    served = served_model(target, api_key, asked.model)
    if not as_json:
        print(f"{asked.sentence}, at concurrency {', '.join(map(str, levels))}: {_window(plan)} a level.", flush=True)
    screen = Console(stderr=True)
    blocks: list[Block] = []
    failure: Failure | None = None
    # A server that runs already may hold what an earlier run asked of it: no text is sent twice.
    run = 1 + int(time.time()) % RUNS
    for number, level in enumerate(levels):
        with screen.status(f"concurrency {level}") as status:

            def show(progress: BlockProgress, level: int = level, status: Any = status) -> None:
                status.update(_progress_line(level, progress))

            outcome = measure_block(
                target.base_url,
                model=served.name,
                prompts=prompts,
                concurrency=level,
                role="screen",
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                plan=plan,
                seed=asked.seed,
                api_key=api_key,
                ceiling_events_per_s=client_ceiling(),
                on_progress=show if sys.stderr.isatty() else None,
                earlier=run * MOST_LEVELS + number,
            )
        if outcome.block is None:
            failure = outcome.failure
            break
        blocks.append(outcome.block)
    if failure is not None and not blocks:
        raise LaunchFailed(failure)
    if as_json:
        print(json.dumps(_document(target, served, asked, blocks, failure), indent=2))
    else:
        _print(Console(), target, served, blocks, failure)
    return 0 if failure is None and any(block.valid for block in blocks) else 1


def bench_open(
    url: str,
    *,
    rate: float,
    seconds: float,
    warmup_s: float,
    asked: Asked,
    prompts: list[Prompt],
    api_key: str | None,
    as_json: bool,
) -> int:
    """The open loop: measure and print; returns the exit code: 0, or 1 when the run is not valid.

    Raises:
        UsageError, EnvironmentBroken: as `bench`.
    """
    asked.check()
    target = Target.parse(url)
    target.head("GET", "/v1/models", api_key)
    served = served_model(target, api_key, asked.model)
    if not as_json:
        print(f"{asked.sentence}, {rate:g} requests a second for {seconds:g} s behind {warmup_s:g} s of warm-up.")
    found = run_open_loop(
        target.base_url,
        model=served.name,
        prompts=prompts,
        rate=rate,
        seconds=seconds,
        warmup_s=warmup_s,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
        api_key=api_key,
    )
    if as_json:
        told = {
            "url": target.base_url,
            "model": served.name,
            "simulated": served.simulated,
            "workload": asdict(asked),
            **asdict(found),
            "valid": found.valid,
        }
        print(json.dumps(told, indent=2))
    else:
        _print_open(Console(), target, served, found)
    return 0 if found.valid else 1


def _print_open(console: Console, target: Target, served: Served, found: OpenRun) -> None:
    title = f"{found.rate:g} requests/s at {target.base_url}, {found.seconds:g} s{mark(served.simulated)}"
    table = Table(title=title, caption="milliseconds from the intended time of sending; late: of sending itself")
    for column in ("", "n", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = {"TTFT": found.ttft_ms, "TPOT": found.tpot_ms, "end to end": found.e2e_ms, "late": found.late_ms}
    for name, each in rows.items():
        table.add_row(name, str(each.n), *(_ms(value) for value in (each.mean, each.p50, each.p90, each.p99)))
    console.print(table)
    console.print(
        f"{found.requests} requests ended well, {found.failed} did not; {found.tokens_per_s:.1f} tok/s; "
        f"{found.in_flight:.1f} under way on average"
    )
    if found.failure:
        console.print(f"First failure: {found.failure}", markup=False)
    for gate in found.gates:
        if not gate.ok:
            said = f"{gate.value:.4g} (limit {gate.limit:.4g}): {gate.detail}"
            console.print(f"Invalid: {gate.name}, {said}", markup=False)


def parse_levels(text: str) -> list[int]:
    """`1,8,32` as numbers; anything but distinct whole numbers from 1 on is a `UsageError`."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--concurrency '{text}': give whole numbers separated by commas, such as 1,8,32") from None
    if min(levels) < 1:
        raise UsageError(f"--concurrency {min(levels)}: must be at least 1")
    if len(set(levels)) < len(levels):
        raise UsageError(f"--concurrency '{text}': each level once")
    return levels


class Served(NamedTuple):
    """The name to ask for, and whether the server says that it only simulates."""

    name: str
    simulated: bool


def served_model(target: Target, api_key: str | None, wanted: str | None) -> Served:
    """What is to be measured: `wanted` if it is given, else the first of `/v1/models`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = f"{target.base_url}/v1/models"
    try:
        reply = ask("GET", where, headers=headers, timeout_s=ASK_TIMEOUT_S, surroundings=True)
    except (TooLong, Compressed) as error:
        raise EnvironmentBroken(f"{where}: {error}. Nothing was measured. Check the address.") from error
    except httpx.TransportError as error:
        raise EnvironmentBroken(
            f"Nothing answers at {target.base_url} ({error or type(error).__name__}). Nothing was measured. "
            "Is the server running, and is this its address?"
        ) from error
    if reply.status in (401, 403):
        raise UsageError(
            f"{where} answered {reply.status}: the server wants {'another' if api_key else 'an'} API key. "
            "Give it with --api-key or in TUNER_API_KEY."
        )
    try:
        if reply.status != 200:
            raise ValueError(f"status {reply.status}")
        entries = reply.json()["data"]
        names = [str(entry["id"]) for entry in entries]
        simulated = any(entry.get("simulated") is True for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if wanted is not None:
            return Served(wanted, simulated=False)
        raise EnvironmentBroken(
            f"{where} does not answer as an OpenAI-compatible server does ({reply.status}). Nothing was measured. "
            "Check the address, or name the model with --model."
        ) from error
    if wanted is not None:
        if names and wanted not in names:
            raise UsageError(f"--model '{wanted}' is not served at {target.base_url}; it serves: {', '.join(names)}")
        return Served(wanted, simulated)
    if not names:
        raise EnvironmentBroken(f"{where} lists no model. Nothing was measured. Name one with --model.")
    return Served(names[0], simulated)


def _progress_line(level: int, progress: BlockProgress) -> str:
    rate = f", {progress.chunks_per_s:.0f} chunks/s" if progress.chunks_per_s else ""
    failed = f", {progress.failed_requests} failed" if progress.failed_requests else ""
    return (
        f"concurrency {level}: {progress.phase} {progress.elapsed_s:.0f}/{progress.total_s:.0f} s, "
        f"{progress.requests} requests{failed}{rate}"
    )


COLUMNS = ("C", "tok/s", "each", "avg ms", "p50", "p90", "p99", "TTFT", "tokens", "wall s", "ok")


def row(block: Block) -> tuple[str, ...]:
    """One block as the cells of `COLUMNS`. Latencies are end to end, TTFT is the median; wall is the window."""
    return (
        str(block.concurrency),
        f"{block.tokens_per_s:.1f}",
        f"{block.per_stream_tokens_per_s:.1f}",
        _ms(block.e2e_ms.mean),
        _ms(block.e2e_ms.p50),
        _ms(block.e2e_ms.p90),
        _ms(block.e2e_ms.p99),
        _ms(block.ttft_ms.p50),
        f"{block.tokens:.0f}",
        f"{block.window_s:.1f}",
        f"{block.requests}/{block.requests + block.failed_requests}" + ("" if block.valid else " ✗"),
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _print(console: Console, target: Target, served: Served, blocks: list[Block], failure: Failure | None) -> None:
    table = Table(
        title=f"{served.name} at {target.base_url}{mark(served.simulated)}",
        caption="each: tokens per second of one request; latencies in milliseconds; ✗: invalid, see below",
        padding=(0, 0, 0, 1),
    )
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for block in blocks:
        table.add_row(*row(block))
    console.print(table)
    for block in blocks:
        if block.accept_length is not None:
            console.print(f"Concurrency {block.concurrency}: accept length {block.accept_length:.2f} (drafts + 1)")
    for block in blocks:
        for gate in block.gates:
            if not gate.ok:
                console.print(
                    f"Concurrency {block.concurrency} is invalid: {gate.name}, {gate.value:.4g} "
                    f"(limit {gate.limit:.4g}): {gate.detail}",
                    markup=False,
                )
    if not all(block.valid for block in blocks):
        console.print("Figures of invalid blocks are not to be used. Stop what else uses this machine, and repeat.")
    if any(block.e2e_ms.p99 is None for block in blocks):
        console.print("p99 needs 100 requests in the window; a longer one gives it (--profile full).")
    if failure is not None:
        console.print(f"Ended early: {failure.kind}: {failure.message}", markup=False)


def _document(
    target: Target, served: Served, asked: Asked, blocks: list[Block], failure: Failure | None
) -> Mapping[str, Any]:
    return {
        "url": target.base_url,
        "model": served.name,
        "simulated": served.simulated,
        "workload": asdict(asked),
        "blocks": [{**block.to_dict(), "valid": block.valid, "success_rate": block.success_rate} for block in blocks],
        "failure": None if failure is None else {"kind": failure.kind, "message": failure.message},
    }
