"""Brings both processes up, serves, and takes both down; the cause of a failure is the last thing in the log."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import uvicorn

from engine.config import EngineConfig
from engine.errors import EngineError, TokenizerError
from engine.ipc.messages import Ready
from engine.model.source import ModelSource, resolve
from engine.server.app import build_app
from engine.server.client import EngineClient
from engine.server.connection import Connection, raise_file_limit
from engine.server.errors import connection_closed
from engine.server.listener import bind, unavailable, url_of
from engine.server.metrics import Metrics
from engine.server.model_process import ModelProcess
from engine.server.service import Service
from engine.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

MODEL_WORKER = "engine.worker:main"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FAREWELL_S = 2.0
"""After draining, or after a failure, clients have this long to take their error."""


def serve(config: EngineConfig, worker: str = MODEL_WORKER) -> int:
    """Serves until SIGTERM or SIGINT (exit status 0) or until something fails (1; 2 for wrong settings).

    Args:
        config: the settings, already free of `problems()`.
        worker: the model process's entry point, "module:function" (see `ModelProcess`).
    """
    try:
        listener = bind(config.host, config.port)
        with contextlib.closing(listener):
            source = resolve(config.model)
            _warn_if_exposed(config)
            return _run(_Server(config, source, listener, worker).run())
    except EngineError as error:
        log.error("%s", error)
        return error.exit_code


def _run(main: Coroutine[Any, Any, int]) -> int:
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


def _warn_if_exposed(config: EngineConfig) -> None:
    with contextlib.suppress(ValueError):
        if not config.api_key and not ipaddress.ip_address(config.host).is_loopback:
            log.warning("listening beyond this machine (%s) without an API key", config.host)


class _Server:
    def __init__(self, config: EngineConfig, source: ModelSource, listener: socket.socket, worker: str) -> None:
        self._config = config
        self._source = source
        self._listener = listener
        self._worker = worker
        self._signals = 0
        self._failure: str | None = None
        self._http: uvicorn.Server | None = None
        self._wake = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._model = ModelProcess(self._config, self._worker, lambda message: self._client.receive(message))
        self._metrics = Metrics()
        most = self._config.max_running_requests + self._config.max_waiting_requests
        self._client = EngineClient(self._model, self._metrics.generated_tokens.inc, most)
        await self._model.start()
        log.info("model process %d loads %s from %s", self._model.pid, self._source.name, self._source.path)
        self._model.ended.add_done_callback(lambda ended: self._on_model_ended(ended.result()))
        try:
            tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, self._source))
            tokenizer.add_done_callback(self._on_loaded)
            self._model.ready.add_done_callback(lambda _: self._wake.set())
            while not (self._stopping or (self._model.ready.done() and tokenizer.done())):
                await self._wake.wait()
                self._wake.clear()
            if not self._stopping:
                await self._serve(self._model.ready.result(), tokenizer.result())
        finally:
            await self._take_down()
            for number in _SIGNALS:  # one more, while Python ends, would change the exit status
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
        return self._report()

    @property
    def _stopping(self) -> bool:
        return self._failure is not None or self._signals > 0

    async def _serve(self, ready: Ready, tokenizer: Tokenizer) -> None:
        service = Service(
            config=self._config,
            port=self._listener.getsockname()[1],
            name=self._config.served_model_name or self._source.name,
            client=self._client,
            tokenizer=tokenizer,
            context_length=_longest(ready.info["effective"]),
            vocab_size=_vocabulary(tokenizer, ready.info["model"]["vocab"]),
            metrics=self._metrics,
            created=int(time.time()),
            on_bug=self._on_bug,
        )
        Connection.most = raise_file_limit()
        self._http = _Http(
            uvicorn.Config(
                build_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=Connection,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        self._http.served = f"{service.name} is ready, listening on {url_of(self._listener)}"
        try:
            await self._http.serve(sockets=[self._listener])
        except OSError as error:
            raise unavailable(self._config.host, self._config.port, error) from error

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        log.info("%s: %s", signal.Signals(number).name, "draining" if self._signals == 1 else "ending at once")
        if self._signals > 1:
            self._client.fail("the server is shutting down")
            self._model.kill()
        self._end_http(self._config.drain_s)

    def _on_loaded(self, tokenizer: asyncio.Task[Tokenizer]) -> None:
        error = None if tokenizer.cancelled() else tokenizer.exception()
        if isinstance(error, EngineError):
            self._fail(str(error))
        elif error is not None:
            self._on_bug(error)
        self._wake.set()

    def _on_model_ended(self, cause: str) -> None:
        self._client.fail(cause)
        if self._signals == 0 or self._model.fatal is not None:
            self._fail(cause)

    def _on_bug(self, error: BaseException) -> None:
        log.error("an error that no request can be blamed for", exc_info=error)
        self._fail(f"frontend failed: {type(error).__name__}: {error}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or connection_closed(error):  # a client's connection broke while it was written to
            loop.default_exception_handler(context)
        else:
            self._on_bug(error)

    def _fail(self, cause: str) -> None:
        self._failure = self._failure or cause
        self._client.fail(cause)
        self._end_http(0.0)

    def _end_http(self, drain_s: float) -> None:
        """Stops accepting; what is in flight may finish within `drain_s`, and then gets an error."""
        self._wake.set()
        if self._http is not None:
            self._http.config.timeout_graceful_shutdown = int(drain_s + _FAREWELL_S)
            self._http.should_exit = True
            loop = asyncio.get_running_loop()
            loop.call_later(drain_s, self._client.fail, "the server is shutting down")

    async def _take_down(self) -> None:
        if self._failure is not None or self._http is None:
            self._model.kill()
        else:
            self._client.shutdown(0.0)
        await self._model.stop(_FAREWELL_S)

    def _report(self) -> int:
        if self._failure is None:
            log.info("ended")
            return 0
        if self._model.fatal is not None and self._model.fatal.traceback:
            log.error("%s", self._model.fatal.traceback.rstrip())
        log.critical("%s", " ".join(self._failure.split()))
        return 1 if self._model.fatal is None else self._model.fatal.exit_status


def _longest(effective: Mapping[str, Any]) -> int:
    """Prompt + output that one request can have: a small KV pool limits it as the context does."""
    return int(min(effective["context_length"], effective["kv_tokens"]))


def _vocabulary(tokenizer: Tokenizer, rows: int) -> int:
    """Ids that mean something. Embeddings often have spare rows; fewer rows than ids would be an index error."""
    if tokenizer.vocab_size > rows:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {rows}; they do not match"
        )
    return tokenizer.vocab_size


class _Http(uvicorn.Server):
    served = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("%s", self.served)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `_Server`'s: uvicorn would raise them again afterwards, and the exit status would not be 0."""
        yield
