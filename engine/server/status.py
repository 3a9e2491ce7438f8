"""How the server is: `/health`, `/health_generate`, `/server_info`, `/metrics`; and `/flush_cache`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine import __version__
from engine.errors import EngineError
from engine.ipc.messages import SamplingParams
from engine.server.body import BODY_S, MAX_BODY_BYTES, MAX_UNREAD_BYTES
from engine.server.client import Watch
from engine.server.connection import HEAD_S, MAX_HEAD_BYTES, STALL_S, Connection
from engine.server.errors import RequestError
from engine.server.schema import MAX_PROMPTS
from engine.server.service import Service

log = logging.getLogger(__name__)

HEALTH_GENERATE_S = 20.0
"""A real token must come within this time."""
ASK_S = 10.0
"""The model process answers questions between rounds, so this is many rounds."""


async def health(request: Request) -> Response:
    """200 while both processes live; says nothing about whether tokens come."""
    service: Service = request.app.state.service
    if service.client.down is not None:
        raise service.client.down
    return JSONResponse({"status": "ok"})


async def health_generate(request: Request) -> Response:
    """200 after one real token has come."""
    service: Service = request.app.state.service
    prompt = service.tokenizer.encode("Hello")
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    try:
        with service.client.generate([(prompt, sampling)]) as generation, Watch(request.receive, generation):
            async with asyncio.timeout(HEALTH_GENERATE_S):
                while True:
                    for _, update in await generation.updates():
                        if update.finish in ("abort", "error"):
                            raise RequestError(503, f"no token: {update.error or update.finish}", code="no_token")
                        if update.token_ids:
                            return JSONResponse({"status": "ok", "tokens": len(update.token_ids)})
    except TimeoutError as error:
        message = f"no token within {HEALTH_GENERATE_S:g} s; the model process lives, but is stuck or overloaded"
        raise RequestError(503, message, code="no_token") from error


async def metrics(request: Request) -> Response:
    """Prometheus text. When the model process does not answer, its counters are missing and `answered` is 0."""
    service: Service = request.app.state.service
    try:
        counters = await service.client.ask("counters", ASK_S)
    except (EngineError, TimeoutError) as error:
        log.warning("/metrics without the model process's counters: %s", error or "no answer")
        counters = None
    service.metrics.running.set(service.client.running)
    return Response(service.metrics.render(counters), media_type=CONTENT_TYPE_LATEST)


async def server_info(request: Request) -> Response:
    """Every setting as requested and as in effect, every optional path, memory and counters."""
    service: Service = request.app.state.service
    try:
        half = {**await service.client.ask("info", ASK_S), "counters": await service.client.ask("counters", ASK_S)}
    except TimeoutError as error:
        message = f"the model process did not answer within {ASK_S:g} s"
        raise RequestError(503, message, code="no_answer") from error
    limits = {
        "max_body_bytes": MAX_BODY_BYTES,
        "max_unread_bytes": MAX_UNREAD_BYTES,
        "max_head_bytes": MAX_HEAD_BYTES,
        "max_connections": Connection.most,
        "max_choices": MAX_PROMPTS,
        "max_sequences": service.client.most,
        "head_s": HEAD_S,
        "body_s": BODY_S,
        "stall_s": STALL_S,
    }
    info = merge_info(service.config.public(), service.name, service.port, half)
    return JSONResponse({**info, "limits": limits})


async def flush_cache(request: Request) -> Response:
    """Forgets all cached prefixes; says how many pages and tokens nobody was using."""
    service: Service = request.app.state.service
    try:
        return JSONResponse(await service.client.ask("flush_cache", ASK_S))
    except TimeoutError as error:
        message = f"the model process did not answer within {ASK_S:g} s"
        raise RequestError(503, message, code="no_answer") from error


def merge_info(requested: Mapping[str, Any], name: str, port: int, half: Mapping[str, Any]) -> dict[str, Any]:
    """`/server_info` from the settings asked for and the model process's half.

    `half` holds `effective` (settings by name, read from the objects that run), `differences` (with reasons), `model`,
    `paths`, `memory` and `counters`; what else it holds is passed on. Differences that it does not list are added, so
    that none goes unseen.
    """
    here = {key: requested[key] for key in ("host", "api_key", "drain_s", "log_level", "log_format")}
    effective = {**here, "served_model_name": name, "port": port, **half.get("effective", {})}
    differences = list(half.get("differences", []))
    explained = {entry["setting"] for entry in differences}
    for setting, value in requested.items():
        if setting in effective and effective[setting] != value and setting not in explained:
            left_open = value in (None, "auto") or (setting, value) == ("port", 0)
            differences.append(
                {
                    "setting": setting,
                    "requested": value,
                    "effective": effective[setting],
                    "reason": "left to the engine" if left_open else "not explained by the model process",
                }
            )
    result = {"model": {"name": name}, **half, "version": __version__}
    result["requested"] = dict(requested)
    result["effective"] = effective
    result["differences"] = differences
    for part in ("paths", "memory", "counters"):
        result.setdefault(part, {})
    return result
