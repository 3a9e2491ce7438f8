"""A model's own chat template, rendered in Jinja's sandbox: templates come with the weights and are not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError, TokenizerError


class ChatTemplate:
    """Messages → the prompt that the model was trained on.

    Args:
        source: Jinja text.
        tokens: special tokens by the names that templates use, such as `bos_token`.

    Raises:
        TokenizerError: `source` is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        # Trimmed blocks and loop controls are what templates are written against.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"the model's chat template is not valid Jinja: {error} (line {error.lineno})"
            ) from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message. `messages` hold `role` and `content` at least.

        Raises:
            TemplateError: the template refused the messages, or failed on them.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        # A template runs arbitrary expressions, so it can fail with anything; all of it is about these messages.
        except (JinjaError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise JinjaError(message)
