import pytest

from engine.errors import TemplateError, TokenizerError
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
