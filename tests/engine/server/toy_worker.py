"""A model process without a model: it repeats the prompt's tokens, for ever, through the real contract.

The log-probability of token t is -t / 100; the likeliest tokens are always the bytes "A", "B", "C", …

Special tokens in a prompt make it misbehave; what they do stands beside them. Its vocabulary is one token per byte.
"""

import math
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from engine.config import EngineConfig
from engine.ipc.messages import (
    Abort,
    Answer,
    Ask,
    Fatal,
    Ready,
    Shutdown,
    Submit,
    TokenLogprob,
    Tokens,
    TokenUpdate,
)

CONTEXT = 512
VOCAB = 300  # more rows than the tokenizer has ids, as usual
END, END_OF_TEXT, RAISE, KILL, EXIT, REFUSE, SILENT, GARBLE = range(256, 264)
SPECIAL_TEXT = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|raise|>",
    "<|kill|>",
    "<|exit|>",
    "<|refuse|>",
    "<|silent|>",
    "<|garble|>",
)


def main(config: EngineConfig, connection: Connection) -> int:
    context = config.context_length or CONTEXT
    effective = {"context_length": context, "kv_tokens": config.kv_tokens or 4096, "dtype": "float32", "page_size": 32}
    info = {
        "model": {"name": "toy", "vocab": VOCAB},
        "effective": effective,
        "differences": [{"setting": "dtype", "requested": "auto", "effective": "float32", "reason": "a toy"}],
        "paths": {"kernel": {"state": "active", "detail": "none"}},
        "memory": {"kv_pool_bytes": 0},
    }
    connection.send(Ready(info))
    running: dict[int, tuple[Submit, int]] = {}
    counters = {"toy_aborts_total": 0, "toy_running": 0, 'toy_rounds_total{by="one"}': 0}
    while True:
        while not running or connection.poll(0):
            message = connection.recv()
            if isinstance(message, Submit):
                _misbehave(message.prompt_ids)
                if GARBLE in message.prompt_ids:
                    connection.send("not one of the messages")
                if REFUSE in message.prompt_ids:
                    connection.send(Tokens((TokenUpdate(message.rid, (), "error", "this prompt is refused"),)))
                else:
                    running[message.rid] = (message, 0)
            elif isinstance(message, Abort):
                counters["toy_aborts_total"] += running.pop(message.rid, None) is not None
            elif isinstance(message, Ask):
                counters["toy_running"] = len(running)
                if message.what == "reconfigure":
                    connection.send(Answer(message.ticket, _reconfigured(message.arguments["changes"])))
                    continue
                connection.send(Answer(message.ticket, info if message.what == "info" else counters))
            elif isinstance(message, Shutdown):
                return 0
        updates = []
        for rid, (request, done) in list(running.items()):
            if SILENT in request.prompt_ids:
                continue
            tokens, finish = _next(request, done, config.spec.num_steps + 1)
            sampling = request.sampling
            told = _logprobs(tokens, sampling.logprobs)
            prompt = _logprobs(request.prompt_ids[1:], sampling.prompt_logprobs) if not done else ()
            updates.append(
                TokenUpdate(rid, tuple(tokens), finish, cached_tokens=not done, logprobs=told, prompt_logprobs=prompt)
            )
            running[rid] = (request, done + len(tokens))
            if finish:
                del running[rid]
        counters['toy_rounds_total{by="one"}'] += 1
        connection.send(Tokens(tuple(updates)))
        time.sleep(0.002)


def _reconfigured(changes: dict) -> dict:
    if "bad" in changes:
        return {"refused": "bad: is bad"}
    if refused := [f"{name}: {value!r}" for name, value in changes.items() if value in (math.inf, -math.inf)]:
        return {"refused": "; ".join(refused)}
    time.sleep(changes.get("slow", 0))
    return {"applied": changes, "effective": changes, "epoch": 1}


def _next(request: Submit, done: int, most: int) -> tuple[list[int], str | None]:
    tokens = []
    for position in range(done, min(done + most, request.sampling.max_tokens)):
        tokens.append(request.prompt_ids[position % len(request.prompt_ids)])
        may_end = position >= request.sampling.min_tokens and not request.sampling.ignore_eos
        if may_end and tokens[-1] in request.sampling.stop_token_ids:
            return tokens, "stop"
    return tokens, "length" if done + len(tokens) == request.sampling.max_tokens else None


def _logprobs(tokens: Sequence[int], top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    best = tuple((index, -index / 100) for index in range(65, 65 + top))
    return tuple(TokenLogprob(-token / 100, best) for token in tokens)


def _misbehave(prompt: tuple[int, ...]) -> None:
    if RAISE in prompt:
        raise RuntimeError("the toy was asked to raise")
    if KILL in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    if EXIT in prompt:
        os._exit(0)


def fatal_at_start(config: EngineConfig, connection: Connection) -> int:
    connection.send(Fatal("ValueError: no such layer", "Traceback (most recent call last):\n  in the toy\n"))
    return 1


def raise_at_start(config: EngineConfig, connection: Connection) -> int:
    raise ValueError("half-built")


def exit_at_start(config: EngineConfig, connection: Connection) -> int:
    return 0


def never_ready(config: EngineConfig, connection: Connection) -> int:
    connection.recv()
    return 0


def real(config: EngineConfig, connection: Connection) -> int:
    """The engine's own model process."""
    from engine.worker import main as run

    return run(config, connection)
