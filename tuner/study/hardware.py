"""The facts of a machine that a measurement depends on, for the fingerprint of a study."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def hardware(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, usable cores, memory in GiB and GPUs, of which only `devices` where some are named.

    The same on every call on an unchanged machine. The driver is told where there is a GPU.
    """
    gpus, driver = _gpus(devices)
    found = {"cpu": _cpu(), "cores": _cores(), "memory_gib": _memory_gib(), "gpus": gpus}
    return {**found, "driver": driver} if driver else found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


def _gpus(devices: Sequence[str]) -> tuple[list[str], str]:
    """Names of the NVIDIA GPUs and their driver, as `nvidia-smi` tells; empty where it is not there or is silent."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    command += [f"--id={','.join(devices)}"] if devices else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return [], ""
    if answer.returncode != 0:
        return [], ""
    rows = [line.rpartition(", ") for line in answer.stdout.splitlines() if line.strip()]
    return [name.strip() for name, _, _ in rows], ", ".join(sorted({driver.strip() for _, _, driver in rows}))
