"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`, the way the official client expects them."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import TemplateError
from engine.ipc.messages import SamplingParams
from engine.server.body import read_body
from engine.server.errors import RequestError
from engine.server.generation import CHAT, COMPLETION, Job, StreamedResponse, whole_response
from engine.server.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, GenerationRequest, parse
from engine.server.service import Service

DEFAULT_COMPLETION_TOKENS = 16
_INLINE_CHARACTERS = 4096


async def completions(request: Request) -> Response:
    """`POST /v1/completions`."""
    service: Service = request.app.state.service
    arrived = time.perf_counter()
    body = parse(CompletionRequest, await read_body(request))
    _check_model(service, body.model)
    n = body.n or 1
    if len(body.prompts) > MAX_PROMPTS:
        raise RequestError(400, f"prompt: holds {len(body.prompts)} prompts; at most {MAX_PROMPTS}", "prompt")
    if len(body.prompts) * n > MAX_PROMPTS:
        message = f"n: {n} choices for {len(body.prompts)} prompts are {len(body.prompts) * n}; at most {MAX_PROMPTS}"
        raise RequestError(400, message, "n", "invalid_value")
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    given = [_checked_ids(service, prompt) for prompt in body.prompts if not isinstance(prompt, str)]
    prompts = given or await _encode(service, texts, True)  # they are all of one kind
    if not prompts or not all(prompts):
        raise RequestError(400, "prompt: must not be empty", "prompt", "invalid_value")
    wanted = body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
    for prompt in prompts:
        _check_length(service, len(prompt), wanted, "prompt", "max_tokens")
    sampling = _sampling(service, body, wanted)
    echoes = None
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
        echoes = [p if isinstance(p, str) else service.tokenizer.literal_text(p) for p in body.prompts]
    job = Job(service, COMPLETION, f"cmpl-{uuid.uuid4().hex}", prompts, sampling, body, arrived, echoes)
    return await _respond(job, request, body)


async def chat_completions(request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    service: Service = request.app.state.service
    arrived = time.perf_counter()
    body = parse(ChatRequest, await read_body(request))
    _check_model(service, body.model)
    try:
        # Beside the event loop: templates are the model's, and may take long.
        messages = [message.for_template() for message in body.messages]
        text = await asyncio.to_thread(service.tokenizer.render_chat, messages)
    except TemplateError as error:
        raise RequestError(400, f"messages: {error}", "messages", "invalid_value") from error
    (prompt,) = await _encode(service, [text], False)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = "max_tokens: differs from max_completion_tokens; give one of them"
        raise RequestError(400, message, "max_tokens", "invalid_value")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wanted = asked if asked is not None else max(service.context_length - len(prompt), 1)
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    _check_length(service, len(prompt), wanted, "messages", field)
    job = Job(service, CHAT, f"chatcmpl-{uuid.uuid4().hex}", [prompt], _sampling(service, body, wanted), body, arrived)
    return await _respond(job, request, body)


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return JSONResponse({"object": "list", "data": [_model_card(request.app.state.service)]})


async def show_model(request: Request) -> Response:
    """`GET /v1/models/NAME`."""
    _check_model(request.app.state.service, request.path_params["name"])
    return JSONResponse(_model_card(request.app.state.service))


def _model_card(service: Service) -> dict[str, object]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "spec-tuner",
        "max_model_len": service.context_length,
    }


async def _respond(job: Job, request: Request, body: GenerationRequest) -> Response:
    if body.stream:
        return StreamedResponse(job)
    if body.stream_options is not None:
        raise RequestError(400, "stream_options: is only allowed with stream: true", "stream_options", "invalid_value")
    return await whole_response(job, request.receive)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        message = f"The model '{name}' does not exist; this server serves '{service.name}'"
        raise RequestError(404, message, "model", "model_not_found")


async def _encode(service: Service, texts: list[str], add_special: bool) -> list[list[int]]:
    """Long texts are encoded beside the event loop, so that other streams go on meanwhile."""

    def encode() -> list[list[int]]:
        return [service.tokenizer.encode(text, add_special) for text in texts]

    if sum(map(len, texts)) <= _INLINE_CHARACTERS:
        return encode()
    return await asyncio.to_thread(encode)


def _checked_ids(service: Service, ids: list[int]) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) < service.vocab_size:
        bad = next(one for one in ids if not 0 <= one < service.vocab_size)
        message = f"prompt: token id {bad} is outside 0 to {service.vocab_size - 1}"
        raise RequestError(400, message, "prompt", "invalid_value")
    return ids


def _check_length(service: Service, prompt: int, output: int, prompt_field: str, output_field: str) -> None:
    limit = service.context_length
    if prompt + output <= limit:
        return
    field = prompt_field if prompt >= limit else output_field
    message = f"{field}: {prompt} prompt tokens and {output} output tokens exceed the context of {limit} tokens"
    raise RequestError(400, message, field, "context_length_exceeded")


def _least(body: GenerationRequest, most: int) -> int:
    least = body.min_tokens or 0
    if least > most:
        message = f"min_tokens: {least} is more than the {most} tokens that the output may have"
        raise RequestError(400, message, "min_tokens", "invalid_value")
    return least


def _biases(service: Service, body: GenerationRequest) -> tuple[tuple[int, float], ...]:
    biases = {int(token): value for token, value in (body.logit_bias or {}).items()}
    if biases and max(biases) >= service.vocab_size:
        message = f"logit_bias: token id {max(biases)} is outside 0 to {service.vocab_size - 1}"
        raise RequestError(400, message, "logit_bias", "invalid_value")
    return tuple(biases.items())


def _sampling(service: Service, body: CompletionRequest | ChatRequest, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=service.tokenizer.stop_token_ids,
        min_tokens=_least(body, max_tokens),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(service, body),
        logprobs=body.top_logprobs_wanted,
    )
