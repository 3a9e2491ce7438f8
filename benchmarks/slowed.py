"""Runs a command and lets it stand still for a share of the time: `python -m benchmarks.slowed --share 0.1 -- COMMAND`.

Every 20 ms all processes of its group are stopped for that share and continued: a slow-down whose size is known, of a
server that knows nothing of it. Ends with the command; signals to end are passed on. `--label` changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.02


def family(root: int) -> list[int]:
    """A process and all its living descendants."""
    found, at = [root], 0
    while at < len(found):
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{found[at]}/task")
            for task in tasks.iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        at += 1
    return found


def send(pids: list[int], number: int) -> None:
    """To each that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--label", default="")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    process = subprocess.Popen(given.command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: process.send_signal(got))
    if not given.share:
        return process.wait()
    looked = 0.0
    pids: list[int] = []
    while process.poll() is None:
        if time.monotonic() - looked > 1:
            looked, pids = time.monotonic(), family(process.pid)
        send(pids, signal.SIGSTOP)
        time.sleep(PERIOD_S * given.share)
        send(pids, signal.SIGCONT)
        time.sleep(PERIOD_S * (1 - given.share))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
