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
from engine.ranks import Alone, Crew, Follower, Step, launch
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
    crew: Crew = Alone()
    try:
        crew = launch(config, connection)
        core = build(config, crew)
        warm_up(core)
        connection.send(Ready(core.info()))
        serve(core, connection)
        crew.dismiss()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.error("the frontend process has gone; stopping")
        return 1
    except BaseException as caught:  # noqa: BLE001 - the process ends here, and its parent is told why
        error = crew.explain(caught)
        if isinstance(error, EngineError):
            fatal = Fatal(str(error), "", error.exit_code)
        else:
            fatal = Fatal(f"{type(error).__name__}: {error}", traceback.format_exc())
        with contextlib.suppress(OSError):  # with the frontend gone as well there is nobody left to tell
            connection.send(fatal)
        return 1
    finally:
        crew.close()
    return 0


def follow(config: EngineConfig, crew: Follower) -> None:
    """What a rank other than 0 does: the same as rank 0, as that tells it."""
    core = build(config, crew)
    warm_up(core)
    for message in crew.messages(lambda: core.scheduler.busy, config.collective_timeout_s):
        if isinstance(message, Step):
            core.scheduler.step()
            if not core.scheduler.busy:
                core.scheduler.check()
        elif isinstance(message, Submit):
            core.scheduler.submit(message)
        elif isinstance(message, Abort):
            core.scheduler.abort(message.rid)
        elif isinstance(message, Ask) and message.what == "flush_cache":
            core.prefix.flush()
        elif isinstance(message, Ask) and message.what == "reconfigure":
            with contextlib.suppress(InvalidConfig):  # rank 0 answers
                reconfigure(core, message.arguments["changes"])
        else:
            raise TypeError(f"unknown message {message!r}")


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
            if not scheduler.busy:
                core.crew.await_message(connection)
            message = connection.recv()
            if isinstance(message, Submit):
                refused = core.submit(message)
                if refused is not None:
                    connection.send(Tokens((refused,)))
            elif isinstance(message, Abort):
                core.abort(message)
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
        updates = core.step()
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
        pages = core.flush(ask)
        return Answer(ask.ticket, {"flushed_pages": pages, "flushed_tokens": pages * core.pages.page_size})
    return Answer(ask.ticket, None, f"unknown question '{ask.what}'")


def _reconfigure(core: Core, connection: Connection, ask: Ask) -> None:
    core.crew.tell(ask)
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
        updates = core.step()
        if updates:
            connection.send(Tokens(updates))
