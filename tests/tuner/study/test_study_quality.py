from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.bench.prompts import load_prompts, spread
from tuner.judge.quality import Answers
from tuner.records import LaunchRecord
from tuner.study.decide import recommendation
from tuner.study.probe import HttpProbe, NoAnswer, _likelihood, check
from tuner.study.quality import verdicts
from tuner.study.session import quality_probe

ANSWER = "a plain answer of some seven words"


class Speaks(BaseHTTPRequestHandler):
    """Answers every prompt alike; with echo, gives each word a log-probability."""

    likelihoods = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("echo"):
            if not self.likelihoods:
                return self.say(400, {"error": {"message": "no echo here"}})
            offsets = [i for i, _ in enumerate(body["prompt"]) if i == 0 or body["prompt"][i - 1] == " "]
            none: list[Any] = [None]
            told = {
                "text_offset": offsets,
                "token_logprobs": none + [-0.5] * (len(offsets) - 1),
                "top_logprobs": none + [{"x": -0.25}] * (len(offsets) - 1),
            }
            return self.say(200, {"choices": [{"text": body["prompt"], "logprobs": told}]})
        return self.say(200, {"choices": [{"text": ANSWER}]})

    def say(self, status: int, data: Any) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_args: Any) -> None:
        return


@pytest.fixture
def record() -> Iterator[LaunchRecord]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaks)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    yield LaunchRecord("toy", "1", "m", (), {}, "127.0.0.1", int(port), {}, {}, "m")
    server.shutdown()
    server.server_close()


def test_likelihoods_are_those_of_the_answers_own_tokens(record: LaunchRecord) -> None:
    probe = HttpProbe(["First of all, ", "And then "], 16)
    answers = probe.answers(record)
    assert answers.texts == (ANSWER, ANSWER)
    judged = probe.judged(record, answers)
    count = len(ANSWER.split())
    for one in judged.likelihoods:
        assert one.offsets[0] == 0
        assert (len(one.offsets), one.mean) == (count, -0.5)
        assert one.gap_at(3) == pytest.approx(0.25)


def test_a_server_without_echo_is_said_to_be_so(record: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speaks, "likelihoods", False)
    probe = HttpProbe(["Well, "], 16)
    judged = probe.judged(record, probe.answers(record))
    assert judged.likelihoods == ()
    assert "status 400" in judged.unknown
    with pytest.raises(NoAnswer):
        probe.answers(replace(record, port=1))


PROMPT = "Well, "
NOT_THE_ECHOS: dict[str, Any] = {
    "of what it made itself": {"text_offset": [0], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]},
    "no positions and no tokens": {
        "text_offset": [-1] * 9,
        "token_logprobs": [-1.0] * 9,
        "top_logprobs": [None] * 9,
    },
    "positions of bytes": {
        "text_offset": [0, 600, 1200],
        "token_logprobs": [-1.0] * 3,
        "top_logprobs": [None] * 3,
    },
    "nothing": {"text_offset": [], "token_logprobs": [], "top_logprobs": []},
    "no list": {"text_offset": 5, "token_logprobs": 5, "top_logprobs": 5},
}


@pytest.mark.parametrize("told", NOT_THE_ECHOS.values(), ids=NOT_THE_ECHOS.keys())
def test_likelihoods_of_something_else_are_none(told: Any) -> None:
    text = ANSWER * 6
    with pytest.raises(NoAnswer):
        _likelihood({"choices": [{"logprobs": told}]}, len(PROMPT), len(PROMPT) + len(text))


def test_positions_are_counted_from_tokens_where_a_server_does_not() -> None:
    tokens = ["Well", ", ", "a ", "plain ", "answer"]
    told = {
        "text_offset": [-1] * 5,
        "tokens": tokens,
        "token_logprobs": [None, -0.1, -0.2, -0.3, -0.4],
        "top_logprobs": [None] * 5,
    }
    found = _likelihood({"choices": [{"logprobs": told}]}, len(PROMPT), len("".join(tokens)))
    assert (found.offsets, found.chosen) == ((0, 2, 8), (-0.2, -0.3, -0.4))


