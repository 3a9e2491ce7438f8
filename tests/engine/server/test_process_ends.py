"""Neither process outlives the other, nobody hangs, and the cause is the last thing in the log."""

import os
import signal
import socket
import threading
import time

import httpx
import pytest


class Stream(threading.Thread):
    """A request in flight, streamed or not, that would go on until it is cut off."""

    def __init__(self, url: str, stream: bool, tokens: int = 400_000) -> None:
        super().__init__(daemon=True)
        self._tokens = tokens
        self.body = ""
        self.status = 0
        self._url, self._stream = url, stream
        self._begun = threading.Event()
        self.start()
        if stream:
            assert self._begun.wait(10)

    def run(self) -> None:
        body = {"prompt": "abc", "max_tokens": self._tokens, "ignore_eos": True, "stream": self._stream}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=20) as response:
            self.status = response.status_code
            for text in response.iter_text():
                self.body += text
                self._begun.set()

    def result(self) -> tuple[int, str]:
        self.join(15)
        assert not self.is_alive(), "the client hangs"
        return self.status, self.body


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _in_flight(server):
    streams = [Stream(server.url, stream) for stream in (True, False)]
    end = time.monotonic() + 5
    while "engine_http_running 2.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end
    return streams


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ("<|raise|>", "model process failed: RuntimeError: the toy was asked to raise"),
        ("<|kill|>", "model process ended by signal 9 (SIGKILL)"),
        ("<|exit|>", "model process ended with status 0"),
    ],
)
def test_when_the_model_process_ends_everything_ends_with_the_cause(start, prompt, cause):
    server = start(context_length=500_000, kv_tokens=500_000)
    streams = _in_flight(server)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt}, timeout=20)
    assert answer.status_code == 503
    assert cause in answer.json()["error"]["message"]
    (_, streamed), (status, whole) = (stream.result() for stream in streams)
    assert cause in streamed.split("data: ")[-1]
    assert "[DONE]" not in streamed
    assert status == 503
    assert cause in whole
    assert server.end() == 1
    assert cause in server.lines()[-1]
    assert "CRITICAL" in server.lines()[-1]
    assert _gone(server.model_pid())


def test_an_exception_in_the_frontend_ends_everything_with_the_cause(start):
    server = start()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "<|garble|>"}, timeout=20)
    assert answer.status_code == 503
    assert server.end() == 1
    assert "frontend failed: " in server.lines()[-1]
    assert "Traceback" in server.log.read_text()
    assert _gone(server.model_pid())


def test_a_killed_model_process_is_noticed_without_traffic(start):
    server = start()
    assert server.url
    os.kill(server.model_pid(), signal.SIGKILL)
    assert server.end() == 1
    assert "signal 9" in server.lines()[-1]


def test_a_stopped_model_process_that_closes_nothing_is_unhealthy_only_to_the_real_token(start):
    server = start()
    assert server.url
    os.kill(server.model_pid(), signal.SIGSTOP)
    assert httpx.get(f"{server.url}/health").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server.url}/health_generate", timeout=0.5)
    server.process.terminate()
    assert server.end() == 0
    assert _gone(server.model_pid())


def test_a_killed_frontend_takes_the_model_process_with_it(start):
    server = start()
    assert server.url
    server.process.kill()
    server.end()
    end = time.monotonic() + 5
    while not _gone(server.model_pid()):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("worker", "cause"),
    [
        ("fatal_at_start", "model process failed: ValueError: no such layer"),
        ("raise_at_start", "model process failed: ValueError: half-built"),
        ("exit_at_start", "model process ended with status 0"),
        ("not_there", "model process failed: AttributeError"),
    ],
)
def test_a_half_built_model_process_never_serves(start, worker, cause):
    server = start(worker)
    assert server.end() == 1
    assert cause in server.lines()[-1]
    assert "listening" not in server.log.read_text()


def test_the_port_answers_only_when_the_model_is_ready(start):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = start("never_ready", port=port)
    server.wait_for("loads")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    server.process.terminate()
    assert server.end() == 0
    assert _gone(server.model_pid())


def test_a_port_in_use_is_reported_before_the_model_is_loaded(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.end() == 1
    assert f"port {port} on 127.0.0.1 is in use" in server.lines()[-1]
    assert "model process" not in server.log.read_text()


def test_a_host_that_is_not_ours_is_reported(start):
    server = start(host="192.0.2.1")
    assert server.end() == 1
    assert "cannot listen on 192.0.2.1" in server.lines()[-1]


def test_a_tokenizer_that_cannot_be_used_ends_the_start(start, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    server = start("never_ready", model=str(tmp_path))
    assert server.end() == 1
    assert "tokenizer.json" in server.lines()[-1]


def test_sigterm_lets_short_requests_finish_and_exits_0(start):
    server = start(context_length=500_000, kv_tokens=500_000)
    url = server.url
    result: list[httpx.Response] = []
    body = {"prompt": "abc", "max_tokens": 300}
    thread = threading.Thread(target=lambda: result.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20)))
    thread.start()
    end = time.monotonic() + 5
    while "engine_http_running 1.0" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < end
    server.process.terminate()
    assert server.end() == 0
    thread.join(5)
    assert result[0].json()["usage"]["completion_tokens"] == 300
    assert _gone(server.model_pid())


def test_sigint_to_the_whole_group_cuts_long_requests_with_an_error_and_exits_0(start):
    server = start(context_length=500_000, kv_tokens=500_000)
    streams = _in_flight(server)
    os.killpg(server.process.pid, signal.SIGINT)
    for stream in streams:
        assert "shutting down" in stream.result()[1]
    assert server.end() == 0
    assert _gone(server.model_pid())


def test_after_sigterm_what_runs_is_finished_within_the_time_given(start):
    server = start(drain_s=20.0, context_length=6000, kv_tokens=6000)
    answers: list[httpx.Response] = []
    body = {"prompt": "abc", "max_tokens": 1000}
    threads = [
        threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=30))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 5
    while "engine_http_running 3.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end
    server.process.terminate()
    for thread in threads:
        thread.join(25)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [1000] * 3
    assert server.end() == 0


def test_a_second_signal_ends_at_once_what_the_first_let_run(start):
    server = start(drain_s=60.0, context_length=500_000, kv_tokens=500_000)
    streams = _in_flight(server)
    server.process.terminate()
    server.wait_for("draining")
    time.sleep(0.3)
    with pytest.raises(httpx.ConnectError):  # nothing is accepted any more
        httpx.get(f"{server.url}/health", timeout=1)
    began = time.monotonic()
    server.process.terminate()
    for stream in streams:
        assert "shutting down" in stream.result()[1]
    assert server.end() == 0
    assert time.monotonic() - began < 10
    assert _gone(server.model_pid())


def test_a_signal_while_settings_change_ends_both(start):
    server = start(drain_s=0.5)
    url, answers = server.url, []
    change = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/reconfigure", json={"slow": 60}, timeout=20))
    )
    change.start()
    time.sleep(0.3)
    server.process.terminate()
    change.join(15)
    assert answers[0].status_code == 503
    assert "shutting down" in answers[0].json()["error"]["message"]
    assert server.end() == 0
    assert _gone(server.model_pid())


@pytest.mark.parametrize("signals", [1, 2, 5])
def test_signals_during_the_start_end_it(start, signals):
    server = start("never_ready")
    server.wait_for("loads")
    for _ in range(signals):
        server.process.terminate()
        time.sleep(0.01)
    assert server.end() == 0
    assert _gone(server.model_pid())
