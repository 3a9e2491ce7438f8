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

from tuner.launch.kinds import KINDS, Phase, failure
from tuner.launch.rules import Rule, RuleBook, rule_book
from tuner.plain import plain, plain_lines
from tuner.records import Failure

_PREFIX = re.compile(
    r"^(?:\([^()\n]{1,80} pid=\d+[^()\n]{0,80}\)\s?)?(?:\[rank\d+\]:\s?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
"""Process and logger prefixes in front of a line; the indentation behind them is kept."""

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = "Exception Group Traceback"
"""Says nothing by itself: the tracebacks of its parts follow."""

_EXCEPTION = re.compile(
    r"^(?!(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|NOTE|note|hint):)(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*: ?.*$"
    r"|^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit|Timeout|Iteration|Cancelled|Empty|Full|Warning)$"
    r"|^(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*$"
)
"""The line that ends a traceback. A bare word is none, unless it is called as exceptions are."""

_MANY_PARTS = re.compile(r"\bvalidation errors? for |:$")
_LOGGED = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|^\[?\d{4}-\d\d-\d\d|^$")
_PANIC = re.compile(
    r"^(?:\S+ )?thread '[^']*'(?: \(\d+\))? panicked at |^panic: |^fatal error: |Assertion [`'\"].{1,400}['\"] failed"
    r"|^terminate called after throwing"
)
"""How other languages than Python begin their last words."""

_ERROR_LINE = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|[Ff]atal error)\b|^\S{0,200}\s?[Ee]rror:"
    r"|\"(?:level|severity|lvl)\"\s?:\s?\"(?i:error|fatal|critical|panic)\""
)
_BENIGN = re.compile(r"^.{0,60}?\b(?:WARN|WARNING|INFO|DEBUG)\b")
"""A line that does not call itself an error: whoever wrote it went on."""

_PASSED_OVER = {"oom", "oom_startup", "oom_under_load", "crash", "port_conflict", "env_broken", "transient_env"}
"""Classes that a benign line does not make: a busy port or full memory may be what the server tries for."""

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
_EVIDENCE_LINES = 20
_TRACEBACK_LINES = 5000
_KERNEL = "the kernel has ended a process for want of memory"


