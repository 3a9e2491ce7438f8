"""How long the backends of `engine.collectives` take to add up, by size and number of ranks, on this machine.

Each rank is a process. A figure is the median time of a call over `--repeats` runs in turn (A B A B …), each of as many
calls as fit into a tenth of a second; the slowest rank counts. Besides calls back to back, there are calls with
`--between` microseconds of work before each, as in a model, where ranks do not arrive together.

    python -m benchmarks.allreduce --output benchmarks/results/allreduce_cpu.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.collectives.base import Place, backend

NAMES = ("shm", "gloo")
ROWS = (1, 8, 64)
WIDTHS = (576, 4096)
_RUN_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--between", type=float, default=100.0, help="microseconds of work between calls")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    before = os.getloadavg()[0]
    levels = []
    for ranks in map(int, given.ranks.split(",")):
        times = measure(ranks, given.repeats, given.between, getattr(torch, given.dtype))
        for (rows, width, between), by_name in times.items():
            medians = {name: statistics.median(runs) for name, runs in by_name.items()}
            level = {
                "ranks": ranks,
                "rows": rows,
                "width": width,
                "between_us": between,
                **{f"{name}_us": round(1e6 * value, 2) for name, value in medians.items()},
                "gloo_over_shm": round(medians["gloo"] / medians["shm"], 1),
            }
            levels.append(level)
            print(json.dumps(level), flush=True)
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before_and_after": [round(before, 1), round(os.getloadavg()[0], 1)],
        "dtype": given.dtype,
        "repeats": given.repeats,
        "levels": levels,
    }
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    ranks: int, repeats: int, between_us: float, dtype: torch.dtype
) -> dict[tuple[int, int, float], dict[str, list[float]]]:
    """Seconds per call of each run, by (rows, width, microseconds between) and backend."""
    place = Place(ranks)
    meetings = {name: backend(name).meeting(place) for name in NAMES}
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(1, ranks):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_follow, args=(theirs, rank, place, meetings, dtype), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    collectives = {name: backend(name).open(meetings[name], 0, place, 30.0) for name in NAMES}
    found: dict[tuple[int, int, float], dict[str, list[float]]] = {}
    for rows in ROWS:
        for width in WIDTHS:
            for between in (0.0, between_us):
                calls = dict.fromkeys(NAMES, 20)
                for repeat in range(repeats + 1):
                    for name in NAMES:
                        for pipe in pipes:
                            pipe.send((name, rows, width, between, calls[name]))
                        mine = _run(collectives[name], rows, width, between, calls[name], dtype)
                        slowest = max(mine, *(pipe.recv() for pipe in pipes))
                        if repeat == 0:  # a warm-up, which tells how many calls fit
                            calls[name] = max(20, min(2000, int(_RUN_S / (slowest + between * 1e-6))))
                        else:
                            found.setdefault((rows, width, between), {}).setdefault(name, []).append(slowest)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return found


def _follow(pipe: Connection, rank: int, place: Place, meetings: dict[str, Any], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    collectives = {name: backend(name).open(meetings[name], rank, place, 30.0) for name in NAMES}
    while (task := pipe.recv()) is not None:
        name, rows, width, between, calls = task
        pipe.send(_run(collectives[name], rows, width, between, calls, dtype))


def _run(collective: Any, rows: int, width: int, between_us: float, calls: int, dtype: torch.dtype) -> float:
    """Seconds per call, without the work between."""
    x = torch.zeros(rows, width, dtype=dtype)
    spent = 0.0
    for _ in range(calls):
        until = time.perf_counter() + between_us * 1e-6
        while time.perf_counter() < until:
            pass
        began = time.perf_counter()
        collective.all_reduce(x)
        spent += time.perf_counter() - began
    return spent / calls


if __name__ == "__main__":
    main()
