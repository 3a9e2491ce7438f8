"""What HTTP, text and two processes add to a decode step, next to the engine alone.

The engine alone is `engine bench`; the server is asked by one client over a plain socket, one stream after another at
each level, and says itself how long its forwards took. Both run in turn, several times.

    python benchmarks/http_overhead_cpu.py [--streams 1,8] [--tokens 200] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PROMPT = (
    "Once upon a time, in a village by the sea, there lived a clockmaker who could not tell the time. Every morning "
)


def alone(streams: int, tokens: int) -> float:
    """Milliseconds a step, in one process."""
    command = [sys.executable, "-m", "engine", "bench", "--streams", str(streams), "--output-tokens", str(tokens)]
    done = subprocess.run([*command, "--prompt-tokens", "24"], capture_output=True, text=True, check=True)
    level = json.loads(done.stdout)["levels"][0]
    return 1e3 * streams / float(level["decode_tokens_per_s"])


class Server:
    """The bundled server on a free port."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "engine", "serve", "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening on http://([\d.]+):(\d+)", line):
                self.address = (found[1], int(found[2]))
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def counters(self) -> dict[str, float]:
        """The model process's totals."""
        url = f"http://{self.address[0]}:{self.address[1]}/server_info"
        with urllib.request.urlopen(url) as answer:
            found: dict[str, float] = json.load(answer)["counters"]
        return found

    def stream(self, tokens: int, number: int) -> list[float]:
        """When each event came."""
        body = json.dumps({"prompt": f"{number} {PROMPT}", "max_tokens": tokens, "stream": True, "ignore_eos": True,
                           "temperature": 0}).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        times = []
        with socket.create_connection(self.address) as client:
            client.sendall(head.encode() + body)
            while part := client.recv(65536):
                times += [time.perf_counter()] * part.count(b"data: {")
        return times


def served(server: Server, streams: int, tokens: int) -> tuple[float, float]:
    """Milliseconds a step as the client sees it, and the model's forward alone."""
    before = server.counters()
    results: list[list[float]] = [[] for _ in range(streams)]

    def one(i: int) -> None:
        results[i] = server.stream(tokens, i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = server.counters()
    first, last = max(times[0] for times in results), min(times[-1] for times in results)
    steps = sum(sum(first < at <= last for at in times) for times in results) / streams
    forward = after["engine_forward_seconds_total"] - before["engine_forward_seconds_total"]
    return 1e3 * (last - first) / steps, 1e3 * forward / (after["engine_rounds_total"] - before["engine_rounds_total"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    for streams in map(int, given.streams.split(",")):
        figures = []
        for _ in range(given.rounds):
            bare = alone(streams, given.tokens)
            server = Server()
            try:
                served(server, streams, 20)
                step, forward = served(server, streams, given.tokens)
            finally:
                server.process.terminate()
                server.process.wait()
            figures.append((bare, step, forward))
        bare, step, forward = (statistics.median(column) for column in zip(*figures, strict=True))
        shares = sorted(1 - one[2] / one[1] for one in figures)
        row = {
            "streams": streams,
            "engine_step_ms": round(bare, 2),
            "served_step_ms": round(step, 2),
            "served_forward_ms": round(forward, 2),
            "overhead_share": round(1 - forward / step, 3),
            "overhead_share_range": [round(shares[0], 3), round(shares[-1], 3)],
        }
        print(json.dumps(row))
        rows.append(row)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
