import time

import pytest

from engine.errors import TemplateError, TokenizerError
from engine.text import chat_template
from engine.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "<hi> ö"}]


def _render(source: str) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(HI)


def test_templates_find_what_they_are_written_against():
    assert _render("{{ messages[0]['content'] }}{{ eos_token }}{{ add_generation_prompt }}") == "<hi> ö</s>True"
    assert _render("{{ messages | tojson }}") == '[{"role": "user", "content": "<hi> ö"}]'
    assert _render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(_render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_template_that_raises_is_an_error_with_its_message():
    with pytest.raises(TemplateError, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source", ["{{ 1 // 0 }}", "{{ messages[5].content + 'x' }}", "{{ 'a' + 1 }}", "{{ missing.name.other }}"]
)
def test_a_template_that_fails_is_an_error(source):
    with pytest.raises(TemplateError):
        _render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_templates_cannot_leave_the_sandbox(source):
    with pytest.raises(TemplateError):
        _render(source)


def test_a_template_with_a_syntax_error_is_refused_when_the_model_is_loaded():
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in 'xyz' * 9 %}{% for c in range(9999) %}{% endfor %}" + "{% endfor %}" * 2,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**13 }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)
    began = time.monotonic()
    with pytest.raises(TemplateError, match="refused the messages"):
        _render(source)
    assert time.monotonic() - began < 3


def test_watched_loops_know_where_they_are():
    source = (
        "{% for m in [1, 2, 3] if m > 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% else %}-{% endfor %}"
    )
    assert _render(source) == "1/2False 2/2True "
    assert _render("{% for m in nothing %}{% else %}none{% endfor %}") == "none"
    assert _render("{% for a, b in [[1, 2]] %}{{ loop.first }}{{ a + b }}{% endfor %}") == "True3"


def test_a_template_too_deep_to_compile_is_refused():
    with pytest.raises(TokenizerError, match="chat template"):
        ChatTemplate("{% if a %}" * 3000 + "{% endif %}" * 3000, {})
