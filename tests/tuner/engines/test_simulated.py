from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import httpx
import pytest

from tuner.engines.base import Reconfigurable, get_engine
from tuner.engines.simulated.blocks import BlockSource, Clock
from tuner.engines.simulated.fit import HELD_OUT, fit, ratios
from tuner.engines.simulated.machine import Work, fault_at_start, fault_under_load, predict
from tuner.engines.simulated.noise import Disturbance, Noise
from tuner.engines.simulated.profiles import FITTED, dense_70b, profile_named, reference, reference_profile
from tuner.study.engine import unsettled

PROFILE = reference_profile()
CHAIN = {"speculation": "eagle3", "num_steps": 3, "topk": 1, "spec_version": "v2"}


def test_five_parameters_fit_six_published_figures_and_foresee_two() -> None:
    found = fit()
    assert len(astuple(found)) <= 5
    off = {key: abs(ratio - 1) for key, ratio in ratios(found).items()}
    assert len(off) == 8
    assert len(HELD_OUT) == 2
    assert max(off[key] for key in off if key not in HELD_OUT) <= 0.03
    assert max(off[key] for key in HELD_OUT) <= 0.10


def test_the_constants_are_what_the_fit_finds() -> None:
    assert astuple(FITTED) == pytest.approx(astuple(fit()), rel=0.02)


def test_the_reference_leads_to_the_published_decision() -> None:
    published = reference()["delta_to_baseline"]["topk1_spec_v2"]
    for level in (1, 30):
        gain = predict(PROFILE, CHAIN, level).tokens_per_s / predict(PROFILE, {}, level).tokens_per_s - 1
        assert math.copysign(1, gain) == math.copysign(1, published[str(level)])


def test_a_threshold_turns_speculation_off_above_it() -> None:
    limited = {**CHAIN, "disable_batch_threshold": 8}
    assert predict(PROFILE, limited, 8) == predict(PROFILE, CHAIN, 8)
    assert predict(PROFILE, limited, 9).tokens_per_s == predict(PROFILE, {}, 9).tokens_per_s
    schedule = {**CHAIN, "steps_by_batch": "1:3,8:0,16:2"}
    assert predict(PROFILE, schedule, 7) == predict(PROFILE, CHAIN, 7)
    assert predict(PROFILE, schedule, 15).accept_length == 1.0
    assert predict(PROFILE, schedule, 16).accept_length > 1.0


def test_overlap_hides_host_work_and_a_wider_tree_accepts_more() -> None:
    slow = predict(PROFILE, {**CHAIN, "spec_version": "v1"}, 30)
    assert slow.tokens_per_s < predict(PROFILE, CHAIN, 30).tokens_per_s
    tree = predict(PROFILE, {**CHAIN, "topk": 4, "num_draft_tokens": 16, "spec_version": "v1"}, 30)
    assert tree.accept_length > slow.accept_length


def test_one_gpu_has_nothing_to_sum_and_not_the_memory() -> None:
    small = dense_70b()
    assert fault_at_start(small, {"tp": 1}) is not None
    assert fault_at_start(small, {"tp": 8}) is None
    assert fault_at_start(small, {"topk": 4, "spec_version": "v2"}) is not None
    assert fault_under_load(PROFILE, {**CHAIN, "topk": 8, "num_draft_tokens": 64}, 200, Work()) is not None
    assert fault_under_load(PROFILE, CHAIN, 100, Work()) is None


def test_noise_has_the_stated_size_and_memory() -> None:
    noise = Noise(block_sd=0.012, launch_sd=0.0, drift=0.0, autocorrelation=0.6)
    source = Disturbance(noise, 1, 1.0)
    logs = [math.log(source.factor(0.0)) for _ in range(20_000)]
    variance = sum(x * x for x in logs) / len(logs)
    together = sum(a * b for a, b in itertools.pairwise(logs)) / (len(logs) - 1)
    assert math.sqrt(variance) == pytest.approx(0.012, rel=0.05)
    assert together / variance == pytest.approx(0.6, abs=0.03)
    drift = Disturbance(Noise(0.0, 0.0, 0.015, 0.0), 1, 100.0)
    assert abs(math.log(drift.factor(100.0) / drift.factor(0.0))) == pytest.approx(0.015)
    launches = Disturbance(Noise(0.0, 0.006, 0.0, 0.0), 1, 1.0)
    effects = []
    for _ in range(5_000):
        launches.launched()
        first, second = launches.factor(0.0), launches.factor(0.0)
        assert first == second
        effects.append(math.log(first))
    assert math.sqrt(sum(x * x for x in effects) / len(effects)) == pytest.approx(0.006, rel=0.05)


def test_equal_seeds_give_equal_studies_on_a_clock_that_blocks_move() -> None:
    def blocks(seed: int) -> list[float]:
        source = BlockSource(lambda _settings, _level: 100.0, Noise(), seed, clock=Clock(5.0))
        source.launch()
        found = [source.block({}, 8, "screen") for _ in range(3)]
        assert found[0].started_at < found[1].started_at
        assert all(b.gates[0].name == "simulated" and b.valid for b in found)
        return [b.tokens_per_s for b in found]

    assert blocks(3) == blocks(3) != blocks(4)


