"""One request as the model process sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.ipc.messages import FinishReason, SamplingParams, TokenLogprob


@dataclass
class Request:
    """`tokens` is prompt and output; the first `cached` of them have keys and values in the pool.

    A running request that decodes has exactly one token that is not cached: the bonus token of its last round.
    """

    rid: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    cached: int = 0
    row: int = -1
    preemptions: int = field(default=0, repr=False)
    arrived: float = field(default_factory=time.monotonic, repr=False)
    hit: int = field(default=0, repr=False)
    """Tokens of the prompt that the prefix cache had when the request first ran."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list, repr=False)
    """Of the prompt's tokens from the second on, as far as it has run."""
    decoding: bool = field(default=False, repr=False)
    """Whether a round has been launched that runs the last of the tokens, so that what follows are decode steps."""
    ahead: int = field(default=0, repr=False)
    """Tokens that a round in flight may emit for it, at most."""

    @property
    def pending(self) -> int:
        """Tokens still to be run through the model before the next one can be chosen."""
        return len(self.tokens) - self.cached

    @property
    def room(self) -> int:
        """Output tokens it may still emit."""
        return self.prompt_len + self.sampling.max_tokens - len(self.tokens)

    @property
    def unreported(self) -> range:
        """Positions in the prompt whose log-probabilities are still to be reported."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(len(self.prompt_logprobs) + 1, self.prompt_len)

    def cut(self, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """What of these tokens is output, and why it ends there, if it does. A NaN (-1) is the caller's to handle."""
        emitted = emitted[: self.room]
        for i, token in enumerate(emitted):
            if token in self.stop_ids:
                return emitted[: i + 1], "stop"
        return emitted, "length" if len(emitted) == self.room else None