@dataclass(frozen=True)
class _Error:
    """One error in a log: the line that says what it is, and the lines to show."""

    line: str
    excerpt: str
    rule: Rule | None = None
    wrapper: bool = False
    more: str = ""

    @property
    def said(self) -> str:
        """The whole of what it says, in one line."""
        return f"{self.line} {self.more}" if self.more else self.line

    @property
    def environment(self) -> bool:
        """Whether it would be held against the machine."""
        return self.rule is not None and self.rule.kind in KINDS and KINDS[self.rule.kind].blame == "environment"


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
    kernel_oom: bool = False,
    started: str = "",
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
        kernel_oom: whether the kernel has ended any process for want of memory meanwhile.
        started: what the server wrote before it reported readiness; shown with a death under load.
    """
    book = rule_book(engine, own_rules)
    own = frozenset(str(rule["pattern"]) for rule in own_rules)
    errors = _errors(log, book, own)
    before = _errors(earlier, book, own)
    cause = _cause(errors)
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
    elif kernel_oom and _signal(exit_status) is signal.SIGKILL:
        kind, seen = _oom(phase), f"{seen}; {_KERNEL}" if seen else _KERNEL
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

    if kind == "killed_externally" and kernel_oom:  # a worker of it, as its log says
        kind, seen = _oom(phase), f"{seen}; {_KERNEL}" if seen else _KERNEL

    swallowed = ""
    if kind == "died_mid_bench":
        earliest = next((error for error in _errors(started, book, own) if not error.wrapper), None)
        swallowed = f"earlier: {earliest.said}" if earliest and (not first or earliest.line != first.line) else ""

    stage = _stage(log, first, book) if phase in ("start", "ready") else ""
    during = f"while {stage}" if stage else ""
    message = "; ".join(part for part in (seen, ended, first.said if first else "", during, swallowed) if part)
    evidence = _evidence(first, before + errors, log or earlier)
    return replace(failure(kind, phase, message, evidence, exit_status), stage=stage)


def _cause(errors: Sequence[_Error]) -> _Error | None:
    """The first error with a rule; one that blames the machine, or only says "crash", gives way to an earlier error."""
    for i, error in enumerate(errors):
        if error.rule is None:
            continue
        earlier = [other for other in errors[:i] if not other.wrapper and not other.environment]
        if not (earlier and (error.environment or error.rule.kind == "crash")):
            return error
    return None


def _stage(log: str, first: _Error | None, book: RuleBook) -> str:
    """What the server last said it was doing before its first error; "" where no rule knows."""
    stage = ""
    for raw in log.splitlines():
        line = plain(raw)
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


def _errors(log: str, book: RuleBook, own: frozenset[str]) -> list[_Error]:
    """Every error of a log, in order: tracebacks, panics, lines that match a rule, lines that call themselves errors.

    All but the last are relevant; plain error lines are listed only when there is nothing else. `own` are the user's
    patterns, which count whatever a line calls itself.
    """
    lines = plain_lines(log)
    found: list[_Error] = []
    plain_errors: list[_Error] = []
    i = 0
    while i < len(lines):
        if _TRACEBACK in lines[i]:
            if _GROUP in lines[i]:
                i += 1
                continue
            error, i = _traceback(lines, i, book)
            found.append(error)
            continue
        line = _PREFIX.sub("", lines[i]).strip()
        rule = book.cause(line)
        if rule and rule.kind in _PASSED_OVER and rule.pattern.pattern not in own and _BENIGN.match(lines[i]):
            rule = None
        if _PANIC.search(line):
            goes_on = i + 1 < len(lines) and ("panicked at" in line or line.startswith("terminate called"))
            more = lines[i + 1].strip() if goes_on else ""
            found.append(_Error(line, "\n".join(lines[i : i + 8]), rule or book.cause(more), False, more))
        elif rule:
            found.append(_Error(line, "\n".join(lines[max(0, i - 2) : i + 3]), rule))
        elif _ERROR_LINE.search(lines[i]):
            plain_errors.append(_Error(line, "\n".join(lines[i : i + 3]), None, book.is_wrapper(line)))
        i += 1
    return found or plain_errors


def _traceback(lines: list[str], start: int, book: RuleBook) -> tuple[_Error, int]:
    """The traceback that begins at `start`, and the index of the line behind it."""
    before = lines[start][: lines[start].index(_TRACEBACK)]
    repeated = _repeated(before, lines[start + 1 : start + 2])
    inside = repeated is None and len(before) > len(_prefix_of(lines[start]))

    def text(i: int) -> str | None:
        """The line without what stands before each; None for a line of another writer."""
        if repeated is None:
            return _PREFIX.sub("", lines[i])
        found = repeated.match(lines[i])
        return lines[i][found.end() :] if found else None

    end, stop = start + 1, min(len(lines), start + _TRACEBACK_LINES)
    while end < stop:
        said = text(end)
        if said and not said[0].isspace() and _EXCEPTION.match(said):
            break
        if _TRACEBACK in lines[end] or (inside and not said):
            break
        end += 1
    line = (text(end) or "").strip() if end < stop else ""
    more: list[str] = []
    if _EXCEPTION.match(line):
        parts = bool(_MANY_PARTS.search(line))
        for i in range(end + 1, min(len(lines), end + 9)):
            said, following = text(i), text(i + 1) if i + 1 < len(lines) else None
            heads = parts and said and following and following[0].isspace() and not _LOGGED.search(said)
            if not said or _TRACEBACK in said or not (said[0].isspace() or heads):
                break
            more.append(said.strip())
    else:
        line = _PREFIX.sub("", lines[start]).strip()
        end -= 1
    last = end + len(more)
    body = [said for i in range(start + 1, last + 1) if (said := text(i)) is not None]
    body = [lines[start] if repeated is None else _TRACEBACK, *body]
    if len(body) > _EVIDENCE_LINES:
        body = [body[0], "  …", *body[2 - _EVIDENCE_LINES :]]
    rule = next((rule for one in (line, *more) if (rule := book.cause(one))), None)
    return _Error(line, "\n".join(body), rule, book.is_wrapper(line), "; ".join(more)), last + 1


def _prefix_of(line: str) -> str:
    found = _PREFIX.match(line)
    return found.group() if found else ""


def _repeated(before: str, following: Sequence[str]) -> re.Pattern[str] | None:
    """What stands before a traceback, as a pattern, where it stands before its next line too; its digits may differ."""
    if not before:
        return None
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(before)))
    return pattern if following and pattern.match(following[0]) else None


def _evidence(first: _Error | None, errors: list[_Error], log: str) -> str:
    if first is None:
        return "\n".join(plain(line) for line in log.splitlines()[-8:])
    last = errors[-1]
    if last.line == first.line:
        return first.excerpt
    return f"{first.excerpt}\n… later: {last.said}"
