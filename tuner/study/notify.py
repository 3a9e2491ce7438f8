"""The user's hook: a command or a URL that is told when a study ends, stops, or needs a person."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tuner.ask import ask
from tuner.errors import StudyStopped
from tuner.foreign import encodable
from tuner.judge.text import recommendation_dict
from tuner.space.schema import NotifySection
from tuner.study.data import StudyData
from tuner.study.decide import recommendation

_SAID = 4096
"""Bytes of the end of what a hook complained about that are looked at."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def variables(section: NotifySection | None) -> tuple[str, ...]:
    """The environment variables that a hook's address needs."""
    return tuple(_VARIABLE.findall(section.url)) if section is not None and section.url else ()


def message(data: StudyData, error: BaseException | None) -> dict[str, Any]:
    """What the hook is told.

    `event` is `done`, `stopped` (it can be run again), or `needs_person` (the machine, its storage or the tuner itself
    is ill); `error` is what ended the study, None when it is done.
    """
    found = recommendation_dict(recommendation(data)) if error is None else None
    return {
        "event": _event(error),
        "study": data.name,
        "simulated": data.simulated,
        "state": data.state,
        "message": data.reason if error is None else str(error) or type(error).__name__,
        "exit_code": 0 if error is None else getattr(error, "exit_code", 1),
        "at": time.time(),
        "blocks": sum(stored.block.valid for stored in data.blocks.values()),
        "recommendation": found,
    }


def _event(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "stopped" if isinstance(error, (StudyStopped, KeyboardInterrupt)) else "needs_person"


def notify(hook: NotifySection, told: Mapping[str, Any]) -> str | None:
    """Calls the hook; returns what went wrong, in a sentence, and never raises for a failure of the hook."""
    text = encodable(json.dumps(told, ensure_ascii=False))
    if not hook.command:
        return _post(hook.url or "", text, hook.timeout_s)
    try:
        return _run(hook.command, text, hook.timeout_s)
    except OSError as error:  # no room for its files
        return f"the hook {hook.command[0]} cannot be called: {error.strerror or error}"


def _run(command: list[str], text: str, timeout_s: float) -> str | None:
    """Waits for the hook itself alone. What it has started and left may run on, with its output; neither is waited for.

    Files, not pipes: a pipe would end only with the last process that holds it, and a hook that does not read would
    hold us up.
    """
    name = command[0]
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        told.write(text.encode())
        told.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=told, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
            )
        except (OSError, ValueError) as error:
            return f"the hook {name} cannot be started: {getattr(error, 'strerror', None) or error}"
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a group of its own: what it has started goes with it
            process.wait()
            return f"the hook {name} took longer than {timeout_s:g} s and was ended"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode == 0:
            return None
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID))
        last = said.read(_SAID).decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"the hook {name} ended with status {process.returncode}" + (f": {last[0][:200]}" if last else "")


def _post(url: str, text: str, timeout_s: float) -> str | None:
    import httpx

    missing = [name for name in _VARIABLE.findall(url) if name not in os.environ]
    if missing:
        return f"the hook's address needs the environment variable {missing[0]}, which is not set"
    full = _VARIABLE.sub(lambda found: os.environ[found[1]], url)
    try:
        host = urlsplit(full).hostname  # of an address only its host is ever told: the path may be a secret
    except ValueError:
        host = None
    if host is None:
        return "the hook's address is not a URL"
    headers = {"Content-Type": "application/json"}
    try:
        answer = ask("POST", full, content=text, headers=headers, timeout_s=timeout_s, surroundings=True)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"the hook at {host} did not answer: {type(error).__name__}"
    return None if 200 <= answer.status < 300 else f"the hook at {host} answered {answer.status}"
