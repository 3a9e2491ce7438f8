"""Reading a request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import Request

from engine.server.errors import RequestError

MAX_BODY_BYTES = 4 * 1024 * 1024


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 as soon as it is longer than `MAX_BODY_BYTES`, whatever its header claims.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestError(413, f"the request body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
        parts.append(part)
    return b"".join(parts)
