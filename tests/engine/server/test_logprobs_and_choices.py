"""`logprobs`, `echo`, `n`: whole and streamed, as the official client reads them. The toy says what it reports."""

import json
from collections.abc import Iterator

import openai
import pytest


@pytest.fixture
def client(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def joined(chunks):
    """The text and log-probabilities of a stream of completions."""
    told = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in chunks:
        text += chunk.choices[0].text
        for name, values in told.items():
            values += getattr(chunk.choices[0].logprobs, name)
    return text, told


def test_completion_logprobs_name_the_chosen_token_and_the_likeliest(client):
    answer = client.completions.create(model="toy", prompt="ab", max_tokens=5, logprobs=2)
    told = answer.choices[0].logprobs
    assert told.tokens == list("ababa")
    assert told.token_logprobs == pytest.approx([-0.97, -0.98, -0.97, -0.98, -0.97])
    assert told.top_logprobs[1] == pytest.approx({"A": -0.65, "B": -0.66, "b": -0.98})
    assert told.text_offset == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("logprobs", [0, 3])
def test_a_stream_of_logprobs_joins_to_the_whole(client, logprobs):
    given = {"model": "toy", "prompt": "hé🎉", "max_tokens": 18, "logprobs": logprobs, "echo": True}
    text, told = joined(client.completions.create(**given, stream=True))
    whole = client.completions.create(**given).choices[0]
    assert text == whole.text
    assert text.startswith("hé🎉hé🎉")
    assert told == whole.logprobs.model_dump()


def test_tokens_that_are_no_characters_are_written_as_bytes_and_offsets_count_characters(client):
    told = client.completions.create(model="toy", prompt="é!", max_tokens=3, logprobs=0).choices[0].logprobs
    assert told.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert told.text_offset == [0, 0, 1]


def test_echo_scores_a_prompt_without_any_output(client):
    answer = client.completions.create(model="toy", prompt=[97, 98, 256, 99], max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab<|im_end|>c", "length")
    assert choice.logprobs.tokens == ["a", "b", "<|im_end|>", "c"]
    assert choice.logprobs.token_logprobs == [None, *map(pytest.approx, (-0.98, -2.56, -0.99))]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 1, 2, 12]
    assert answer.usage.completion_tokens == 0


def test_echo_without_logprobs_is_text_alone(client):
    for stream in (False, True):
        answer = client.completions.create(model="toy", prompt=["ab", "xy"], max_tokens=3, echo=True, stream=stream)
        texts = ["", ""]
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                assert choice.logprobs is None
        assert texts == ["ababa", "xyxyx"]


def test_log_probabilities_end_where_the_count_does(client):
    answer = client.completions.create(model="toy", prompt="hello ", max_tokens=60, stop=["lo h"], logprobs=0)
    assert answer.choices[0].text == "hel"
    assert answer.choices[0].logprobs.tokens == list("hello h")
    assert answer.usage.completion_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, stream):
    given = {"model": "toy", "messages": [{"role": "user", "content": "é"}], "max_tokens": 8, "logprobs": True}
    answer = client.chat.completions.create(**given, top_logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in content] == pytest.approx([-byte / 100 for byte in "[user]é".encode()])
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "[user]é"
    assert [entry.top_logprobs[0].token for entry in content] == ["A"] * 8
    assert client.chat.completions.create(**given).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_for_each_prompt(client, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(model="toy", prompt=["ab", "xyz"], n=2, max_tokens=4, stream=stream, **options)
    texts, usage = [""] * 4, None
    for chunk in answer if stream else [answer]:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["abab", "abab", "xyzx", "xyzx"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 16), "a prompt counts once"
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_every_choice_of_a_chat_stream_begins_with_the_role(client):
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(client.chat.completions.create(model="toy", messages=messages, n=3, max_tokens=4, stream=True))
    roles = {chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role == "assistant"}
    assert roles == {0, 1, 2}
    json.dumps([chunk.model_dump() for chunk in chunks], allow_nan=False)
