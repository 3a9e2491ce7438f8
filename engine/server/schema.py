"""What requests may contain. A field that would have no effect is refused by name, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.server.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 128
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIASES = 1024

# Fields that clients send although they ask for nothing: accepted with these values (and null), refused with others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """`continuous_usage_stats` puts the usage so far on every chunk; `include_usage` adds a last chunk with it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(_Strict):
    """What both endpoints have in common."""

    # For unions, whose own messages list every member that did not match.
    expected: ClassVar[dict[str, str]] = {
        "stop": f"must be a string or a list of at most {MAX_STOP_STRINGS} strings",
        "logit_bias": f"must give at most {MAX_BIASES} token ids, as decimal strings, values from -100 to 100",
    }

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^\d{1,9}$")],
                Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # For the caller's own records; they have no effect at OpenAI either.
    user: str | None = None
    metadata: dict[str, Any] | None = None

    service_tier: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None

    @field_validator(*NEUTRAL, mode="after", check_fields=False)
    @classmethod
    def _only_neutral(cls, value: Any, info: Any) -> Any:
        allowed = NEUTRAL[info.field_name]
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            return value
        raise ValueError(f"is not supported (accepted only as {' or '.join(map(repr, allowed))})")

    @field_validator("stop", mode="after")
    @classmethod
    def _no_empty_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and not isinstance(value, str) and "" in value:
            raise ValueError("must not contain an empty string")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """As a tuple; an empty string alone means none."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop or ())


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    expected = {
        **GenerationRequest.expected,
        "prompt": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    }

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    best_of: Any = None
    suffix: Any = None
    add_special_tokens: Any = None

    @model_validator(mode="after")
    def _output_or_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "must be at least 1 without echo")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens are to be reported; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text or list of token ids for each choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(_Strict):
    """One piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation; text only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @field_validator("name", mode="after")
    @classmethod
    def _no_name(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("is not supported (chat templates do not show names)")
        return value

    def for_template(self) -> dict[str, str]:
        """`role` and the whole `content`, the way templates want them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    store: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "needs logprobs: true")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        """As for completions."""
        return (self.top_logprobs or 0) if self.logprobs else None


Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in `body`.

    Raises:
        RequestError: 400 with the field at fault.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(kind, error) from error


def _refusal(kind: type[GenerationRequest], error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if problem["type"] == "json_invalid":
        return RequestError(400, f"the request body is not valid JSON: {problem['msg']}", code="invalid_json")
    if problem["type"] in kind.model_fields:  # two fields that do not go together: the type names the one at fault
        return RequestError(400, f"{problem['type']}: {problem['msg']}", problem["type"], "invalid_value")
    if not problem["loc"]:
        return RequestError(400, "the request body must be a JSON object", code="invalid_json")
    name = str(problem["loc"][0])
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return RequestError(400, f"{name}: is required", name, "missing_field")
    if problem["type"] == "extra_forbidden":
        path = _dotted(problem["loc"])
        return RequestError(400, f"{path}: is not a supported field", path, "unsupported_field")
    message = problem["msg"].removeprefix("Value error, ")
    if name in kind.expected and problem["type"] != "value_error":
        return RequestError(400, f"{name}: {kind.expected[name]}", name, "invalid_value")
    path = _dotted(problem["loc"])
    return RequestError(400, f"{path}: {message[0].lower()}{message[1:]}", path, _code(name, problem["type"]))


def _code(name: str, problem: str) -> str:
    return "unsupported_value" if name in NEUTRAL and problem == "value_error" else "invalid_value"


def _dotted(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; names of union members, which pydantic adds, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path
