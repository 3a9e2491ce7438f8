"""The official client, unchanged, gets what it expects."""

import time
from collections.abc import Iterator

import httpx
import openai
import pytest


@pytest.fixture
def client(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_completion_has_text_finish_reason_and_usage(client):
    answer = client.completions.create(model="toy", prompt="abc", max_tokens=7)
    assert answer.choices[0].text == "abcabca"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
    }
    assert answer.model == "toy"
    assert answer.object == "text_completion"


def test_completion_defaults_to_sixteen_tokens(client):
    assert client.completions.create(model="toy", prompt="abc").usage.completion_tokens == 16


def test_stream_joins_to_the_whole_text(client):
    chunks = list(client.completions.create(model="toy", prompt="héé🎉", max_tokens=23, stream=True))
    whole = client.completions.create(model="toy", prompt="héé🎉", max_tokens=23)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_one_event_per_update_with_cumulative_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="toy", prompt="abc", max_tokens=10, stream=True, stream_options=options)
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [4, 8, 10, 10]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 0]


def test_chat_goes_through_the_template(client):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=14)
    assert answer.choices[0].message.content == "[system]S[user"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len("[system]S[user]hi>")


def test_chat_stream_begins_with_the_role(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=messages, max_completion_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == "[user]hi>"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9


def test_chat_may_use_what_remains_of_the_context(client):
    answer = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    assert answer.usage.total_tokens == 512


def test_end_token_ends_counts_and_is_not_shown(client):
    answer = client.completions.create(model="toy", prompt="ab<|im_end|>", max_tokens=9)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage.completion_tokens == 3


def test_ignore_eos_goes_on(client):
    answer = client.completions.create(
        model="toy", prompt="ab<|im_end|>", max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abab", "length")
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_cuts_text_and_usage(client, stream):
    given = {"model": "toy", "prompt": "hello world ", "max_tokens": 60, "stop": ["zzz", "ld hel"]}
    if stream:
        options = {"include_usage": True}
        chunks = list(client.completions.create(**given, stream=True, stream_options=options))
        text, usage = "".join(chunk.choices[0].text for chunk in chunks[:-1]), chunks[-1].usage
        finish = chunks[-2].choices[0].finish_reason
    else:
        answer = client.completions.create(**given)
        text, usage, finish = answer.choices[0].text, answer.usage, answer.choices[0].finish_reason
    assert (text, finish) == ("hello wor", "stop")
    assert usage.completion_tokens == len("hello world hel")


@pytest.mark.parametrize("stream", [False, True])
def test_neither_end_tokens_nor_stop_strings_count_before_min_tokens(client, stream):
    def asked(least, **given):
        given = {"model": "toy", "max_tokens": 60, "extra_body": {"min_tokens": least}, **given}
        if stream:
            options = {"include_usage": True}
            *chunks, last = client.completions.create(**given, stream=True, stream_options=options)
            text = "".join(chunk.choices[0].text for chunk in chunks)
            return text, chunks[-1].choices[0].finish_reason, last.usage.completion_tokens
        answer = client.completions.create(**given)
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens

    assert asked(0, prompt="hello world ", stop=["lo w"]) == ("hel", "stop", 7)
    assert asked(6, prompt="hello world ", stop=["lo w"]) == ("hel", "stop", 7)
    assert asked(7, prompt="hello world ", stop=["lo w"]) == ("hello world hel", "stop", 19)
    assert asked(60, prompt="hello world ", stop=["lo w"]) == ("hello world " * 5, "length", 60)
    assert asked(3, prompt="abc<|im_end|>") == ("abc", "stop", 4)
    assert asked(4, prompt="abc<|im_end|>") == ("abcabc", "stop", 8)


def test_several_prompts_give_several_choices(client):
    answer = client.completions.create(model="toy", prompt=["ab", "xyz"], max_tokens=6)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ababab"), (1, "xyzxyz")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    texts = ["", ""]
    for chunk in client.completions.create(model="toy", prompt=[[97, 98], [120]], max_tokens=6, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ababab", "xxxxxx"]


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"


def test_refusal_by_the_model_process_is_an_error_object(client):
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="this prompt is refused"):
            client.completions.create(model="toy", prompt="<|refuse|>", stream=stream)


def _counter(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(http, stream):
    before = _counter(http, "toy_aborts_total")
    body = {"prompt": "<|silent|>" if not stream else "abc", "max_tokens": 500, "stream": stream}
    with httpx.Client(base_url=http.base_url, timeout=0.3) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body)
    end = time.monotonic() + 5
    while _counter(http, "toy_aborts_total") == before:
        assert time.monotonic() < end, "no abort reached the model process"
    assert _counter(http, "engine_http_running") == 0