def test_every_record_is_marked_and_foreign_settings_do_no_harm() -> None:
    engine = get_engine("simulated")
    record = engine.record(
        model="anything",
        args={"command": ["their-server"], "num_steps": 2, "simulation.profile": "pcie_blackwell_8gpu"},
        env={},
        settings={"speculation": "eagle3", "their_own": 7},
        host="127.0.0.1",
        port=1,
    )
    assert record.simulated
    told = json.loads(record.argv[record.argv.index("--settings") + 1])
    assert told == {"num_steps": 2, "speculation": "eagle3", "their_own": 7}
    assert engine.problems({"simulation.profile": "moon"}, {})[0].startswith("simulation.profile")
    assert engine.problems({}, {"speculation": "medusa"})
    assert engine.problems({}, {"tp": 9})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = json.dumps({"speculation": "eagle3", "num_steps": 3, "spec_version": "v2"})
    argv = ["--port", str(port), "--settings", settings, "--options", '{"speed": 20, "noise": 0}']
    process = subprocess.Popen([sys.executable, "-m", "tuner.engines.simulated", *argv])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(url + "/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def ask(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(url + "/v1/completions", json={"prompt": "Say it.", **body}, timeout=60, trust_env=False)
    found: dict[str, Any] = reply.json()
    return found


def test_the_server_counts_what_it_sends_and_says_that_it_is_simulated(server: str) -> None:
    whole = ask(server, max_tokens=50)
    assert whole["usage"]["completion_tokens"] == 50
    assert len(whole["choices"][0]["text"].split()) == 50
    info = httpx.get(server + "/server_info", trust_env=False).json()
    assert info["simulated"] is True
    assert info["effective"]["num_steps"] == 3
    page = httpx.get(server + "/metrics", trust_env=False).text
    counts = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line[0] != "#"}
    assert counts["engine_generated_tokens_total"] >= 50
    assert counts["engine_spec_accepted_tokens_total"] > 0


def test_its_answers_are_as_long_for_its_tokenizer_as_for_its_decode_loop(server: str) -> None:
    """So that a study of it in real time passes the gate that counts answers a second time."""
    for length in (1, 7, 150):
        text = ask(server, max_tokens=length)["choices"][0]["text"]
        reply = httpx.post(server + "/v1/completions", json={"prompt": text, "max_tokens": 1}, trust_env=False)
        assert reply.json()["usage"]["prompt_tokens"] == length


def test_streams_carry_cumulative_usage_and_the_same_text(server: str) -> None:
    whole = ask(server, max_tokens=40)["choices"][0]["text"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Say it.", "max_tokens": 40, "stream": True, "stream_options": options}
    text, counts = "", []
    with httpx.stream("POST", server + "/v1/completions", json=body, timeout=60, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                counts.append(event["usage"]["completion_tokens"])
    assert text == whole
    assert counts == sorted(counts)
    assert counts[-1] == 40
    assert len(counts) < 40


def test_hot_settings_change_and_others_are_refused(server: str) -> None:
    changed = httpx.post(server + "/reconfigure", json={"num_steps": 2}, trust_env=False)
    assert changed.status_code == 200
    assert changed.json()["effective"]["num_steps"] == 2
    assert httpx.post(server + "/reconfigure", json={"tp": 2}, trust_env=False).status_code == 422


def test_it_takes_every_change_that_its_adapter_sends(server: str) -> None:
    engine = get_engine("simulated")
    assert isinstance(engine, Reconfigurable)
    deep = {"speculation": "eagle3", "num_steps": 3, "hybrid_steps": 2}
    for settings in ({"speculation": "ngram"}, {"speculation": "none"}, {**deep, "steps_by_batch": "1:3,8:0"}):
        fixed = {"num_steps": 4} if settings == {"speculation": "ngram"} else {}
        record = engine.record(model="any", args=fixed, env={}, settings=settings, host="127.0.0.1", port=1)
        change = engine.change(record)
        answer = httpx.post(server + change.path, json=dict(change.body), trust_env=False)
        assert answer.status_code == 200, answer.text
        assert unsettled(engine, record, change, answer.json()) is None
        assert record.expected.items() >= {**fixed, **settings}.items()


def test_a_launch_without_the_memory_ends_with_the_cause_in_its_log() -> None:
    argv = [sys.executable, "-m", "tuner.engines.simulated", "--settings", '{"tp": 1}']
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "out of memory" in ended.stderr


def test_profiles_say_where_they_come_from() -> None:
    assert "pcie_blackwell.json" in profile_named("pcie_blackwell_8gpu").source
    assert "checked against nothing" in profile_named("pcie_blackwell_8gpu_70b").source
