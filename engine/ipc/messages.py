"""What the frontend process and the model process say to each other, in both directions.

The frontend owns HTTP, text and stop strings; the model process owns tokens, scheduling and memory. A request is
known to both by `rid`, a number that the frontend never reuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` None means a fresh one. `stop_token_ids` end
    the request (the token itself is not shown as text) unless `ignore_eos`; the frontend puts the model's end tokens
    there, since the model process knows no tokenizer. Before `min_tokens` tokens are out, they cannot be chosen.

    Before a token is chosen, its logits are changed in this order: `repetition_penalty` divides positive and multiplies
    negative ones of tokens in the prompt or the output so far; `presence_penalty` is taken from those of tokens in the
    output, `frequency_penalty` once for each time they are there; `logit_bias` (id, value) is added. Then come
    temperature, `min_p` (tokens below this share of the likeliest one's probability are out), top-k and top-p.

    `logprobs`: report each output token's log-probability and this many of the likeliest tokens'; None: do not.
    `prompt_logprobs`: the same for the prompt's tokens but the first. Both are the model's own: before penalties, bias
    and temperature. `max_tokens` 0 is only of use with the latter.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias apply."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )


class TokenLogprob(NamedTuple):
    """Natural log-probability of one token, and (id, log-probability) of the likeliest ones in its place."""

    value: float
    top: tuple[tuple[int, float], ...]


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
    what: Literal["info", "counters", "flush_cache", "reconfigure"]
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
    shown as text. `logprobs` has one entry for each id where they were asked for. A request's first update
    also tells how many of its prompt's tokens the prefix cache had, and `prompt_logprobs` where they were asked for.
    """

    rid: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


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
