"""Asks the installed SGLang, before the first launch, what it would make of each candidate's command line.

Its own interpreter runs `sglang_resolve.py`: 20 to 60 s for the imports, then 0.1 s a candidate. Answers are kept in
`~/.cache/spec-tuner/sglang`, by program, version and command lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tuner.engines import installed
from tuner.engines.base import Mismatch, Resolution
from tuner.engines.installed import Program
from tuner.records import LaunchRecord

TIMEOUT_S = 600.0
SCRIPT = Path(__file__).with_name("sglang_resolve.py")
_SHOWN = 3
"""Command lines named with one sentence, at most."""

Compare = Callable[[LaunchRecord, dict[str, Any]], Sequence[Mismatch]]


class _Unknown(Exception):
    """SGLang cannot be asked; why, in a sentence."""


def resolution(program: Program, records: Sequence[LaunchRecord], mismatches: Compare) -> Resolution:
    """What SGLang refuses or rewrites of these launches, the first of which is the baseline's.

    A study whose baseline, or whose every candidate, is refused makes no sense; of others it is told.
    """
    try:
        answers = _ask(program, records)
    except _Unknown as why:
        return Resolution(notes=(f"SGLang's own resolution of the candidates could not be asked: {why}",))
    wrong: dict[str, list[LaunchRecord]] = {}
    for record, answer in zip(records, answers, strict=True):
        if error := answer.get("error"):
            wrong.setdefault(f"SGLang refuses it: {' '.join(str(error).split())[:300]}", []).append(record)
        for each in mismatches(record, answer):
            sentence = f"SGLang would run it with {each.setting} {each.effective} in place of {each.requested}"
            wrong.setdefault(sentence, []).append(record)
    hit = {id(record) for found in wrong.values() for record in found}
    hopeless = id(records[0]) in hit or len(hit) >= len(records) - 1 > 0
    listed = tuple(_sentence(what, found, records) for what, found in wrong.items())
    return Resolution(refused=listed) if hopeless else Resolution(notes=listed)


def _sentence(what: str, found: Sequence[LaunchRecord], records: Sequence[LaunchRecord]) -> str:
    if found[0] is records[0]:
        return f"the baseline: {what}"
    shown = ["(" + " ".join(f"{k}={v}" for k, v in sorted(r.settings.items())) + ")" for r in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    count = f"{len(found)} of {len(records) - 1} candidates"
    return f"{count}: {what}: {', '.join(shown)}{more}"


def _ask(program: Program, records: Sequence[LaunchRecord]) -> list[dict[str, Any]]:
    argvs = [list(record.argv[len(program.command) :]) for record in records]
    path = installed.located(program)
    python = installed.interpreter(path)
    if python is None:
        raise _Unknown(f"{path} is a script around SGLang, whose interpreter it does not tell")
    asked = json.dumps([str(path), installed.version(program), SCRIPT.read_text(encoding="utf-8"), argvs])
    kept = _cache() / f"resolved-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):  # not asked yet, or spoiled: ask again
        answers: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return answers
    try:
        for record in records:
            for name, text in record.files.items():  # SGLang reads the tables that its flags name
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_text(text, encoding="utf-8")
        done = subprocess.run(
            # Not by its file's name: its folder, where our own sglang.py lies, would then be searched for modules.
            [*python, "-c", SCRIPT.read_text(encoding="utf-8")],
            input=json.dumps(argvs),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        answers = json.loads(done.stdout) if done.returncode == 0 else []
    except subprocess.TimeoutExpired as error:
        raise _Unknown(f"no answer within {TIMEOUT_S:g} s") from error
    except (OSError, ValueError) as error:
        raise _Unknown(f"{type(error).__name__}: {error}") from error
    if len(answers) != len(records):
        said = done.stderr.strip().splitlines()
        raise _Unknown(said[-1][:300] if said else f"its interpreter ended with status {done.returncode}")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(answers), encoding="utf-8")
    return answers


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-tuner" / "sglang"
