"""`POST /reconfigure` over HTTP: what it answers, one at a time, with the key."""

from concurrent.futures import ThreadPoolExecutor

import pytest


def test_a_change_is_answered_with_what_is_in_effect(http):
    answer = http.post("/reconfigure", json={"num_steps": 3})
    assert answer.status_code == 200
    assert answer.json() == {"applied": {"num_steps": 3}, "effective": {"num_steps": 3}, "epoch": 1}
    assert http.post("/reconfigure", json={}).status_code == 200, "only a new window of counters"


def test_a_refused_change_says_why(http):
    answer = http.post("/reconfigure", json={"bad": 1})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "bad: is bad"


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"[1]", 422), (b'"x"', 422)])
def test_what_is_no_object_of_settings_is_refused(http, content, status):
    answer = http.post("/reconfigure", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_of_two_at_once_one_is_told_to_come_again(http):
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(http.post, "/reconfigure", json={"slow": 0.5}) for _ in range(2)]
        assert sorted(answer.result().status_code for answer in answers) == [200, 409]
