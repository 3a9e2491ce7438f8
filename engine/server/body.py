"""Reading a request's body: JSON, up to a limit, within a time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from engine.server.errors import RequestError

MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_S = 60.0


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        RequestError: 415 unless it is said to be JSON, which also keeps web pages of other origins from posting; 413 as
            soon as it is longer than `MAX_BODY_BYTES`, whatever its header claims; 408 when it takes longer than
            `BODY_S`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content type must be application/json, not '{kind[:80]}'"
        raise RequestError(415, message, code="unsupported_content_type")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    message = f"the request body is longer than {MAX_BODY_BYTES} bytes"
                    raise RequestError(413, message, code="body_too_large")
                parts.append(part)
    except TimeoutError as error:
        raise RequestError(408, f"the request body was not complete within {BODY_S:g} s", code="too_slow") from error
    return b"".join(parts)
