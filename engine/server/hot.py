"""`POST /reconfigure`: settings that change while requests run."""

from __future__ import annotations

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.server.body import read_body
from engine.server.errors import RequestError
from engine.server.service import Service
from engine.server.status import ASK_S


async def reconfigure(request: Request) -> Response:
    """200 {applied, effective, epoch}; 409 while another change is under way; 422 with the reason, nothing changed."""
    service: Service = request.app.state.service
    body = await read_body(request)
    try:
        changes = from_json(body or b"{}", allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(changes, dict):
        raise RequestError(422, 'the body must be an object of settings, as in {"num_steps": 3}')
    if service.reconfiguring.locked():
        raise RequestError(409, "another change of settings is under way; try again", code="reconfiguring")
    async with service.reconfiguring:
        try:
            reply = await service.client.ask("reconfigure", ASK_S, **{"changes": changes})
        except TimeoutError as error:
            message = f"the model process did not answer within {ASK_S:g} s; /server_info tells what is in effect"
            raise RequestError(503, message, code="no_answer") from error
    if "refused" in reply:
        raise RequestError(422, reply["refused"], code="invalid_setting")
    return JSONResponse(reply)
