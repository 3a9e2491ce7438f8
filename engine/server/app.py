"""The HTTP application: routes, and what every request passes through."""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import time
import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineDown, EngineError
from engine.server import hot, openai_api, status
from engine.server.client import ClientGone
from engine.server.errors import RequestError, connection_closed, error_body
from engine.server.service import Service

ROUTES = [
    Route("/v1/completions", openai_api.completions, methods=["POST"]),
    Route("/v1/chat/completions", openai_api.chat_completions, methods=["POST"]),
    Route("/v1/models", openai_api.list_models),
    Route("/v1/models/{name:path}", openai_api.show_model),
    Route("/health", status.health),
    Route("/health_generate", status.health_generate),
    Route("/server_info", status.server_info),
    Route("/metrics", status.metrics),
    Route("/reconfigure", hot.reconfigure, methods=["POST"]),
    Route("/flush_cache", status.flush_cache, methods=["POST"]),
]

log = logging.getLogger(__name__)

# For probes and scrapers, which have no key; they tell nothing of what is served.
_OPEN = frozenset({"/health", "/health_generate", "/metrics"})
_POLLED = _OPEN | {"/server_info"}
_KNOWN = frozenset(route.path for route in ROUTES)


_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


def build_app(service: Service) -> Starlette:
    """The ASGI application of one served model."""
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(_Edge, service=service)],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}"  # its URL would parse the Host header
    return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


class _Edge:
    """The outermost layer: request ids, API key, counting, the log, and exceptions as responses.

    A request keeps the `X-Request-ID` it came with (word characters, `.`, `:` and `-`, 128 at most), or gets one; it is
    on the response and in the log.

    An exception that is nobody's fault but ours is answered with 500 and then ends the server: a frontend in an
    unknown state must not go on as if it were well.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        key = service.config.api_key
        self._key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status_sent = 0
        began = time.perf_counter()
        request_id = _request_id(scope)

        async def counted_send(message: Message) -> None:
            nonlocal status_sent
            if message["type"] == "http.response.start":
                status_sent = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                if connection_closed(error):
                    raise ClientGone from error
                raise

        failure: Response | None = None
        try:
            self._check_key(scope)
            await self._app(scope, receive, counted_send)
        except RequestError as error:
            body = error_body(error.status, error.message, error.param, error.code)
            failure = JSONResponse(body, error.status, error.headers)
        except EngineDown as error:
            failure = JSONResponse(error_body(503, str(error), code="engine_down"), 503)
        except EngineError as error:
            failure = JSONResponse(error_body(500, str(error)), 500)
        except (ClientGone, ClientDisconnect):
            status_sent = status_sent or 499
        except Exception as error:  # noqa: BLE001 - reported by on_bug, which ends the server
            failure = JSONResponse(error_body(500, f"internal error: {type(error).__name__}"), 500)
            self._service.on_bug(error)
        if failure is not None and not status_sent:
            with contextlib.suppress(ClientGone):
                await failure(scope, receive, counted_send)
        route = scope["path"] if scope["path"] in _KNOWN else "other"
        self._service.metrics.requests.labels(route, str(status_sent)).inc()
        level = logging.DEBUG if scope["path"] in _POLLED and status_sent < 400 else logging.INFO
        if log.isEnabledFor(level):
            fields = {
                "request_id": request_id.decode(),
                "method": scope["method"],
                "path": scope["path"],
                "status": status_sent,
                "seconds": round(time.perf_counter() - began, 4),
            }
            log.log(
                level,
                "%(method)s %(path)r %(status)d in %(seconds).3f s, %(request_id)s",
                fields,
                extra={"fields": fields},
            )

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in _OPEN:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.strip().partition(b" ")
        if not hmac.compare_digest(key, self._key) or scheme.lower() != b"bearer":
            raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