ALONE, TOGETHER = 8, 32
"""Requests of the probe, one after another and then at once."""


class Crowded(ThreadingHTTPServer):
    request_queue_size = 2 * TOGETHER
    daemon_threads = True


class Harmed(BaseHTTPRequestHandler):
    """Answers with words that hang on the prompt; wrongly where its settings do harm, as `harms` says.

    Requests that are made at once wait until all of them are there.
    """

    asked = 0
    lock = threading.Lock()
    meeting = threading.Barrier(TOGETHER)
    harms: Any = staticmethod(lambda _prompt, _running: False)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            place = Harmed.asked % (ALONE + TOGETHER)
            Harmed.asked += 1
        running = 1
        if place >= ALONE:
            with suppress(threading.BrokenBarrierError):
                self.meeting.wait(30)
                running = TOGETHER
        draw = random.Random(body["prompt"])
        words = [draw.choice(("alpha", "beta", "gamma", "delta")) for _ in range(body["max_tokens"])]
        if self.harms(body["prompt"], running):
            words[len(words) // 2] = "omega"
        data = json.dumps({"choices": [{"text": " ".join(words)}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        return


TRANSLATIONS = {
    f"User: {prompt.text}\n\nAssistant:" for prompt in load_prompts("mixed", split="all") if prompt.kind == "translate"
}


@pytest.mark.parametrize(
    ("harms", "least"),
    [
        (lambda _prompt, running: running > 16, 8),
        (lambda prompt, _running: len(prompt) > 1000, 2),
        (lambda prompt, _running: prompt in TRANSLATIONS, 2),
    ],
    ids=["under load alone", "long prompts alone", "one kind alone"],
)
def test_harm_that_shows_only_somewhere_is_seen(monkeypatch: pytest.MonkeyPatch, harms: Any, least: int) -> None:
    wanted = space(SPACE, f"workload.concurrency=[1, {TOGETHER}]")
    monkeypatch.setattr(Harmed, "asked", 0)
    monkeypatch.setattr(Harmed, "meeting", threading.Barrier(TOGETHER))
    server = Crowded(("127.0.0.1", 0), Harmed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    record = LaunchRecord("toy", "1", "m", (), {}, "127.0.0.1", int(server.server_address[1]), {}, {}, "m")
    try:
        probe = quality_probe(wanted)
        baseline = probe.answers(record)
        monkeypatch.setattr(Harmed, "harms", staticmethod(harms))
        candidate = probe.answers(record)
    finally:
        server.shutdown()
        server.server_close()
    assert not Harmed.meeting.broken
    assert len(baseline.texts) == ALONE + TOGETHER
    assert baseline.asked == candidate.asked
    assert sum(a != b for a, b in zip(baseline.texts, candidate.texts, strict=True)) >= least


def test_the_gates_prompts_are_of_every_kind_and_the_longest_of_each(tmp_path: Path) -> None:
    held_out = load_prompts("mixed", split="held_out")
    asked = spread(held_out, 8)
    assert {prompt.kind for prompt in asked} == {prompt.kind for prompt in held_out}
    for kind in {prompt.kind for prompt in held_out}:
        longest = max((prompt for prompt in held_out if prompt.kind == kind), key=lambda prompt: len(prompt.text))
        assert longest in asked
    assert spread(held_out, 0) == []
    assert len(spread(held_out, 1000)) == len({prompt.id for prompt in spread(held_out, 1000)}) == len(held_out)


class Told:
    """Answers by settings; its likelihoods say that every word was a clear choice."""

    def __init__(self, answer: Mapping[str, str]) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def answers(self, record: LaunchRecord) -> Answers:
        kind = "fast" if record.settings.get("speculation") == "ngram" else "baseline"
        self.asked.append(kind)
        return Answers((self.answer[kind],) * 5)

    def judged(self, record: LaunchRecord, answers: Answers) -> Answers:
        assert record.settings.get("speculation") == "none"  # only the baseline's server judges
        self.asked.append("judge")
        return Answers(answers.texts, (), "no likelihoods")


def run(folder: Path, probe: Told, *overrides: str) -> Any:
    store = study(folder, space(SPACE, *overrides))
    try:
        return controller(store, ToyMachine(speed=fast), probe=probe).run()
    finally:
        store.close()


def fast(settings: Mapping[str, Any], level: int) -> float:
    gain = 1.3 if settings.get("speculation") == "ngram" else 1.0
    return 100.0 * level * gain * (1 + 0.01 * settings.get("num_steps", 0))


def test_a_faster_candidate_with_the_same_answers_wins_and_each_is_asked_once(tmp_path: Path) -> None:
    probe = Told({"baseline": ANSWER, "fast": ANSWER})
    data = run(tmp_path, probe)
    found = recommendation(data)
    assert found.overall.winner is not None
    assert {verdict.outcome for verdict in verdicts(data).values()} == {"same"}
    assert probe.asked.count("baseline") == 1
    finalists = {c for confirmation in data.confirmations for c in confirmation.finalists}
    assert probe.asked.count("fast") == len(finalists)
    assert "verdict" in {kind for _, kind in data.quality}


def test_a_faster_candidate_with_other_answers_never_wins_unless_asked_for(tmp_path: Path) -> None:
    probe = Told({"baseline": ANSWER, "fast": "no"})
    data = run(tmp_path, probe)
    found = recommendation(data)
    assert found.overall.winner is None
    assert all(choice.winner is None for choice in found.per_concurrency)
    assert any("answers are not the baseline's" in line and "allow_lossy" in line for line in found.advice)
    allowed = replace(data, space=space(SPACE, "quality.allow_lossy=true"))
    assert recommendation(allowed).overall.winner is not None


def test_the_users_check_has_the_last_word(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        "import json, sys; told = json.load(sys.stdin); sys.exit('too terse, ' + told['candidate'][0][:7])"
    )
    command = json.dumps([sys.executable, str(script)])
    data = run(tmp_path, Told({"baseline": ANSWER, "fast": ANSWER}), f"quality.check_command={command}")
    found = recommendation(data)
    assert found.overall.winner is None
    assert any("the check objects: too terse, a plain" in line for line in found.advice)
    assert check([sys.executable, "-c", "pass"], {}) is None
    garbled = "import sys; sys.stdout.buffer.write(bytes(range(128, 256))); sys.exit(1)"
    assert check([sys.executable, "-c", garbled], {}), "what it writes need not be text"
    assert "cannot be started" in (check(["./no-such-program"], {}) or "")


def test_what_is_lossy_by_its_settings_takes_nobodys_place_in_the_confirmation(tmp_path: Path) -> None:
    probe = Told({"baseline": ANSWER, "fast": ANSWER})
    store = study(tmp_path, space(SPACE, "parameters.weights.choices=[bf16, int4]", "baseline.weights=bf16"))
    try:
        data = controller(store, ToyMachine(speed=faster_when_lossy), probe=probe).run()
    finally:
        store.close()
    tried = [data.settings_of(trial.candidate_id) for trial in data.measured]
    assert any(settings["weights"] == "int4" for settings in tried)
    finalists = [c for confirmation in data.confirmations for c in confirmation.finalists]
    assert finalists
    assert all(data.settings_of(candidate)["weights"] == "bf16" for candidate in finalists)
    found = recommendation(data)
    assert found.overall.winner is not None
    assert any("lossy by its settings (weights=int4)" in line for line in found.advice)


def faster_when_lossy(settings: Mapping[str, Any], level: int) -> float:
    return fast(settings, level) * (2.0 if settings.get("weights") == "int4" else 1.0)
