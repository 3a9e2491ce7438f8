"""What `nvidia-smi` says of the GPUs: memory in use, whose it is, and how they are connected. Parsing is pure."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLACK_MIB = 256
"""What a GPU may have in use above its earlier figure and still count as back: drivers keep a little."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB."""

    index: int
    name: str
    memory_mib: int | None
    used_mib: int | None
    driver: str


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU. `used_mib` is None where the driver does not tell."""

    pid: int
    used_mib: int | None


def ask(*arguments: str, timeout_s: float = 20.0) -> str | None:
    """What `nvidia-smi` answers; None where it is not there, does not answer in time or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def gpus() -> list[Gpu]:
    """The GPUs of this machine."""
    return parse_gpus(ask("--query-gpu=index,name,memory.total,memory.used,driver_version", *_CSV) or "")


def processes(devices: Sequence[str] = ()) -> list[GpuProcess]:
    """Processes that compute on a GPU, on one of `devices` where some are named.

    Inside a container those outside of it may not be listed.
    """
    only = [f"--id={','.join(devices)}"] if devices else []
    return parse_processes(ask("--query-compute-apps=pid,used_memory", *_CSV, *only) or "")


def topology() -> list[str]:
    """The matrix of connections, one line per GPU, as `nvidia-smi topo -m` draws it."""
    return parse_topology(ask("topo", "-m") or "")


def peers() -> list[str]:
    """Which GPU reads the memory of which, one line per GPU, as `nvidia-smi topo -p2p r` draws it."""
    rows = (line.strip() for line in _plain(ask("topo", "-p2p", "r") or ""))
    return [row for row in rows if re.match(r"GPU\d+\s", row) and "X" in row.split()]


def capabilities() -> dict[int, float]:
    """Compute capability by GPU, as in 9.0; empty where the driver does not tell."""
    return parse_capabilities(ask("--query-gpu=index,compute_cap", *_CSV) or "")


def memory_used() -> dict[int, int] | None:
    """MiB in use by GPU index; None without `nvidia-smi`."""
    answer = ask("--query-gpu=index,name,memory.total,memory.used,driver_version", *_CSV)
    if answer is None:
        return None
    return {gpu.index: gpu.used_mib for gpu in parse_gpus(answer) if gpu.used_mib is not None}


def is_back(before: Mapping[int, int], now: Mapping[int, int], slack_mib: int = SLACK_MIB) -> bool:
    """Whether no GPU has more memory in use than before, but for the slack."""
    return all(now.get(index, 0) <= used + slack_mib for index, used in before.items())


def wait_for(before: Mapping[int, int] | None, timeout_s: float, poll_s: float = 0.5) -> bool | None:
    """Whether memory in use came back within the time; None when it cannot be told."""
    if not before:
        return None
    deadline = time.monotonic() + timeout_s
    while (now := memory_used()) is not None:
        if is_back(before, now):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return None


_CSV = ("--format=csv,noheader,nounits",)


def parse_gpus(text: str) -> list[Gpu]:
    """The answer to `--query-gpu=index,name,memory.total,memory.used,driver_version`; other lines are passed over."""
    found = []
    for line in text.splitlines():
        # A name may hold a comma, the other columns do not.
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 5 and cells[0].isdigit():
            name = ", ".join(cells[1:-3])
            found.append(Gpu(int(cells[0]), name, _number(cells[-3]), _number(cells[-2]), cells[-1]))
    return found


def parse_processes(text: str) -> list[GpuProcess]:
    """The answer to `--query-compute-apps=pid,used_memory`."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [GpuProcess(int(row[0]), _number(row[1])) for row in rows if len(row) == 2 and row[0].isdigit()]


def parse_topology(text: str) -> list[str]:
    """The rows of GPUs, with their heading, of `nvidia-smi topo -m`; without its legend and colours."""
    lines = _plain(text)
    rows = [line for line in lines if re.match(r"GPU\d+\s", line)]
    heading = [line for line in lines if re.match(r"\s+GPU\d+\b", line)][:1]
    return heading + rows if rows else []


def parse_capabilities(text: str) -> dict[int, float]:
    """The answer to `--query-gpu=index,compute_cap`."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return {int(row[0]): float(row[1]) for row in rows if len(row) == 2 and re.fullmatch(r"\d+\.\d+", row[1])}


def _plain(text: str) -> list[str]:
    return [_ANSI.sub("", line).rstrip() for line in text.splitlines()]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
