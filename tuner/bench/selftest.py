"""What the load client can take on this machine: events a second of one process, against a server that does no work."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import time

from tuner.bench.client import LoadClient, Target
from tuner.bench.prompts import Prompt
from tuner.bench.requests import Sampling, request_sequence
from tuner.errors import EnvironmentBroken

STREAMS = 32
STEP_S = 0.005
SETTLE_S = 0.4
WINDOW_S = 1.0
START_S = 30.0


@functools.cache
def client_ceiling() -> float:
    """Events a second that one process of the load client could take if it did nothing else; measured once.

    Events per CPU second of the client's thread, at a load that it carries easily: beside a server on the same cores
    its saturation could not be told from the server's. Nothing else should be measured meanwhile; it takes about two
    seconds.

    Raises:
        EnvironmentBroken: the null server does not start, or sends nothing.
    """
    options = json.dumps({"step_s": STEP_S})
    argv = [sys.executable, "-m", "tuner.bench.null_server", options]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.strip().isdigit():
                raise EnvironmentBroken("the load client's self-test could not start its null server; nothing was sent")
            found = asyncio.run(_measure(Target.parse(f"http://127.0.0.1:{line.strip()}")))
        finally:
            assert server.stdin is not None
            server.stdin.close()  # the null server ends with it
            try:
                server.wait(5)
            except subprocess.TimeoutExpired:
                server.kill()
    return found


async def _measure(target: Target) -> float:
    sampling = Sampling("null", 10**6, 0.0)
    prompts = [Prompt("self-test", "chat", "Say anything.")]
    requests = request_sequence(target, sampling, prompts, concurrency=STREAMS, seed=0, api_key=None)
    client = LoadClient(target, STREAMS, requests)
    client.start(0.0)
    try:
        await asyncio.sleep(SETTLE_S)
        before, cpu = _events(client), time.thread_time()
        await asyncio.sleep(WINDOW_S)
        seconds = time.thread_time() - cpu
        events = _events(client) - before
    finally:
        client.stop()
    if events < 1 or seconds <= 0:
        raise EnvironmentBroken("the load client's self-test got nothing from its null server")
    return events / seconds


def _events(client: LoadClient) -> int:
    return sum(data.count(b"data: {") for exchange in client.exchanges() for _, data in exchange.events)
