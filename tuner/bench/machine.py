"""What else the machine did during a window: other people's load, time the hypervisor took, clocks that were held down.

Linux only (`/proc`, `/sys`), and `nvidia-smi` for GPUs. A figure that cannot be read is None; no gate looks at it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

NS = 1_000_000_000
GPU_TIMEOUT_S = 5.0
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of `clocks_event_reasons.active` (NVML) that say a GPU does not run as it does in production. A power cap (0x4)
does not: a card at its limit is always under it."""

_QUERY = "--query-gpu=index,clocks_event_reasons.active"
_CSV = "--format=csv,noheader,nounits"


@dataclass(frozen=True)
class Reading:
    """Counters of this machine's usable cores at one instant, in seconds; `ours_s` is what this study computes.

    `throttled_s` is the longest time that any core's clock was held down for heat, `throttles` how often.
    """

    at_ns: int
    cores: int
    busy_s: float
    steal_s: float
    ours_s: float
    throttled_s: float | None
    throttles: int | None


@dataclass(frozen=True)
class Surroundings:
    """Between two readings: shares of all usable cores' time, and of the time that the hottest core was held down.

    `gpus` names each GPU that a look at it found slowed down, with the reason.
    """

    foreign: float | None = None
    steal: float | None = None
    throttled: float | None = None
    gpus: tuple[str, ...] = ()


def read(ours_s: Callable[[], float]) -> Reading | None:
    """The counters now; None without a `/proc/stat`. `ours_s` gives CPU seconds of the client and the server."""
    try:
        text = Path("/proc/stat").read_text()
        usable = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return None
    busy, steal = parse_stat(text, usable)
    folders = [Path(f"/sys/devices/system/cpu/cpu{core}/thermal_throttle") for core in sorted(usable)]
    spent = [ms for folder in folders if (ms := _number(folder / "core_throttle_total_time_ms")) is not None]
    counts = [count for folder in folders if (count := _number(folder / "core_throttle_count")) is not None]
    return Reading(
        at_ns=monotonic_ns(),
        cores=len(usable),
        busy_s=busy,
        steal_s=steal,
        ours_s=ours_s(),
        throttled_s=max(spent) / 1000 if spent else None,
        throttles=sum(counts) if counts else None,
    )


def parse_stat(text: str, usable: set[int]) -> tuple[float, float]:
    """Seconds that these cores were busy for this machine, and that the hypervisor took from them (`/proc/stat`)."""
    ticks = os.sysconf("SC_CLK_TCK")
    busy = steal = 0
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not (match := re.fullmatch(r"cpu(\d+)", name)) or int(match[1]) not in usable:
            continue
        user, nice, system, _idle, _wait, irq, soft, stolen, *_guest = (*map(int, rest.split()), *[0] * 8)[:10]
        busy += user + nice + system + irq + soft  # guests are part of user and nice
        steal += stolen
    return busy / ticks, steal / ticks


def between(first: Reading | None, last: Reading | None, gpus: tuple[str, ...] = ()) -> Surroundings:
    """What happened from one reading to the other."""
    if first is None or last is None or last.at_ns <= first.at_ns:
        return Surroundings(gpus=gpus)
    wall_s = (last.at_ns - first.at_ns) / NS
    foreign_s = (last.busy_s - first.busy_s) - (last.ours_s - first.ours_s)
    throttled = None
    if last.throttled_s is not None and first.throttled_s is not None:
        throttled = max(0.0, last.throttled_s - first.throttled_s) / wall_s
    return Surroundings(
        foreign=max(0.0, foreign_s) / (wall_s * last.cores),
        steal=max(0.0, last.steal_s - first.steal_s) / (wall_s * last.cores),
        throttled=throttled,
        gpus=gpus,
    )


async def slowed_gpus(devices: Sequence[str] = ()) -> tuple[str, ...]:
    """Each GPU whose clock is held down right now, with the reason; none where there is no `nvidia-smi`.

    Of `devices` alone, where some are named: the others are not the server's.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    only = [f"--id={','.join(devices)}"] if devices else []
    process = await asyncio.create_subprocess_exec(
        program, _QUERY, _CSV, *only, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(GPU_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ()
    except asyncio.CancelledError:
        process.kill()
        raise
    return parse_slowdowns(output.decode("utf-8", "replace"))


def parse_slowdowns(answer: str) -> tuple[str, ...]:
    """From lines such as `0, 0x0000000000000040`; what is no such line (an old driver says so) tells nothing."""
    found = []
    for line in answer.splitlines():
        if match := re.fullmatch(r"\s*(\d+)\s*,\s*0x([0-9a-fA-F]+)\s*", line):
            bits = int(match[2], 16)
            if reasons := [name for bit, name in SLOWDOWNS.items() if bits & bit]:
                found.append(f"GPU {match[1]}: {', '.join(reasons)}")
    return tuple(found)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
