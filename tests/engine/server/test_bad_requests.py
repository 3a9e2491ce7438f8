"""What cannot be served gets a 4xx that names the field, and the server lives on."""

import json

import httpx
import pytest

C, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]

BAD = [
    (C, {}, "prompt"),
    (C, {"prompt": ""}, "prompt"),
    (C, {"prompt": []}, "prompt"),
    (C, {"prompt": [[]]}, "prompt"),
    (C, {"prompt": ["a", ""]}, "prompt"),
    (C, {"prompt": 5}, "prompt"),
    (C, {"prompt": None}, "prompt"),
    (C, {"prompt": [1, "a"]}, "prompt"),
    (C, {"prompt": [1, 264]}, "prompt"),
    (C, {"prompt": [-1]}, "prompt"),
    (C, {"prompt": [[97], [10**30]]}, "prompt"),
    (C, {"prompt": ["a"] * 129}, "prompt"),
    (C, {"prompt": "a" * 600}, "prompt"),
    (C, {"prompt": "a", "max_tokens": 512}, "max_tokens"),
    (C, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (C, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (C, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (C, {"prompt": "a", "max_tokens": "8"}, "max_tokens"),
    (C, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (C, {"prompt": "a", "temperature": -0.1}, "temperature"),
    (C, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (C, {"prompt": "a", "top_p": 0}, "top_p"),
    (C, {"prompt": "a", "top_p": 1.1}, "top_p"),
    (C, {"prompt": "a", "top_k": -2}, "top_k"),
    (C, {"prompt": "a", "top_k": 2**63, "temperature": 1}, "top_k"),
    (C, {"prompt": "a", "seed": -1}, "seed"),
    (C, {"prompt": "a", "seed": 2**63}, "seed"),
    (C, {"prompt": "a", "stop": [""]}, "stop"),
    (C, {"prompt": "a", "stop": [1]}, "stop"),
    (C, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (C, {"prompt": "a", "stream": "yes"}, "stream"),
    (C, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (C, {"prompt": "a", "stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    (C, {"prompt": "a", "n": 0}, "n"),
    (C, {"prompt": "a", "n": 129}, "n"),
    (C, {"prompt": ["a", "b"], "n": 65}, "n"),
    (C, {"prompt": "a", "best_of": 2}, "best_of"),
    (C, {"prompt": "a", "echo": 1}, "echo"),
    (C, {"prompt": "a", "suffix": "x"}, "suffix"),
    (C, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (C, {"prompt": "a", "logprobs": True}, "logprobs"),
    (C, {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    (C, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (C, {"prompt": "a", "frequency_penalty": False}, "frequency_penalty"),
    (C, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (C, {"prompt": "a", "logit_bias": {"264": 1}}, "logit_bias"),
    (C, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    (C, {"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    (C, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (C, {"prompt": "a", "min_p": 1.1}, "min_p"),
    (C, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (C, {"prompt": "a", "min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    (C, {"prompt": "a", "min_tokens": -1}, "min_tokens"),
    (C, {"prompt": "a", "min_tokens": 2.0}, "min_tokens"),
    (C, {"prompt": "a", "stop_token_ids": [5]}, "stop_token_ids"),
    (C, {"prompt": "a", "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    (C, {"prompt": "a", "length_penalty": 0.5}, "length_penalty"),
    (C, {"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (C, {"prompt": "a", "guided_json": {}}, "guided_json"),
    (C, {"prompt": "a", "logits_processors": []}, "logits_processors"),
    (C, {"prompt": "a", "max_tokenz": 5}, "max_tokenz"),
    (C, {"prompt": "a", "messages": HI}, "messages"),
    (C, {"prompt": "a", "user": 5}, "user"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "tool_calls": []}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    (CHAT, {"messages": HI, "max_completion_tokens": 600}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"messages": HI, "logprobs": 2}, "logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "echo": True}, "echo"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "min_tokens": 10**30}, "min_tokens"),
    (CHAT, {"messages": HI, "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": HI, "reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_the_field_at_fault_is_named(http, path, body, field):
    for stream in ({}, {"stream": True}) if "stream" not in body and field != "stream_options" else ({},):
        answer = http.post(path, json={**body, **stream})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["param"] == field, error
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b"5", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"[" * 10_000],
    ids=repr,
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(http, raw):
    for path in (C, CHAT):
        raw = raw[:200] if len(raw) > 1000 else raw
        answer = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_a_body_over_the_limit_is_413(http):
    def chunks():
        for _ in range(5):
            yield b" " * 1024 * 1024

    assert http.post(C, content=chunks(), headers={"content-type": "application/json"}).status_code == 413


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_is_not_said_to_be_json_is_415(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    for path in (C, CHAT):
        answer = http.post(path, content=b'{"prompt": "a"}', headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_type")
    good = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(C, content=b'{"prompt": "a"}', headers=good).status_code == 200


def test_unknown_paths_and_methods_get_the_same_form(http):
    for answer, status in ((http.post("/v1/embeddings", json={}), 404), (http.get(C), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_accepted(http):
    body = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "logit_bias": {}, "user": "me",
            "stop": None, "seed": 7, "top_k": -1, "metadata": {"a": "b"}, "max_tokens": 3, "model": None,
            "min_tokens": 0, "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True,
            "include_stop_str_in_output": False, "spaces_between_special_tokens": True}  # fmt: skip
    assert (
        http.post(C, json={**body, "prompt": "ab", "echo": False, "best_of": 1}).json()["usage"]["completion_tokens"]
        == 3
    )
    chat = {"logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert http.post(CHAT, json={**body, **chat, "messages": HI}).status_code == 200


def test_after_all_that_it_still_answers(http):
    assert http.get("/health").status_code == 200
    assert http.post(C, json={"prompt": "ab", "max_tokens": 4}).json()["choices"][0]["text"] == "abab"


def test_a_small_pool_limits_requests_as_the_context_does(start):
    server = start(kv_tokens=64)
    answer = httpx.post(f"{server.url}{C}", json={"prompt": "a", "max_tokens": 64})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_api_key_guards_everything_but_probes_and_metrics(start):
    url = start(api_key="sécret").url
    for key in (None, "", "Bearer wrong", "sécret"):
        headers = {} if key is None else {"authorization": key.encode()}
        for path in ("/v1/models", "/server_info"):
            answer = httpx.get(url + path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert httpx.post(url + C, json={"prompt": "a"}, headers=headers).status_code == 401
    for path in ("/health", "/health_generate", "/metrics"):
        assert httpx.get(url + path).status_code == 200
    good = {"authorization": "Bearer sécret".encode()}
    assert httpx.get(url + "/v1/models", headers=good).status_code == 200
    assert "sécret" not in httpx.get(url + "/server_info", headers=good).text
