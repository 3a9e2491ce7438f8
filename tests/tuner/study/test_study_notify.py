"""The user's hook: told when a study ends, stops or needs a person; whatever it does, the study is not harmed."""

import http.server
import json
import sys
import threading
import time

import pytest

from tests.tuner.study.toy_study import SPACE, ToyEngine, ToyMachine, space, study
from tuner.errors import EnvironmentBroken, StudyStopped, TunerError
from tuner.records import Failure
from tuner.space import SpaceProblems
from tuner.space.schema import NotifySection
from tuner.study.notify import notify
from tuner.study.progress import Silent
from tuner.study.session import run_study

WRITE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


class Events(Silent):
    def __init__(self):
        self.seen = []

    def event(self, event):
        self.seen.append(event)


def hooked(folder, *command):
    words = json.dumps([sys.executable, "-c", *command])
    return space(SPACE, "budget.launches=3", f"notify={{command: {words}}}")


def run(folder, the_space, machine):
    observer = Events()
    try:
        return run_study(
            study(folder, the_space), observer=observer, engine=ToyEngine(), world=machine, folder=folder
        ), observer
    except TunerError as error:
        return error, observer


def test_the_hook_is_told_once_when_the_study_is_done(tmp_path):
    told = tmp_path / "told; $(touch x)"  # no shell reads it
    the_space = hooked(tmp_path, WRITE, str(told))
    run(tmp_path, the_space, ToyMachine())
    run(tmp_path, the_space, ToyMachine())
    (line,) = told.read_text().splitlines()
    message = json.loads(line)
    assert (message["event"], message["study"], message["exit_code"]) == ("done", "toy", 0)
    assert message["recommendation"]["overall"]["winner"] is None


@pytest.mark.parametrize(
    ("failure", "event", "error"),
    [
        (Failure("startup_crash", "ready", "kaboom"), "stopped", StudyStopped),
        (Failure("env_broken", "ready", "no disk", blame="environment"), "needs_person", EnvironmentBroken),
    ],
)
def test_the_hook_is_told_when_the_study_stops_or_needs_a_person(tmp_path, failure, event, error):
    told = tmp_path / "told"
    machine = ToyMachine(fails=lambda phase, settings, count: failure if phase == "ready" else None)
    raised, _ = run(tmp_path, hooked(tmp_path, WRITE, str(told)), machine)
    assert isinstance(raised, error)
    message = json.loads(told.read_text())
    assert (message["event"], message["exit_code"]) == (event, error.exit_code)
    assert failure.message in message["message"]


def test_a_hook_that_fails_is_reported_and_changes_nothing(tmp_path):
    data, observer = run(tmp_path, hooked(tmp_path, "import sys; sys.exit('no network')"), ToyMachine())
    assert data.state == "done"
    (said,) = [event.message for event in observer.seen if event.kind == "hook"]
    assert "status 1: no network" in said
    assert any(event.kind == "hook" for event in study(tmp_path).data().events)


def test_a_hook_that_hangs_is_ended_with_its_children():
    hook = NotifySection(command=["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.3)
    began = time.monotonic()
    assert "longer than 0.3 s" in notify(hook, {})
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("left", ["sleep 20 &", "setsid sleep 20 &"])
def test_what_a_hook_leaves_running_is_not_waited_for(left):
    began = time.monotonic()
    assert notify(NotifySection(command=["sh", "-c", f"{left} exit 0"], timeout_s=15), {}) is None
    assert time.monotonic() - began < 10


def test_what_outlives_a_hook_that_is_ended_does_not_hold_us_up():
    began = time.monotonic()
    hook = NotifySection(command=["sh", "-c", "setsid sleep 20 & sleep 20"], timeout_s=0.3)
    assert "longer than 0.3 s" in notify(hook, {})
    assert time.monotonic() - began < 10


def test_a_hook_may_complain_in_any_bytes_and_be_told_any_text():
    complains = NotifySection(command=["sh", "-c", r"printf '\377\376 bad' >&2; exit 3"])
    assert notify(complains, {}).endswith("status 3: \ufffd\ufffd bad")
    assert notify(NotifySection(command=["true"]), {"message": "half \ud83d"}) is None


def test_a_hook_that_is_not_there_or_reads_nothing():
    assert "cannot be started" in notify(NotifySection(command=["/gone/hook"]), {})
    assert notify(NotifySection(command=["true"]), {"message": "x" * 1_000_000}) is None


@pytest.fixture
def server():
    posts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "bad" in self.path else 204)
            self.end_headers()

        def log_message(self, *args):
            pass

    http_server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http_server.server_port}", posts
    http_server.shutdown()


def test_a_url_gets_the_message_and_its_secret_path_is_never_told(server, monkeypatch):
    url, posts = server
    assert notify(NotifySection(url=f"{url}/secret"), {"event": "done"}) is None
    assert posts == [{"event": "done"}]
    said = notify(NotifySection(url=f"{url}/bad/secret"), {})
    assert "500" in said
    assert "secret" not in said
    monkeypatch.setenv("HOOK_URL", f"{url}/from-the-environment")
    assert notify(NotifySection(url="${HOOK_URL}"), {}) is None
    assert "HOOK_GONE" in notify(NotifySection(url="${HOOK_GONE}/x"), {})
    assert "did not answer" in notify(NotifySection(url="http://127.0.0.1:9/secret"), {})


def test_the_hook_is_no_part_of_what_was_measured():
    assert hooked(None, "pass").fingerprint == space(SPACE).fingerprint


@pytest.mark.parametrize(
    "written",
    ["{}", "{command: [], url: null}", "{command: [a], url: 'http://x'}", "{url: 'ftp://x'}", "{comand: [a]}"],
)
def test_a_hook_that_says_neither_what_nor_where_is_refused(written):
    with pytest.raises(SpaceProblems):
        space(SPACE, f"notify={written}")
