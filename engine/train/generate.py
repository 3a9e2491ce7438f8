"""More corpus, by the target itself: it writes the user's turn, then answers it.

Given the chat template up to where a user would speak, an instruction-tuned model samples a plausible request (Xu et
al., "Magpie", 2024). What repeats, is too short or too long, or never ends, is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.build import Core
from engine.train.corpus import ChatFrame, Conversation, append, read
from engine.train.target import answer

log = logging.getLogger(__name__)

_BATCH = 64
_USER_TOKENS = 96
_RESPONSE_TOKENS = 224
_TEMPERATURES = (0.0, 0.7)
"""Of answers, in turn: acceptance is measured on greedy ones; sampled ones keep the head from knowing only those."""


def generate(
    core: Core,
    frame: ChatFrame,
    file: Path,
    tokens: int,
    stop: Sequence[int],
    tick: Callable[[int], None] = lambda _made: None,
) -> int:
    """Append conversations to `file` until it holds at least `tokens` response tokens; how many it holds.

    Each batch is written when it is whole, and its seed follows from how many conversations there are, so that a
    killed run goes on where it was.
    """
    known = list(read([file])) if file.exists() else []
    seen = {c.user for c in known}
    made = sum(len(c.response) for c in known)
    batch = len(known)
    while made < tokens:
        users = _users(core, frame, stop, seed=1_000_003 * (batch + 1))
        fresh = [user for user in dict.fromkeys(users) if user not in seen]
        seen.update(fresh)
        temperature = _TEMPERATURES[batch % len(_TEMPERATURES)]
        answers = answer(
            core, [frame.prompt(user) for user in fresh], _RESPONSE_TOKENS, stop, temperature, 7_919 * (batch + 1)
        )
        done = [
            Conversation(user, tuple(response), temperature, "self")
            for user, response in zip(fresh, answers, strict=True)
            if len(response) > 8
        ]
        append(file, done, "self")
        made += sum(len(c.response) for c in done)
        batch += max(1, len(done))
        tick(made)
    return made


def _users(core: Core, frame: ChatFrame, stop: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """User turns that ended by themselves, without their end token."""
    turns = answer(core, [frame.before] * _BATCH, _USER_TOKENS, stop, 1.0, seed)
    ends = set(stop)
    return [
        tuple(turn[:-1])
        for turn in turns
        if len(turn) > 4 and turn[-1] in ends and not Conversation((), tuple(turn), 0.0, "").loops
    ]
