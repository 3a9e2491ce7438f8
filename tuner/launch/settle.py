"""Whether what a stopped server left is gone by now: decided before the next launch, which must not pay for it."""

from __future__ import annotations

import time

from tuner.launch import container, gpu, shm
from tuner.launch.processes import look
from tuner.launch.server import StopReport

SETTLE_S = 60.0
"""How long a machine may take to give back what a server held, beyond what stopping it has waited already."""


def settle(report: StopReport, timeout_s: float = SETTLE_S, poll_s: float = 0.5) -> tuple[str, ...]:
    """Waits until nothing of what the report names is left; what still is, each with what to do about it.

    A port that is still taken is waited for and then let be: the next launch has another one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = still_left(report)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(poll_s)


def still_left(report: StopReport) -> tuple[str, ...]:
    """What of the report is left now; segments and containers are tried once more."""
    found = []
    pids = [pid for pid in report.leftovers if (process := look(pid)) is not None and not process.zombie]
    if pids:
        named = ", ".join(map(str, pids))
        found.append(
            f"processes {named} cannot be ended, and may hold memory or a device: see /proc/PID/wchan, or reboot"
        )
    if kept := [name for name in report.containers_left if not container.remove(report.runtime, name, gone_s=0)]:
        named = ", ".join(name[:12] for name in kept)
        found.append(
            f"containers {named} cannot be removed: see `{report.runtime} rm --force`, or restart {report.runtime}"
        )
    there = shm.snapshot()
    _, segments = shm.remove([there[name] for name in report.segments_left if name in there])
    if segments:
        found.append(f"shared memory {', '.join(segments)} in {shm.FOLDER} cannot be removed: remove it as its owner")
    if report.gpu_memory_back is False and report.gpu_before and (now := gpu.memory_used()) is not None:
        more = {i: now.get(i, 0) - used for i, used in report.gpu_before.items()}
        held = [f"GPU {i} holds {mib} MiB more" for i, mib in more.items() if mib > gpu.SLACK_MIB]
        if held:
            found.append(
                f"{', '.join(held)} than before the launch: another program uses it (`tuner doctor` lists them), or "
                "the driver has not let go; end that program, or reset the GPU"
            )
    return tuple(found)
