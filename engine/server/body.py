"""Reading a request's body: JSON, up to a limit, within a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from engine.server.client import RETRY_AFTER_S
from engine.server.errors import RequestError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_UNREAD_BYTES = 256 * 1024 * 1024
BODY_S = 60.0


@dataclass
class Unread:
    """Bytes of bodies that are not complete yet, of all requests together."""

    size: int = 0


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        RequestError: 415 unless it is said to be JSON, which also keeps web pages of other origins from posting; 413 as
            soon as it is longer than `MAX_BODY_BYTES`, whatever its header claims; 408 when it takes longer than
            `BODY_S`; 503 when too many large ones come at once.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content type must be application/json, not '{kind[:80]}'"
        raise RequestError(415, message, code="unsupported_content_type")
    parts, size = [], 0
    unread: Unread = request.app.state.service.unread
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                unread.size += len(part)
                if unread.size > MAX_UNREAD_BYTES:
                    message = f"more than {MAX_UNREAD_BYTES} bytes of request bodies are on their way; try again later"
                    raise RequestError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
                if size > MAX_BODY_BYTES:
                    message = f"the request body is longer than {MAX_BODY_BYTES} bytes"
                    raise RequestError(413, message, code="body_too_large")
                parts.append(part)
    except TimeoutError as error:
        raise RequestError(408, f"the request body was not complete within {BODY_S:g} s", code="too_slow") from error
    finally:
        unread.size -= size
    return b"".join(parts)
