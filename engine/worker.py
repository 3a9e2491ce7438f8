"""The model process: receives requests, runs rounds, sends tokens. It ends when anything goes wrong, and says why."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import traceback
from multiprocessing.connection import Connection

from engine.build import Core, build
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidConfig
from engine.ipc.messages import Abort, Answer, Ask, Fatal, Ready, SamplingParams, Shutdown, Submit, Tokens
from engine.reconfigure import reconfigure

log = logging.getLogger("engine.worker")

_WARM_RID = -1
_CHECK_TOKENS = 40
_CHECK_SHARE = 0.3
"""Of the expected drafts accepted; a few tokens after one prompt say no more than that."""


def main(config: EngineConfig, connection: Connection) -> int:
    """Serve until told to stop; the exit status of the process.

    `Ready` is sent after a real token has been generated. Any exception is sent as `Fatal` and gives status 1.
    """
    # The frontend handles Ctrl-C and decides how to stop; a terminal sends it to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        core = build(config)
        warm_up(core)
        connection.send(Ready(core.info()))
        serve(core, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.error("the frontend process has gone; stopping")
        return 1
    except BaseException as error:  # noqa: BLE001 - the process ends here, and its parent is told why
        if isinstance(error, EngineError):
            fatal = Fatal(str(error), "", error.exit_code)
        else:
            fatal = Fatal(f"{type(error).__name__}: {error}", traceback.format_exc())
        with contextlib.suppress(OSError):  # with the frontend gone as well there is nobody left to tell
            connection.send(fatal)
        return 1
    return 0


def warm_up(core: Core) -> None:
    """Generate real tokens through the scheduler, look whether the drafter works, and leave no trace in the counters.

    A drafter that falls far below what is known of it leaves a correct and slow server: it is said, and `/server_info`
    shows the path as failed.
    """
    tokens = max(2, core.gate.config.num_steps + 1)
    prompt = tuple(i % core.model.config.vocab for i in range(1, 33))
    room = min(core.context_length, core.pages.total * core.pages.page_size)
    prompt, tokens = prompt[: max(1, room - tokens)], min(tokens, max(1, room - 1))
    _generate(core, prompt, tokens)
    check = core.drafter.check
    if check is not None and core.gate.shape(1).num_steps and len(check.prompt) + _CHECK_TOKENS <= room:
        core.round.stats = type(core.round.stats)()
        _generate(core, tuple(check.prompt), _CHECK_TOKENS)
        stats = core.round.stats
        reached = 1 + stats.accepted / max(1, stats.verify_steps)
        detail = f"accept length {reached:.2f} at start, {check.accept_length:.2f} expected at depth 3"
        state = "active" if reached - 1 >= _CHECK_SHARE * min(1.0, check.accept_length - 1) else "failed"
        core.paths["drafter"] = {"state": state, "detail": detail}
        if state == "failed":
            log.warning("speculation with %s hardly works: %s; is this head for this model?", core.drafter.name, detail)
    core.scheduler.check()
    core.prefix.flush()
    core.prefix.queried_tokens = core.prefix.hit_tokens = 0
    core.scheduler.finished = core.scheduler.started = 0
    core.scheduler.queued_s = 0.0
    core.round.stats = type(core.round.stats)()
    core.gate.transitions = 0
    core.gate.current = None


def _generate(core: Core, prompt: tuple[int, ...], tokens: int) -> None:
    refused = core.scheduler.submit(Submit(_WARM_RID, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    if refused is not None:
        raise RuntimeError(f"warm-up request refused: {refused.error}")
    made = 0
    while core.scheduler.busy:
        for update in core.scheduler.step():
            if update.error:
                raise RuntimeError(f"warm-up failed: {update.error}")
            made += len(update.token_ids)
    if made != tokens:
        raise RuntimeError(f"warm-up generated {made} tokens instead of {tokens}")


def serve(core: Core, connection: Connection) -> None:
    """Alternate between messages and rounds until `Shutdown`."""
    scheduler = core.scheduler
    while True:
        # Block only when idle; otherwise take what has arrived and go on.
        while not scheduler.busy or connection.poll(0):
            message = connection.recv()
            if isinstance(message, Submit):
                refused = scheduler.submit(message)
                if refused is not None:
                    connection.send(Tokens((refused,)))
            elif isinstance(message, Abort):
                scheduler.abort(message.rid)
            elif isinstance(message, Ask):
                if message.what == "reconfigure":
                    _reconfigure(core, connection, message)
                else:
                    connection.send(_answer(core, message))
            elif isinstance(message, Shutdown):
                _drain(core, connection, message.drain_s)
                return
            else:
                raise TypeError(f"unknown message {message!r}")
        updates = scheduler.step()
        if updates:
            connection.send(Tokens(updates))
        if not scheduler.busy:
            scheduler.check()


def _answer(core: Core, ask: Ask) -> Answer:
    if ask.what == "info":
        return Answer(ask.ticket, core.info())
    if ask.what == "counters":
        return Answer(ask.ticket, core.counters())
    if ask.what == "flush_cache":
        pages = core.prefix.flush()
        return Answer(ask.ticket, {"flushed_pages": pages, "flushed_tokens": pages * core.pages.page_size})
    return Answer(ask.ticket, None, f"unknown question '{ask.what}'")


def _reconfigure(core: Core, connection: Connection, ask: Ask) -> None:
    try:
        reply, updates = reconfigure(core, ask.arguments["changes"])
    except InvalidConfig as error:
        connection.send(Answer(ask.ticket, {"refused": str(error)}))
        return
    if updates:
        connection.send(Tokens(updates))
    connection.send(Answer(ask.ticket, reply))


def _drain(core: Core, connection: Connection, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while core.scheduler.busy and time.monotonic() < deadline:
        updates = core.scheduler.step()
        if updates:
            connection.send(Tokens(updates))
