"""`tuner doctor`: whether this machine can run a study, and what earlier ones left behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.console import say_json

if TYPE_CHECKING:
    from tuner.launch.processes import Process

LOOK_S = 1.0
"""How long other programs' load is watched."""

QUIET = 0.05
"""Share of all cores' time that others may take on a machine that is called quiet."""

MIN_DISK_GIB = 1.0
"""Below this a study is likely to meet a full disk: one launch alone may log 96 MiB."""


def command(
    clean: Annotated[
        bool, typer.Option("--clean", help="End and remove what earlier studies left behind, by our marker alone.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the machine, its engines and leftovers of earlier studies; ends with 3 if something is broken."""
    from tuner.launch.leftovers import clean as clear
    from tuner.launch.leftovers import leftovers

    found = leftovers()
    problems = clear(found) if clean else []
    still = leftovers() if clean else found
    problems += [
        f"launch {left.launch} of a dead tuner (study {left.study}) still runs as {left.named}; "
        "clear it with: tuner doctor --clean"
        for left in still
    ]
    facts = {**_machine(problems), "load": _load(), "gpus": _gpus(problems), "engines": _engines(problems)}
    facts |= {"leftovers": [asdict(left) for left in still], "cleaned": len(found) - len(still), "problems": problems}
    if as_json:
        say_json(facts)
    else:
        _print(facts)
    if problems:
        raise typer.Exit(3)


def _machine(problems: list[str]) -> dict[str, Any]:
    from tuner.launch.ports import free_port, is_free
    from tuner.study.hardware import hardware
    from tuner.study.names import STUDIES

    place = _existing(STUDIES)
    free_gib = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        problems.append(f"{place.resolve()} cannot be written, and studies are kept there")
    if free_gib < MIN_DISK_GIB:
        problems.append(
            f"only {free_gib:.1f} GiB are free at {place.resolve()}; a study needs {MIN_DISK_GIB:g} or more"
        )
    port = free_port()
    if not is_free(port):
        problems.append("no free port was found on 127.0.0.1, so no server can be started")
    facts = {name: value for name, value in hardware().items() if name != "gpus"}
    return {**facts, "studies": str(place), "disk_free_gib": round(free_gib, 1), "free_port": port}


def _load() -> dict[str, Any]:
    """What other programs and the hypervisor take of the cores just now, as shares, and what that means for a study."""
    from tuner.bench import machine
    from tuner.bench.gates import MAX_FOREIGN_LOAD, MAX_STEAL
    from tuner.launch.processes import snapshot

    before, began = snapshot(), time.monotonic()
    first = machine.read(time.process_time)
    time.sleep(LOOK_S)
    seen = machine.between(first, machine.read(time.process_time))
    busiest = _busiest(before, time.monotonic() - began)
    said = [
        f"{name} {100 * share:.0f} % of the cores' time"
        for name, share in (("other programs take", seen.foreign), ("the hypervisor takes", seen.steal))
        if share is not None and share > QUIET
    ]
    means = ""
    if (seen.foreign or 0.0) > MAX_FOREIGN_LOAD or (seen.steal or 0.0) > MAX_STEAL:
        means = (
            f"{' and '.join(said)}: blocks measured now would be invalid (limits {100 * MAX_FOREIGN_LOAD:.0f} % and "
            f"{100 * MAX_STEAL:.0f} %), and a study would stop. End what runs here, or wait for it"
        )
    elif said:
        means = (
            f"{' and '.join(said)}: it shows as noise in every figure, and intervals become wide; limits of a valid "
            f"block are {100 * MAX_FOREIGN_LOAD:.0f} % and {100 * MAX_STEAL:.0f} %"
        )
    return {"foreign": seen.foreign, "steal": seen.steal, "busiest": busiest if means else [], "means": means}


def _busiest(before: Mapping[int, Process], seconds: float) -> list[str]:
    """The programs that have computed most since then, with their shares of one core."""
    from tuner.launch.processes import snapshot

    then = {process.key: process.cpu_s for process in before.values()}
    spent = {
        process.pid: process.cpu_s - then[process.key]
        for process in snapshot().values()
        if process.key in then and process.pid != os.getpid()
    }
    first = sorted(((used, pid) for pid, used in spent.items() if used > QUIET * seconds), reverse=True)[:3]
    return [f"process {pid} ({_name(pid)}) {100 * used / seconds:.0f} %" for used, pid in first]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "ended since"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.resolve().parents) if folder.is_dir())


def _gpus(problems: list[str]) -> dict[str, Any]:
    from tuner.launch import gpu
    from tuner.launch.strangers import strangers

    gpus = gpu.gpus()
    problems += [
        f"a GPU is in use: process {one.pid} holds {one.used_mib or 'unknown'} MiB, and no study starts beside it; "
        "wait for it, end it, or keep studies to other GPUs (engine.devices)"
        for one in (strangers(but_ours=True) if gpus else ())
    ]
    return {
        "list": [asdict(one) for one in gpus],
        "capabilities": gpu.capabilities() if gpus else {},
        "topology": gpu.topology() if gpus else [],
        "peers": gpu.peers() if len(gpus) > 1 else [],
        "processes": [asdict(one) for one in gpu.processes()] if gpus else [],
    }


def _engines(problems: list[str]) -> dict[str, str | None]:
    """Kind → version of what can be started here; None when it is not found."""
    from tuner.engines.base import get_engine
    from tuner.errors import EnvironmentBroken
    from tuner.launch import container

    found: dict[str, str | None] = {}
    try:
        found["bundled"] = get_engine("bundled").version()
    except EnvironmentBroken as error:
        found["bundled"] = None
        problems.append(str(error))
    for kind, program in (("sglang", "sglang"), ("vllm", "vllm"), ("llama_server", "llama-server")):
        found[kind] = None
        if shutil.which(program):
            try:
                found[kind] = get_engine(kind).version()
            except EnvironmentBroken as error:
                # Only a study of this engine needs it, and one may name another program.
                found[kind] = f"cannot be used: {error}"
    for runtime in container.RUNTIMES:
        found[runtime] = None
        if shutil.which(runtime):
            try:
                found[runtime] = container.version(runtime)
            except EnvironmentBroken as error:
                # Only a study with a container needs it, and it says so itself.
                found[runtime] = f"cannot be used: {str(error).partition(': ')[2].partition('. ')[0]}"
    return found


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    row("processor", f"{facts['cpu']}, {facts['cores']} usable cores")
    row("memory", f"{facts['memory_gib']} GiB")
    load = facts["load"]
    if load["foreign"] is not None:
        row("load", f"{100 * load['foreign']:.0f} % of the cores by other programs, over {LOOK_S:g} s")
    row("studies", f"{facts['studies']}: {facts['disk_free_gib']} GiB free")
    row("port", f"{facts['free_port']} is free")
    gpus = facts["gpus"]
    for one in gpus["list"]:
        used = f"{one['used_mib']} of {one['memory_mib']} MiB in use"
        known = gpus["capabilities"].get(one["index"])
        kind = f", compute capability {known}" if known else ""
        row(f"GPU {one['index']}", f"{one['name']}{kind}, {used}, driver {one['driver']}")
    for line in gpus["topology"] if len(gpus["list"]) > 1 else ():
        row("", line.expandtabs(8))
    if any(word not in ("X", "OK") for line in gpus["peers"] for word in line.split()[1:]):
        row("", "not every GPU reads the others' memory (nvidia-smi topo -p2p r)")
    for process in gpus["processes"]:
        row("on a GPU", f"process {process['pid']}, {process['used_mib']} MiB")
    if not gpus["list"]:
        row("GPUs", "none that nvidia-smi knows of")
    for kind, version in facts["engines"].items():
        row(kind, version or "not found")
    for left in facts["leftovers"]:
        holds = "; ".join(
            f"{name} {', '.join(map(str, left[name]))}" for name in ("pids", "ports", "segments") if left[name]
        )
        holds = "; ".join(
            [*filter(None, [holds]), *(f"{runtime} container {n[:12]}" for runtime, n in left["containers"])]
        )
        row("leftover", f"study {left['study']}, launch {left['launch']}: {holds}")
    if facts["cleaned"]:
        row("cleaned", f"{facts['cleaned']} launches of dead tuners")
    for problem in facts["problems"]:
        row("broken", problem)
    if load["means"]:
        row("not quiet", load["means"])
        if load["busiest"]:
            row("", f"busiest, of one core: {', '.join(load['busiest'])}")
    elif not facts["problems"]:
        row("healthy", "nothing is in the way of a study")
    Console(width=None if Console().is_terminal else 120).print(table)
