"""What a client is told when a request cannot be served, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request that is refused. `param` names the field at fault, None when it is not one field. `retry_after_s`
    tells clients when to come again."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    if status == 401:
        kind = "authentication_error"
    elif status == 404:
        kind = "not_found_error"
    elif status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def connection_closed(error: BaseException | None) -> bool:
    """Whether an exception only means that a client has gone: writing to a closed transport, which is its doing.

    uvloop says so with a bare RuntimeError.
    """
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and "handler is closed" in str(error))
