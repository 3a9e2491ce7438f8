"""A model's own chat template, rendered in Jinja's sandbox: templates come with the weights and are not trusted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError, TokenizerError

RENDER_S = 5.0
"""A template that takes longer is stopped."""


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox, with an end to every loop and recursion: each turn and each call looks at the clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = threading.local()
        self.filters["until_the_end"] = self._until_the_end

    def begin(self) -> None:
        """A rendering begins in this thread."""
        self._clock.end = time.monotonic() + RENDER_S

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:
        """Called for every call in a template; named as in the base class."""
        __self._look()
        return super().call(__context, __obj, *args, **options)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "until_the_end", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **options)

    def _until_the_end(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._look()
            yield item

    def _look(self) -> None:
        if time.monotonic() > self._clock.end:
            raise JinjaError(f"it did not end within {RENDER_S:g} s")


class ChatTemplate:
    """Messages → the prompt that the model was trained on. May be used by several threads.

    Args:
        source: Jinja text.
        tokens: special tokens by the names that templates use, such as `bos_token`.

    Raises:
        TokenizerError: `source` is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        # Trimmed blocks and loop controls are what templates are written against.
        environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"the model's chat template is not valid Jinja: {error} (line {error.lineno})"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise TokenizerError(f"the model's chat template cannot be compiled: {error!r}") from error
        self._environment, self._tokens = environment, dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message. `messages` hold `role` and `content` at least.

        Raises:
            TemplateError: the template refused the messages, failed on them, or did not end within `RENDER_S`.
        """
        self._environment.begin()
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        # A template runs arbitrary expressions, so it can fail with anything; all of it is about these messages.
        except Exception as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise JinjaError(message)
