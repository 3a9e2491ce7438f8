import re

from engine.config import EngineConfig
from engine.server.metrics import Metrics
from engine.server.status import merge_info


def test_health_generate_makes_a_real_token(http):
    before = _generated(http)
    assert http.get("/health_generate").json()["tokens"] >= 1
    assert _generated(http) > before


def _generated(http) -> float:
    return float(re.search(r"^engine_http_generated_tokens_total (\S+)$", http.get("/metrics").text, re.M)[1])


def test_server_info_has_requested_effective_and_why_they_differ(http):
    info = http.get("/server_info").json()
    assert info["limits"]["max_body_bytes"] == 4 * 1024 * 1024
    assert {"version", "model", "requested", "effective", "differences", "paths", "memory", "counters"} <= set(info)
    assert info["requested"]["port"] == 0
    assert info["effective"]["port"] == http.base_url.port
    assert info["counters"]["toy_running"] == 0
    reasons = {entry["setting"]: entry["reason"] for entry in info["differences"]}
    assert reasons["dtype"] == "a toy"
    assert reasons["page_size"] == "not explained by the model process"
    differing = {name for name, value in info["requested"].items() if info["effective"].get(name, value) != value}
    assert differing == set(reasons)


def test_merge_keeps_what_the_model_process_says_over_what_was_asked():
    merged = merge_info(EngineConfig(port=5).public(), "m", 5, {"effective": {"dtype": "float32"}, "extra": 1})
    assert merged["effective"]["dtype"] == "float32"
    assert merged["extra"] == 1
    assert merged["paths"] == {}


def test_metrics_count_requests_by_route_and_status(http):
    http.post("/v1/completions", json={})
    http.get("/nowhere/1")
    text = http.get("/metrics").text
    assert re.search(r'engine_http_requests_total{route="/v1/completions",status="400"} [1-9]', text)
    assert re.search(r'engine_http_requests_total{route="other",status="404"} [1-9]', text)
    assert "engine_http_time_to_first_token_seconds_bucket" in text
    http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 12})
    assert re.search(r"engine_http_inter_token_seconds_count [1-9]", http.get("/metrics").text)
    assert re.search(r'^toy_rounds_total{by="one"} \d', text, re.M)
    assert "engine_model_answered 1.0" in text


def test_metrics_say_when_the_model_process_did_not_answer():
    assert b"engine_model_answered 0.0" in Metrics().render(None)
