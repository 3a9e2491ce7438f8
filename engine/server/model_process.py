"""The model process as the frontend sees it: started, ready, and, some day, ended for a reason.

Neither process outlives the other. The model process is killed by the kernel when the frontend dies (Linux), and
sees its connection close everywhere; its own end reaches the frontend as `ended`, with the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine.config import EngineConfig
from engine.ipc.channel import Channel, socket_pair
from engine.ipc.lifetime import die_with
from engine.ipc.messages import Fatal, Ready
from engine.logs import configure_logging

log = logging.getLogger(__name__)

_EXIT_S = 5.0
"""A process that has closed its connection, or was told to exit, has this long before it is killed."""


class ModelProcess:
    """One spawned process that speaks `engine.ipc.messages`.

    Args:
        worker: the process's entry point as "module:function", called with (config, connection); only imported there,
            so that the frontend loads no torch.
        on_message: called with each message but `Ready` and `Fatal`.

    `ready` is done when construction has finished. `ended` is done when the process has exited and been reaped; its
    result is the cause in one sentence. Await only what is shielded from cancellation.
    """

    def __init__(self, config: EngineConfig, worker: str, on_message: Callable[[Any], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.fatal: Fatal | None = None
        self._on_message = on_message
        self._config = config
        self._worker = worker
        self._channel: Channel | None = None
        self._closed = asyncio.Event()
        self._exited = asyncio.Event()
        self._broken: str | None = None

    async def start(self) -> None:
        """Starts the process; returns before it is ready."""
        ours, theirs = socket_pair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_worker, args=(self._worker, self._config, theirs, os.getpid()), name="model process"
        )
        self._process.start()
        theirs.close()  # else the connection would not close when the process dies
        self._channel = await Channel.open(ours, self._receive, self._connection_ended)
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._process_ended)
        self._reaper = asyncio.create_task(self._reap())

    @property
    def pid(self) -> int | None:
        """Of the started process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Queues a message to the process."""
        assert self._channel is not None
        self._channel.send(message)

    async def stop(self, patience_s: float) -> None:
        """Waits for the process to exit, and kills it after `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                await self._exited.wait()
        except TimeoutError:
            log.warning("the model process did not exit within %g s; killing it", patience_s)
            self._process.kill()
        await asyncio.shield(self.ended)

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    def _receive(self, message: Any) -> None:
        if isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message)
        elif isinstance(message, Fatal):
            self.fatal = message
        else:
            self._on_message(message)

    def _connection_ended(self, reason: str | None) -> None:
        self._broken = reason
        self._closed.set()

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._exited.set()

    async def _reap(self) -> None:
        """Waits for both signs of the end. Either can come first, and last words arrive before the connection's."""
        signs = [asyncio.create_task(self._closed.wait()), asyncio.create_task(self._exited.wait())]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        killed = False
        if not self._exited.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _EXIT_S)
            if not self._exited.is_set():
                killed = True
                self._process.kill()
                await self._exited.wait()
        if not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), 1.0)
        for sign in signs:
            sign.cancel()
        self._process.join()
        assert self._channel is not None
        self._channel.close()
        self.ended.set_result(self._cause(killed))

    def _cause(self, killed: bool) -> str:
        if self.fatal is not None:
            return f"model process failed: {self.fatal.cause}"
        if self._broken:
            return self._broken
        if killed:
            return f"model process closed its connection but did not exit within {_EXIT_S:g} s; it was killed"
        status = self._process.exitcode
        if status is not None and status < 0:
            hint = "; the kernel's out-of-memory killer does that (see dmesg)" if status == -signal.SIGKILL else ""
            return f"model process ended by signal {-status} ({signal.Signals(-status).name}){hint}"
        return f"model process ended with status {status} without saying why"


def _run_worker(worker: str, config: EngineConfig, connection: Connection, parent: int) -> None:
    """The first function of the model process."""
    die_with(parent)
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; the frontend then drains and says `Shutdown`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(config.log_level, config.log_format)
    module, _, function = worker.partition(":")
    try:
        status = getattr(importlib.import_module(module), function)(config, connection)
    except BaseException as error:  # noqa: BLE001 - carried to the frontend, which reports it and ends
        with contextlib.suppress(OSError):
            connection.send(Fatal(f"{type(error).__name__}: {error}", traceback.format_exc()))
        status = 1
    connection.close()
    sys.exit(status)
