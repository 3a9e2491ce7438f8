"""One process of a `Fleet`: `python -m tuner.bench.fleet_worker`, spoken to over its standard input and output."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import signal
import sys
import time
from time import monotonic_ns

from tuner.bench.client import Exchange, LoadClient
from tuner.bench.fleet import LENGTH, NS, Change, Job, Start, Stop, StreamState, Update
from tuner.bench.pulse import LagMeter
from tuner.bench.requests import request_sequence

UPDATE_S = 0.05


def main() -> None:
    """Load as told, until told to stop or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    pipe = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not stand between updates
    if sys.platform == "win32":
        asyncio.run(_run(pipe))
        return
    import uvloop

    uvloop.run(_run(pipe))


async def _run(pipe: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out, told = await loop.connect_write_pipe(_Out, os.fdopen(pipe, "wb"))
    job = await _message(reader)
    if not isinstance(job, Job):
        return
    worker = _Worker(job, out)
    gc.disable()  # a collection would be stamped onto whatever arrived during it
    worker.update()  # it is ready
    ticking: asyncio.Task[None] | None = None
    while (message := await _message(reader)) is not None:
        if isinstance(message, Start):
            ticking = asyncio.create_task(worker.load(message))
        elif isinstance(message, Stop):
            break
    if ticking is not None:
        ticking.cancel()
    worker.stop()
    out.close()
    await told.closed.wait()


class _Out(asyncio.BaseProtocol):
    """The pipe to the parent. Written without waiting: a parent that is late must not stamp its delay onto events."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        """All is written, or the parent is gone."""
        self.closed.set()


async def _message(reader: asyncio.StreamReader) -> object:
    """The next one; None when the parent is gone."""
    try:
        head = await reader.readexactly(LENGTH.size)
        return pickle.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
    except asyncio.IncompleteReadError:
        return None


class _Worker:
    def __init__(self, job: Job, out: asyncio.WriteTransport) -> None:
        self._job, self._out = job, out
        requests = request_sequence(
            job.target,
            job.sampling,
            job.prompts,
            concurrency=job.concurrency,
            seed=job.seed,
            api_key=job.api_key,
            earlier=job.earlier,
        )
        mine = itertools.islice(requests, job.index, None, job.processes)
        self._client = LoadClient(job.target, len(range(job.index, job.concurrency, job.processes)), mine)
        self._lag = LagMeter()
        self._told: dict[int, int] = {}
        self._read = self._lags_read = 0

    async def load(self, start: Start) -> None:
        """Start the streams and report, again and again."""
        job = self._job
        first_s = (start.at_ns - monotonic_ns()) / NS
        places = range(job.index, job.concurrency, job.processes)
        self._client.start_after([max(0.0, first_s + start.step_s * place) for place in places])
        while True:
            await asyncio.sleep(UPDATE_S)
            self.update()

    def stop(self) -> None:
        """Close and tell the rest."""
        self._client.stop()
        self._lag.stop()
        self.update()

    def update(self) -> None:
        """Hand over what is new."""
        finished = tuple(self._change(exchange, True) for exchange in self._client.finished[self._read :])
        self._read += len(finished)
        current = [stream.current for stream in self._client.streams]
        lags = self._lag.samples[self._lags_read :]
        self._lags_read += len(lags)
        update = Update(
            at_ns=monotonic_ns(),
            cpu_s=time.thread_time(),
            lags=tuple(lags),
            finished=finished,
            streams=tuple(
                StreamState(s.current.number if s.current else None, s.completed, s.connections, s.connect_failures)
                for s in self._client.streams
            ),
            under_way=tuple(self._change(exchange, False) for exchange in current if exchange is not None),
        )
        data = pickle.dumps(update)
        self._out.write(LENGTH.pack(len(data)) + data)

    def _change(self, exchange: Exchange, ended: bool) -> Change:
        start = min(self._told.get(exchange.number, 0), len(exchange.events))
        self._told[exchange.number] = len(exchange.events)
        if ended:
            del self._told[exchange.number]
        return Change(
            number=exchange.number,
            prompt_id=exchange.prompt_id,
            max_tokens=exchange.max_tokens,
            sent_ns=exchange.sent_ns,
            end_ns=exchange.end_ns,
            idle_ns=exchange.idle_ns,
            status=exchange.status,
            end=exchange.end,
            error=exchange.error,
            received=exchange.received,
            start=start,
            events=tuple(exchange.events[start:]),
        )


if __name__ == "__main__":
    main()
