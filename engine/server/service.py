"""What request handlers share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.server.body import Unread
from engine.server.client import EngineClient
from engine.server.metrics import Metrics
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """One served model.

    Args:
        config: as asked for.
        port: that is listened on.
        name: what clients call the model.
        context_length: longest prompt + output of one request, in tokens.
        vocab_size: prompts given as ids must be below it.
        created: when serving began, in seconds since 1970.
        on_bug: told of an exception in a handler that no request can be blamed for; it ends the server.
        reconfiguring: held while settings change.
        unread: what of request bodies is being received.
    """

    config: EngineConfig
    port: int
    name: str
    client: EngineClient
    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    metrics: Metrics
    created: int
    on_bug: Callable[[BaseException], None]
    reconfiguring: asyncio.Lock = field(default_factory=asyncio.Lock)
    unread: Unread = field(default_factory=Unread)
