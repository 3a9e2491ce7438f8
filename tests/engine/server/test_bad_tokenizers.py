"""A tokenizer that does not fit its model stops the start; a template that fails refuses the request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tokenizers

from tests.engine.server.conftest import ToyServer

Start = Callable[..., ToyServer]


@pytest.fixture
def copied(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "copy"))


def test_a_vocabulary_larger_than_the_model_is_refused(copied: Path, start: Start) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra {i}>" for i in range(60)])
    tokenizer.save(str(copied / "tokenizer.json"))
    server = start(model=str(copied))
    assert server.end() != 0
    assert "the tokenizer has 324 ids, but the model only 300; they do not match" in server.lines()[-1]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}', ""])
def test_a_broken_tokenizer_is_named(copied: Path, start: Start, content: str) -> None:
    (copied / "tokenizer.json").write_text(content)
    server = start(model=str(copied))
    assert server.end() != 0
    assert "tokenizer.json" in server.lines()[-1]


def test_a_template_that_is_not_jinja_is_told_before_serving(copied: Path, start: Start) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{% if %}"}))
    server = start(model=str(copied))
    assert server.end() != 0
    assert "chat template is not valid Jinja" in server.lines()[-1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.nope() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**13 }}",
        None,
    ],
)
def test_a_template_that_raises_refuses_the_request_alone(copied: Path, start: Start, template: str | None) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    url = start(model=str(copied)).url
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "chat template" in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
