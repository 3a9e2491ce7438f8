"""From a log, an exit status and a phase to a failure class: the first relevant error counts."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import yaml

from tuner.engines.base import get_engine
from tuner.launch.classify import classify
from tuner.launch.kinds import KINDS, failure
from tuner.launch.rules import names, own_problems, rule_book
from tuner.records import Failure, Gate
from tuner.space import Outside, SpaceProblems, parse_space

EXAMPLES = [(engine, rule, line) for engine in names() for rule in rule_book(engine).causes for line in rule.examples]
COUNTEREXAMPLES = [
    (engine, rule, line) for engine in names() for rule in rule_book(engine).causes for line in rule.counterexamples
]

OUT_OF_MEMORY_THEN_CLEAN_UP = """\
INFO 11-02 10:21:55 [gpu_worker.py:201] loading weights
Traceback (most recent call last):
  File "engine/core.py", line 88, in run
    self.executor = Executor(config)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.
Traceback (most recent call last):
  File "engine/core.py", line 140, in __del__
    self.shutdown()
AttributeError: 'Core' object has no attribute 'workers'
"""

VLLM_WRAPPED = """\
(EngineCore pid=77) ERROR 11-02 10:21:59 [core.py:1010] EngineCore failed to start.
(EngineCore pid=77) ERROR 11-02 10:21:59 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-02 10:21:59 [core.py:1010]   File "core.py", line 99, in run
(EngineCore pid=77) ERROR 11-02 10:21:59 [core.py:1010]     raise ValueError("draft and target disagree")
(EngineCore pid=77) ERROR 11-02 10:21:59 [core.py:1010] ValueError: draft and target disagree
(APIServer pid=70) Traceback (most recent call last):
(APIServer pid=70)   File "api_server.py", line 20, in main
(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

SGLANG_SIGQUIT = """\
[2026-11-02 10:22:01 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 2400, in run_scheduler_process
    scheduler = Scheduler(server_args)
AssertionError

[2026-11-02 10:22:02] Received sigquit from a child process. It usually means the child failed.
"""

CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in build
KeyError: 'rope_theta'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in main
RuntimeError: model could not be built
"""


@pytest.mark.parametrize(("engine", "rule", "line"), EXAMPLES)
def test_every_rule_matches_its_examples_and_is_the_one_that_does(engine: str, rule, line: str) -> None:
    found = rule_book(engine).cause(line)
    assert found is not None
    assert found.kind == rule.kind


@pytest.mark.parametrize(("engine", "rule", "line"), COUNTEREXAMPLES)
def test_no_rule_takes_a_line_that_is_none_of_its_business(engine: str, rule, line: str) -> None:
    assert rule_book(engine).cause(line) is None


@pytest.mark.parametrize("engine", names())
def test_every_rule_has_an_example_and_a_known_kind(engine: str) -> None:
    book = rule_book(engine)
    assert all(rule.examples for rule in (*book.causes, *book.wrappers))
    assert all(rule.kind in KINDS or rule.kind in ("oom", "crash") for rule in book.causes)
    assert all(rule.pattern.search(line) for rule in book.wrappers for line in rule.examples)


def test_the_first_error_counts_and_the_last_is_shown_beside_it() -> None:
    found = classify(OUT_OF_MEMORY_THEN_CLEAN_UP, phase="ready", exit_status=1)
    assert found.kind == "oom_startup"
    assert "Executor(config)" in found.evidence
    assert "later: AttributeError: 'Core' object has no attribute 'workers'" in found.evidence


def test_memory_that_runs_out_later_is_a_matter_of_load() -> None:
    assert classify(OUT_OF_MEMORY_THEN_CLEAN_UP, phase="bench", exit_status=1).kind == "oom_under_load"


def test_the_root_cause_is_found_above_an_exception_that_only_reports_it() -> None:
    found = classify(VLLM_WRAPPED, phase="ready", exit_status=1, engine="vllm")
    assert found.kind == "startup_crash"
    assert "ValueError: draft and target disagree" in found.message


def test_a_server_that_kills_itself_after_an_error_was_not_killed_by_somebody_else() -> None:
    found = classify(SGLANG_SIGQUIT, phase="ready", exit_status=-signal.SIGKILL, engine="sglang")
    assert found.kind == "startup_crash"
    assert "AssertionError" in found.evidence


def test_of_a_chain_of_exceptions_the_first_is_the_cause() -> None:
    assert "KeyError: 'rope_theta'" in classify(CHAINED, phase="ready", exit_status=1).message


@pytest.mark.parametrize("status", [-signal.SIGKILL, 137, -signal.SIGTERM, 143])
def test_a_signal_from_outside_without_any_error_is_the_environments(status: int) -> None:
    found = classify("INFO all is well\n", phase="bench", exit_status=status)
    assert (found.kind, found.blame, found.retryable) == ("killed_externally", "environment", True)


@pytest.mark.parametrize(("status", "name"), [(-signal.SIGSEGV, "SIGSEGV"), (134, "SIGABRT")])
def test_a_signal_of_its_own_making_is_a_crash(status: int, name: str) -> None:
    found = classify("", phase="bench", exit_status=status)
    assert found.kind == "died_mid_bench"
    assert name in found.message


def test_somebody_elses_port_is_passing_trouble_of_the_machine() -> None:
    line = "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', {}): address already in use"
    ours = classify(line.format(30000), phase="ready", exit_status=1, port=30000)
    internal = classify(line.format(41234), phase="ready", exit_status=1, port=30000)
    assert (ours.kind, internal.kind) == ("port_conflict", "transient_env")
    assert {ours.blame, internal.blame} == {"environment"}


def test_an_error_before_readiness_explains_a_first_decode_that_fails() -> None:
    found = classify("", phase="smoke", exit_status=1, earlier=CHAINED)
    assert found.kind == "partial_init"
    assert "KeyError: 'rope_theta'" in found.evidence


def test_an_error_before_readiness_does_not_explain_a_death_under_load() -> None:
    assert classify("", phase="bench", exit_status=1).kind == "died_mid_bench"


def test_a_silent_server_keeps_the_symptom_and_a_talkative_one_gets_the_cause() -> None:
    silent = classify("loading\n", phase="ready", exit_status=None, symptom="startup_hang", seen="silent for 120 s")
    assert (silent.kind, silent.message, silent.evidence) == ("startup_hang", "silent for 120 s", "loading")
    dying = classify(OUT_OF_MEMORY_THEN_CLEAN_UP, phase="ready", exit_status=None, symptom="startup_hang")
    assert dying.kind == "oom_startup"


def test_without_any_error_the_last_lines_are_the_evidence() -> None:
    log = "\n".join(f"step {i}" for i in range(100))
    assert classify(log, phase="bench", exit_status=3).evidence.splitlines()[-1] == "step 99"


def test_colours_and_a_torn_log_do_not_hide_the_error() -> None:
    log = "\x1b[31mtorch.OutOfMemoryError: CUDA out of memory.\x1b[0m\r\nTraceback (most recent call last):"
    assert classify(log, phase="ready", exit_status=1).kind == "oom_startup"


def test_every_class_says_whom_it_is_held_against() -> None:
    assert failure("oom_startup", "ready", "x").blame == "candidate"
    assert failure("killed_externally", "bench", "x").retryable
    with pytest.raises(KeyError):
        failure("something_else", "bench", "x")


RULES = """\
- {kind: oom, pattern: 'arena (\\w+ )?full', examples: ['arena is full'], not: ['the arena is half full']}
- {kind: wrapper, pattern: 'engine gave up'}
"""


def test_a_users_rules_may_stand_in_a_file_or_in_the_space(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text(RULES)
    assert own_problems(str(file)) == []
    assert own_problems(yaml.safe_load(RULES)) == []
    args = {"command": ["server", "{port}"], "log_rules": str(file)}
    record = get_engine("command").record(model="m", args=args, env={}, settings={}, host="h", port=1)
    assert [rule["kind"] for rule in record.log_rules] == ["oom", "wrapper"]
    log = "ERROR engine gave up\nERROR arena is full\n"
    assert classify(log, phase="bench", exit_status=1, own_rules=record.log_rules).kind == "oom_under_load"


def test_everything_wrong_with_a_users_rules_is_said_at_once(tmp_path):
    wrong = [
        {"kind": "omm", "pattern": "x"},
        {"kind": "oom", "pattern": "(", "example": ["y"]},
        {"kind": "oom", "pattern": "x", "examples": ["y"], "not": ["x"]},
        {"pattern": "x"},
        {"kind": "oom"},
        {"kind": "oom", "pattern": "x*"},
    ]
    said = dict(own_problems(wrong))
    assert "did you mean 'oom'?" in said[(0, "kind")]
    assert "is not a regular expression" in said[(1, "pattern")]
    assert "did you mean 'examples'?" in said[(1, "example")]
    assert said[(2, "examples", 0)] == "the pattern does not match 'y'"
    assert said[(2, "not", 0)] == "the pattern matches 'x'"
    assert said[(3,)] == "has no kind"
    assert "needs a pattern" in said[(4,)]
    assert "match every" in said[(5, "pattern")]
    file = tmp_path / "rules.yaml"
    file.write_text("- {kind: omm, pattern: x}\n")
    ((_, message),) = own_problems(str(file))
    assert f"{file}, rule 1 kind: 'omm' is unknown" in message
    assert "cannot be read" in own_problems(str(tmp_path / "nowhere"))[0][1]
    assert "must be a list" in own_problems([1])[0][1]


def test_the_check_of_a_space_names_the_lines_of_its_log_rules():
    text = """\
name: own
engine:
  kind: command
  model: m
  args:
    command: [server, "{port}", "{x}"]
    log_rules:
      - {kind: oom, pattern: fine}
      - {kind: omm, pattern: "("}
workload: {concurrency: [1]}
baseline: {x: 1}
parameters: {x: {choices: [1, 2]}}
"""
    with pytest.raises(SpaceProblems) as found:
        parse_space(text, source="own.yaml", outside=Outside(engine_for=get_engine, rule_problems=own_problems))
    said = str(found.value)
    assert "own.yaml:9: engine.args.log_rules[1].kind: 'omm' is unknown; did you mean 'oom'?" in said
    assert "own.yaml:9: engine.args.log_rules[1].pattern: is not a regular expression" in said


@pytest.mark.parametrize("engine", names())
def test_every_stage_matches_its_examples(engine):
    book = rule_book(engine)
    for rule in book.stages:
        assert rule.examples
        assert [book.stage(line) for line in rule.examples] == [rule.kind] * len(rule.examples)


def test_memory_of_a_container_and_a_runtime_that_fails_come_before_what_a_log_says():
    log = "RuntimeError: something else\n"
    assert classify(log, phase="bench", exit_status=137, oom_killed=True).kind == "oom_under_load"
    never = classify("docker: no such device\n", phase="ready", exit_status=125, never_ran="no such device")
    assert (never.kind, never.blame) == ("env_broken", "environment")


CRASH = """\
Traceback (most recent call last):
  File "engine.py", line 3, in init
    load()
RuntimeError: draft head: expected hidden size 576, got 960
"""


@pytest.mark.parametrize(
    "after",
    [
        'Traceback (most recent call last):\n  File "s.py", line 1\nOSError: [Errno 98] Address already in use\n',
        "cannot write core dump: No space left on device\n",
        "OSError: [Errno 24] Too many open files\n",
        "Segmentation fault (core dumped)\n",
    ],
)
def test_what_blames_the_machine_after_an_error_does_not_excuse_it(after: str) -> None:
    found = classify(CRASH + after, phase="ready", exit_status=1)
    assert (found.kind, found.blame) == ("startup_crash", "candidate")
    assert "expected hidden size 576" in found.message


@pytest.mark.parametrize(
    "before",
    [
        "WARNING: store port 29500: Address already in use, trying 29501\n",
        "INFO autotune: config 3 skipped: torch.OutOfMemoryError: CUDA out of memory. Trying the next\n",
    ],
)
def test_a_line_that_calls_itself_no_error_is_no_cause(before: str) -> None:
    found = classify(before + CRASH, phase="ready", exit_status=1)
    assert (found.kind, "expected hidden size 576" in found.message) == ("startup_crash", True)


def test_the_users_own_rule_counts_whatever_the_line_calls_itself() -> None:
    own = [{"kind": "oom", "pattern": "arena is full"}]
    assert classify("WARNING arena is full\n", phase="bench", exit_status=1, own_rules=own).kind == "oom_under_load"


@pytest.mark.parametrize("engine", ["generic", "sglang", "vllm"])
@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ",
        "(RayWorkerWrapper pid=1, ip=10.0.0.1) ",
        "(EngineCore_0 pid=12) ",
        "2026-11-29T12:00:0{}Z ",
        "[2026-11-29 12:00:0{} TP0] ",
        "(EngineCore_DP0 pid=12) ERROR 11-29 12:00:0{} [core.py:700] ",
    ],
)
def test_what_stands_before_each_line_of_a_traceback_hides_nothing(engine: str, prefix: str) -> None:
    log = "".join(f"{prefix.format(i)}{line}\n" for i, line in enumerate(CRASH.splitlines())) + "I am done\nbye\n"
    found = classify(log, phase="ready", exit_status=1, engine=engine)
    assert found.message.endswith("RuntimeError: draft head: expected hidden size 576, got 960")
    memory = f"{prefix}Traceback (most recent call last):\n{prefix}  x\n{prefix}torch.OutOfMemoryError: CUDA\n"
    assert classify(memory.format(1, 2, 3), phase="ready", exit_status=1, engine=engine).kind == "oom_startup"


NOISE = "".join(f"stopping {i}\n" for i in range(20))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "thread 'main' panicked at src/d.rs:8:21:\nexpected 576, got 960\nnote: x\n",
            "d.rs:8:21: expected 576, got 960",
        ),
        ("panic: expected 576, got 960\n\ngoroutine 1 [running]:\n", "panic: expected 576, got 960"),
        ("server: draft.c:88: init: Assertion `hidden == 576' failed.\n", "Assertion `hidden == 576' failed."),
        ("terminate called after throwing an instance of 'E'\n  what():  576, not 960\n", "what():  576, not 960"),
        ('{"level":"error","msg":"expected 576"}\n', '"msg":"expected 576"}'),
        (
            "Traceback (most recent call last):\n  x\n"
            "pydantic_core.ValidationError: 1 validation error for X\nfield\n  576\n",
            "1 validation error for X field; 576",
        ),
        (
            "Traceback (most recent call last):\n  x\na.ConfigError: wrong:\n  expected 576\n",
            "a.ConfigError: wrong: expected 576",
        ),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File x\n"
            "  | ExceptionGroup: errors (1 sub-exception)\n"
            "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File y\n"
            "    | RuntimeError: expected 576\n    +------------\n",
            "RuntimeError: expected 576",
        ),
    ],
)
def test_last_words_of_every_kind_are_understood(log: str, said: str) -> None:
    assert classify(log + NOISE, phase="ready", exit_status=1).message.endswith(said)


def test_a_kill_while_the_kernel_ends_processes_for_want_of_memory_is_that() -> None:
    killed = classify("INFO loading\n", phase="bench", exit_status=-signal.SIGKILL, kernel_oom=True)
    assert (killed.kind, killed.blame) == ("oom_under_load", "candidate")
    other = classify(CRASH, phase="ready", exit_status=1, kernel_oom=True)
    assert other.kind == "startup_crash", "it was another process then"
    worker = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.\n"
    found = classify(worker, phase="ready", exit_status=1, engine="vllm", kernel_oom=True)
    assert (found.kind, found.blame) == ("oom_startup", "candidate")


def test_a_death_under_load_names_the_error_that_the_start_has_swallowed() -> None:
    found = classify("AttributeError: no head\n", phase="bench", exit_status=1, started=CRASH)
    assert found.kind == "died_mid_bench"
    assert found.message.endswith("earlier: RuntimeError: draft head: expected hidden size 576, got 960")


def test_what_a_server_writes_cannot_reach_a_terminal_as_it_is_nor_fill_it() -> None:
    log = "\0\1\x1b[31mERROR: broken \0 thing\x1b]0;owned\x07\x1b[2J\u202e\n" + "ERROR " + "9" * 3_000_000 + "\n"
    for text in (log, log * 3):
        found = classify(text, phase="ready", exit_status=1, seen="\x1b[2Jseen")
        for said in (found.message, found.evidence):
            assert not [one for one in said if ord(one) < 32 and one != "\n"]
            assert "owned" not in said
            assert "\u202e" not in said
            assert len(said) < 10_000


def test_no_failure_and_no_gate_carries_a_servers_words_as_they_are() -> None:
    """An answer, an event of a stream or a setting that it reports come to a person as a log does."""
    words = "\x1b[2J\x1b]0;owned\x07\0\u202e" + "9" * 1_000_000
    failure = Failure("bad_protocol", "bench", words, f"one\r\ntwo{words}")
    gate = Gate("low_success_rate", 0.0, 1.0, False, words)
    for said in (failure.message, failure.evidence, gate.detail):
        assert not [one for one in said if ord(one) < 32 and one != "\n"]
        assert "owned" not in said
        assert "\u202e" not in said
        assert len(said) < 60_001
    assert failure.evidence.startswith("one\ntwo")
    assert replace(failure, kind="hung_decode").message == failure.message, "nothing is cut twice"
