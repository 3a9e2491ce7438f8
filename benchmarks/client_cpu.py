"""What the load client costs: CPU per streamed event, and whether it keeps up, against a server that does no work.

    python benchmarks/client_cpu.py [--streams 64,256] [--repeats 3] [--seconds 4]

The server runs in its own process and sends one chunk to every stream each 20 ms, as a decode loop does. CPU is that
of the client's thread in the window, everything included: timers, watching, progress, sending the next requests.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from tuner.bench.block import measure_block
from tuner.bench.plan import WindowPlan
from tuner.bench.prompts import load_prompts
from tuner.records import Block

STEP_S = 0.02


def measure(port: int, streams: int, seconds: float) -> Block:
    outcome = measure_block(
        f"http://127.0.0.1:{port}",
        model="null",
        prompts=load_prompts("mixed", split="tuning"),
        concurrency=streams,
        role="screen",
        max_tokens=100,
        temperature=0.0,
        plan=WindowPlan(ramp_s=0.5, warmup_s=2.5, steady_span_s=0.5, window_s=seconds, window_requests=0.0),
        seed=0,
    )
    if outcome.block is None:
        raise SystemExit(f"no block: {outcome.failure}")
    return outcome.block


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    command = [sys.executable, "-m", "tuner.bench.null_server", f'{{"step_s": {STEP_S}}}']
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    port = int(server.stdout.readline())
    heads = ("events/s", "µs CPU per event", "CPU %", "chunk gap p99 ms", "in flight / streams")
    print("streams  " + " ".join(f"{head:<21}" for head in heads))
    try:
        for streams in (int(part) for part in given.streams.split(",")):
            blocks = [measure(port, streams, given.seconds) for _ in range(given.repeats)]
            chunks = [b.counters["chunks"] for b in blocks]
            cpu = [b.counters["client_cpu_s"] for b in blocks]
            cells = (
                spread([n / b.window_s for n, b in zip(chunks, blocks, strict=True)], 0),
                spread([1e6 * c / n for c, n in zip(cpu, chunks, strict=True)]),
                spread([100 * c / b.window_s for c, b in zip(cpu, blocks, strict=True)]),
                spread([b.chunk_gap_ms.p99 or 0.0 for b in blocks]),
                spread([b.achieved_concurrency / streams for b in blocks], 4),
            )
            print(f"{streams:<8} " + " ".join(f"{cell:<21}" for cell in cells))
    finally:
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    main()
