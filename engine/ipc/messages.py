"""What the frontend process and the model process say to each other, in both directions.

The frontend owns HTTP, text and stop strings; the model process owns tokens, scheduling and memory. A request is
known to both by `rid`, a number that the frontend never reuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` None means a fresh one. `stop_token_ids` end
    the request (the token itself is not shown as text) unless `ignore_eos`; the frontend puts the model's end tokens
    there, since the model process knows no tokenizer.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """Frontend → model: generate for this prompt. The frontend has checked that it fits the context."""

    rid: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Frontend → model: the client left, or a stop string was seen. Unknown ids are ignored."""

    rid: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Frontend → model: a question that does not generate; answered by `Answer` with the same `ticket`."""

    ticket: int
    what: Literal["info", "counters", "flush_cache"]
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Frontend → model: finish what runs (at most `drain_s` seconds), then exit with status 0."""

    drain_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Model → frontend, once: construction has finished, a real token was generated, requests may come.

    `info` is the model process's half of `/server_info`.
    """

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New output tokens of one request (1 to `num_steps` + 1 a round), and its end if this was the last.

    A stop token is included as the last id of its update when `finish` is "stop"; it counts in usage and is not
    shown as text. `cached_tokens`, on a request's first update, are those of its prompt that the prefix cache had.
    """

    rid: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Model → frontend: all updates of one round, in one message."""

    updates: tuple[TokenUpdate, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Model → frontend: the reply to `Ask`. A non-empty `error` means that `payload` is not valid."""

    ticket: int
    payload: Any
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fatal:
    """Model → frontend, last words: the cause that ends both processes.

    `exit_status` is the server's: 2 where the settings or the model are at fault, which needs no `traceback` (empty).
    """

    cause: str
    traceback: str
    exit_status: int = 1
