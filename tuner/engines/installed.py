"""The engine that is really installed: its program, its version, the flags it knows. Asked, never imported.

Asking some engines takes minutes, so the flags are kept in `~/.cache/spec-tuner/flags`, by program and version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from tuner.engines.flags import flags_of
from tuner.errors import EnvironmentBroken

HELP_TIMEOUT_S = 300.0
_VERSION_TIMEOUT_S = 60.0
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][A-Za-z0-9_-]*)")
_HEAD = re.compile(r"^\s{0,8}(?=-)(?P<flags>.*)$")
_REMOVED = re.compile(r"argument has been removed")


@dataclass(frozen=True)
class Program:
    """How an engine is started. `command` comes before its flags; `package` is its Python distribution, if any."""

    engine: str
    command: tuple[str, ...]
    help: tuple[str, ...]
    package: str | None
    advice: str
    asked: tuple[str, ...] = ()
    """What asks a program that is no Python for its version, before --version does."""


def located(program: Program) -> Path:
    """The program's file.

    Raises:
        EnvironmentBroken: it is not here.
    """
    found = shutil.which(program.command[0])
    if found is None:
        words = program.command[0].split()
        several = f"; a program with words behind it is a list, [{', '.join(words)}]" if len(words) > 1 else ""
        raise EnvironmentBroken(
            f"{program.engine} is not here: '{program.command[0]}' is no program in PATH. "
            f"{program.advice}, or say where it is with engine.args.program{several}"
        )
    return Path(found)


def version(program: Program) -> str:
    """Of the installed engine.

    Raises:
        EnvironmentBroken: it is not here, or does not tell.
    """
    path = located(program)
    answer = _version_or_why(program, str(path), path.stat().st_mtime_ns)
    if isinstance(answer, EnvironmentBroken):
        raise EnvironmentBroken(str(answer)) from answer
    return answer


@lru_cache
def _version_or_why(program: Program, path: str, _changed: int) -> str | EnvironmentBroken:
    """Kept also where there is none: every candidate asks, and a program that hangs takes a minute."""
    try:
        return _version(program, path)
    except EnvironmentBroken as error:
        return error


def _version(program: Program, path: str) -> str:
    if program.package is None:
        answer = _ask([path, "--version"], _VERSION_TIMEOUT_S)
        match = re.search(r"version: (\S+)(?: \((?:build (\d+), )?(?:commit )?(\w+)\))?", answer)
        if match is None:
            raise EnvironmentBroken(f"{program.engine} tells no version: {path} --version says {answer[:200]!r}")
        return "+".join(part for part in (match[1], match[3]) if part)
    python = interpreter(Path(path))
    if python is None:
        return _version_of_wrapper(program, path)
    code = f"import importlib.metadata as m; print(m.version({program.package!r}))"
    answer = _ask([*python, "-c", code], _VERSION_TIMEOUT_S).strip()
    if not re.match(r"\d", answer.splitlines()[-1] if answer else ""):
        raise EnvironmentBroken(
            f"{program.engine} is not installed where {path} looks for it: the distribution {program.package} is "
            f"missing. Nothing was started. {program.advice}"
        )
    return answer.splitlines()[-1]


def _version_of_wrapper(program: Program, path: str) -> str:
    """What a script around the engine says to `--version` (or in the engine's own word), which it has to pass on."""
    words = (*program.asked, "--version")
    wanted = (
        f"{path} is no program of Python, so that its version is asked by {' and '.join(words)}. A script around "
        f"{program.engine} "
        f'must pass its arguments on (exec {program.engine} "$@"), or engine.args.version must say which one it is'
    )
    told = re.compile(rf"(?:{re.escape(program.engine)})?(?:[\s,:]*version)?[\s:]*v?(\d+\.\d[\w.+!-]*)", re.IGNORECASE)
    answer = ""
    for word in words:
        try:
            answer = _ask([path, word], _VERSION_TIMEOUT_S)
        except EnvironmentBroken as error:
            raise EnvironmentBroken(f"{error}. {wanted}") from error
        if found := [match[1] for line in answer.splitlines() if (match := told.fullmatch(line.strip()))]:
            return found[-1]
    said = " ".join(answer.split())[-200:]
    raise EnvironmentBroken(f"{program.engine} tells no version: {path} --version says {said!r}. {wanted}")


def interpreter(path: Path) -> list[str] | None:
    """What runs a program of Python: the interpreter that its first lines name, or itself; None for another program."""
    itself = [str(path)] if "python" in path.name else None
    try:
        with path.open("rb") as file:
            first, second = file.readline(512), file.readline(4096)
    except OSError:  # it may be run, but not read
        return itself
    if second.startswith(b"'''exec' "):  # installers write so where the interpreter's path is long or holds spaces
        words = shlex.split(second.decode("utf-8", "replace").removeprefix("'''exec' "))
        return words[:1]
    if first.startswith(b"#!"):
        words = first[2:].decode("utf-8", "replace").split()
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        if words and "python" in Path(words[0]).name:
            return words[:1]
    return itself


def ask(program: Program, *arguments: str) -> str:
    """What the program says to these arguments and then ends.

    Raises:
        EnvironmentBroken: it is not here, or does not end.
    """
    return _ask([str(located(program)), *arguments], _VERSION_TIMEOUT_S)


def _ask(command: Sequence[str], timeout_s: float) -> str:
    try:
        asked = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            text=True, errors="replace", env={**os.environ, "COLUMNS": "200"}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentBroken(f"'{command[0]}' cannot be started: {error}") from error
    with asked:
        try:
            out, also = asked.communicate(timeout=timeout_s)
        except BaseException as error:
            # With all that it has started: a script that passes no arguments on starts a whole server.
            os.killpg(asked.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said = f"'{' '.join(command)}' did not answer in {timeout_s:g} s; it is broken"
            raise EnvironmentBroken(said) from error
    return out if out.strip() else also


def flags(program: Program, known_as: str) -> frozenset[str]:
    """The flags that the command line of the installed engine, of this version, knows.

    Raises:
        EnvironmentBroken: it is not here, or shows none.
    """
    path = located(program)
    return flags_shown(
        program,
        f"{path.resolve()}\0{known_as}",
        f"{path} {' '.join(program.help)}",
        lambda: _ask([*program.command, *program.help], HELP_TIMEOUT_S),
    )


def flags_shown(program: Program, identity: str, asked: str, ask_help: Callable[[], str]) -> frozenset[str]:
    """The flags in a help text, which is asked for where it is not kept yet.

    Args:
        program: whose help it is.
        identity: what tells this program from any other, and this version of it.
        asked: how a person would ask for it.
        ask_help: asks for it; may raise EnvironmentBroken.

    Raises:
        EnvironmentBroken: it shows none.
    """
    key = hashlib.sha256(f"{identity}\0{program.command}".encode()).hexdigest()[:16]
    kept = _cache() / f"{program.engine}-{key}.json"
    with contextlib.suppress(OSError, ValueError):  # not asked yet, or spoiled: ask again
        return frozenset(json.loads(kept.read_text(encoding="utf-8")))
    text = ask_help()
    found = parse_help(text)
    if len(found) < 10:
        said = " ".join(text.split())[-300:]
        raise EnvironmentBroken(f"{program.engine} is broken: '{asked}' shows no flags: {said}")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(sorted(found)), encoding="utf-8")
    return found


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "spec-tuner" / "flags"


def parse_help(text: str) -> frozenset[str]:
    """The flags that a help text describes; those that it calls removed are left out."""
    found: set[str] = set()
    heads: list[str] = []
    for line in text.splitlines():
        if match := _HEAD.match(line):
            # Behind two spaces stands the description, which may name other flags.
            heads = _FLAG.findall(re.split(r"\s{2,}(?![\s-])", match["flags"].strip())[0])
            found.update(heads)
        if _REMOVED.search(line):
            found.difference_update(heads)
    return frozenset(flags_of(found))


def unknown_flags(arguments: Iterable[str], valid: Iterable[str], name: str) -> list[str]:
    """A sentence for each flag among the arguments that the engine does not know, with the nearest one."""
    options = sorted(set(flags_of(valid)))
    found = []
    for flag in flags_of(arguments):
        if flag not in options:
            close = get_close_matches(flag, options, n=1)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            found.append(f"{flag}: {name} does not know it{meant}")
    return found
