"""Why a server failed, from its log, its exit status and the phase: a pure function.

The first relevant error counts, not the last: what follows is usually clean-up code that trips over a half-built
object. The last one is shown beside it when it differs.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.launch.kinds import Phase, failure
from tuner.launch.rules import Rule, RuleBook, rule_book
from tuner.records import Failure

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\(\S+ pid=\d+\)\s?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
"""Process and logger prefixes in front of each line of a logged traceback; the indentation behind them is kept."""

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: .*|:)?$")
_ERROR_LINE = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|[Ff]atal error)\b|^\S*\s*[Ee]rror:")
_HALF_BUILT = re.compile(
    r"AttributeError: .*has no attribute|'NoneType' object|UnboundLocalError|is not initiali[sz]ed"
)
_EXTERNAL = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

_CRASH: dict[str, str] = {
    "start": "startup_crash",
    "ready": "startup_crash",
    "smoke": "crash_on_first_decode",
    "readback": "crash_on_first_decode",
    "bench": "died_mid_bench",
    "stop": "died_mid_bench",
}
_EVIDENCE_LINES = 24


@dataclass(frozen=True)
class _Error:
    """One error in a log: the line that says what it is, and the lines to show."""

    line: str
    excerpt: str
    rule: Rule | None = None
    wrapper: bool = False


def classify(
    log: str,
    *,
    phase: Phase,
    exit_status: int | None,
    engine: str = "generic",
    earlier: str = "",
    port: int | None = None,
    symptom: str | None = None,
    seen: str = "",
    own_rules: Sequence[Mapping[str, Any]] = (),
    never_ran: str = "",
    oom_killed: bool = False,
) -> Failure:
    """The class of one failure, with evidence.

    Args:
        log: what the server wrote since it last proved that it works (all of it, when it never did).
        phase: what the tuner was doing.
        exit_status: as `subprocess` gives it: negative for a signal; None while the process lives.
        engine: whose log rules to use.
        earlier: what the server wrote before it reported readiness; given in the phases smoke and readback, where an
            error in it means that the server came up half-built.
        port: the port of the launch. A conflict about another one is the machine's passing trouble.
        symptom: the class when the log names no better one; needed when the process lives.
        seen: what the tuner itself saw ("no token for 30 s"), for the message.
        own_rules: the user's log rules, which come before the engine's.
        never_ran: why the runtime of a container did not run it, which is none of the server's doing.
        oom_killed: whether the system ended a process of the container for want of memory.
    """
    book = rule_book(engine, own_rules)
    errors = _errors(log, book)
    before = _errors(earlier, book)
    cause = next((error for error in errors if error.rule), None)
    raised = [error for error in errors if not error.wrapper]
    first = cause or next(iter(raised or errors), None)
    ended = _ended(exit_status)

    if never_ran:
        kind, seen = "env_broken", f"{seen}; {never_ran}" if seen else never_ran
    elif oom_killed:
        kind, seen = (
            _oom(phase),
            f"{seen}; memory ran out in its container" if seen else "memory ran out in its container",
        )
    elif cause and cause.rule:
        kind = _kind(cause, phase, port)
    elif phase in ("smoke", "readback") and any(not error.wrapper for error in before):
        kind, first = "partial_init", next(error for error in before if not error.wrapper)
    elif phase in ("smoke", "readback") and first and _HALF_BUILT.search(first.line + seen):
        kind = "partial_init"
    elif _signal(exit_status) in _EXTERNAL and not raised:
        kind = "killed_externally"
    else:
        kind = symptom or _CRASH[phase]

    stage = _stage(log, first, book) if phase in ("start", "ready") else ""
    during = f"while {stage}" if stage else ""
    message = "; ".join(part for part in (seen, ended, first.line if first else "", during) if part)
    evidence = _evidence(first, before + errors, log or earlier)
    return replace(failure(kind, phase, message, evidence, exit_status), stage=stage)


def _stage(log: str, first: _Error | None, book: RuleBook) -> str:
    """What the server last said it was doing before its first error; "" where no rule knows."""
    stage = ""
    for raw in log.splitlines():
        line = _ANSI.sub("", raw)
        if first is not None and first.line and first.line in line:
            break
        stage = book.stage(line) or stage
    return stage


def _oom(phase: Phase) -> str:
    return "oom_startup" if phase in ("start", "ready") else "oom_under_load"


def _kind(cause: _Error, phase: Phase, port: int | None) -> str:
    assert cause.rule is not None
    kind = cause.rule.kind
    if kind == "crash":
        return _CRASH[phase]
    if kind == "oom":
        return _oom(phase)
    if kind == "port_conflict" and port is not None:
        ports = {int(number) for number in re.findall(r"(?:[:,]\s?|port:? )(\d{2,5})\b", cause.line)}
        return "port_conflict" if not ports or port in ports else "transient_env"
    return kind


def _signal(exit_status: int | None) -> signal.Signals | None:
    """The signal that ended a process; a shell or container runtime in between reports it as 128 + number."""
    if exit_status is None:
        return None
    number = -exit_status if exit_status < 0 else exit_status - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _ended(exit_status: int | None) -> str:
    if exit_status is None:
        return ""
    if number := _signal(exit_status):
        return f"the server was ended by {number.name}"
    if exit_status == 0:
        return "the server ended with status 0 without being asked to"
    return f"the server ended with status {exit_status}"


def _errors(log: str, book: RuleBook) -> list[_Error]:
    """Every error of a log, in order: tracebacks, lines that match a rule, lines that call themselves errors.

    Tracebacks and rules are relevant; plain error lines are listed only when there is neither.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in log.splitlines()]
    found: list[_Error] = []
    plain: list[_Error] = []
    i = 0
    while i < len(lines):
        if _TRACEBACK in lines[i]:
            error, i = _traceback(lines, i, book)
            found.append(error)
            continue
        line = _PREFIX.sub("", lines[i]).strip()
        if rule := book.cause(line):
            found.append(_Error(line, "\n".join(lines[max(0, i - 2) : i + 3]), rule))
        elif _ERROR_LINE.search(lines[i]):
            plain.append(_Error(line, "\n".join(lines[i : i + 3]), None, book.is_wrapper(line)))
        i += 1
    return found or plain


def _traceback(lines: list[str], start: int, book: RuleBook) -> tuple[_Error, int]:
    """The traceback that begins at `start`, and the index of the line behind it."""
    offset = lines[start].index(_TRACEBACK)
    logger_prefix = _PREFIX.match(lines[start])
    inside = offset > (logger_prefix.end() if logger_prefix else 0)
    end = start + 1
    while end < len(lines):
        text = _PREFIX.sub("", lines[end])
        if text and not text[0].isspace() and _EXCEPTION.match(text):
            break
        if _TRACEBACK in text or (inside and not text):
            break
        end += 1
    line = _PREFIX.sub("", lines[end]).strip() if end < len(lines) else ""
    if not _EXCEPTION.match(line):
        line = _PREFIX.sub("", lines[start]).strip()
        end -= 1
    body = lines[start : end + 1]
    if len(body) > _EVIDENCE_LINES:
        body = [body[0], "  …", *body[2 - _EVIDENCE_LINES :]]
    return _Error(line, "\n".join(body), book.cause(line), book.is_wrapper(line)), end + 1


def _evidence(first: _Error | None, errors: list[_Error], log: str) -> str:
    if first is None:
        tail = [_ANSI.sub("", line).rstrip() for line in log.splitlines()[-8:]]
        return "\n".join(tail)
    last = errors[-1]
    if last.line == first.line:
        return first.excerpt
    return f"{first.excerpt}\n… later: {last.line}"
