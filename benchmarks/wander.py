"""Whether longer windows would make figures steadier here: `python -m benchmarks.wander --output FILE`.

One server under a constant load, its tokens counted by the second. For each length of a window: how much the mean of
one window differs from that of the next (Allan deviation of the log, the SD of a single window as its neighbour sees
it). Where speed wanders by itself this stays level from some length on, and only more pairs help; chance alone would
halve it with four times the length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

PORT = 18765
WORDS = ["apple", "river", "stone", "window", "garden", "market", "engine", "light", "paper", "summer"]
LENGTHS = (1, 2, 4, 8, 15, 30)
SKIPPED_S = 5
READY_S = 120.0


async def _load(server: subprocess.Popen[bytes], streams: int, seconds: float) -> list[float]:
    """Arrival of each event with text, a token each without speculation, in seconds from the start."""
    stamps: list[float] = []
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=streams)) as client:
        until = time.monotonic() + READY_S
        while True:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not come up on port {PORT}")
            try:
                if (await client.get(f"http://127.0.0.1:{PORT}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
        began = time.monotonic()

        async def stream(seed: int) -> None:
            chosen = random.Random(seed)
            while time.monotonic() < began + seconds:
                text = "Write about " + " ".join(chosen.choices(WORDS, k=12))
                body = {
                    "model": "smollm2-135m",
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 64,
                    "temperature": 0,
                    "stream": True,
                }
                async with client.stream("POST", url, json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {") and _says(json.loads(line.removeprefix("data: "))):
                            stamps.append(time.monotonic() - began)

        await asyncio.gather(*(stream(seed) for seed in range(streams)))
    return stamps


def _says(event: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in event["choices"])


def wander(series: list[float]) -> dict[str, float]:
    """Length of a window in seconds → Allan deviation of the log of its mean, from a series by the second."""
    found = {}
    for length in LENGTHS:
        count = len(series) // length
        if count < 4:
            break
        means = np.array(series[: count * length]).reshape(count, length).mean(1)
        steps = np.diff(np.log(means))
        found[str(length)] = round(math.sqrt(float(np.mean(steps**2)) / 2), 4)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    serve = [sys.executable, "-m", "engine", "serve", "--model", "smollm2-135m", "--host", "127.0.0.1"]
    server = subprocess.Popen([*serve, "--port", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        stamps = asyncio.run(_load(server, given.streams, given.seconds))
    finally:
        server.terminate()
        server.wait()
    edges = np.arange(SKIPPED_S, int(given.seconds))
    series = np.histogram(stamps, edges)[0].tolist()
    if not all(series):
        raise SystemExit(f"no token in {series.count(0)} of {len(series)} seconds: the server stood still")
    document = {"streams": given.streams, "allan_deviation_by_window_s": wander(series), "tokens_by_second": series}
    given.output.write_text(json.dumps(document) + "\n")
    print(json.dumps(document["allan_deviation_by_window_s"]))


if __name__ == "__main__":
    main()
