"""What of this machine a deployment of a record needs: paths that the command names, where its program is."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.export.head import Options
from tuner.export.workload import workload
from tuner.records import LaunchRecord

_OF_EVERY_SYSTEM = ("/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/lib", "/sbin", "/run")


def options_here(record: LaunchRecord, image: str | None = None) -> Options:
    """The options of an export that is made on this machine.

    Raises:
        UsageError: an image that has no name.
    """
    if image is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", image):
        raise UsageError(f"--image '{image}' is not the name of an image. Nothing was written.")
    program = shutil.which(record.argv[0]) if record.argv else None
    return Options(
        image=image,
        mounts=() if record.container is not None else tuple(_paths(record)),
        program=os.path.abspath(program) if program else None,
        user=_user(),
    )


def notes(record: LaunchRecord, study: str, fmt: str, options: Options) -> list[str]:
    """What a person should know of an artefact that starts otherwise elsewhere: images, mounts, programs."""
    if fmt in ("compose", "kubernetes", "helm"):
        return workload(record, study, options).notes
    if record.container is None and record.argv and not os.path.isabs(record.argv[0]):
        where = "from the folder it is started in" if "/" in record.argv[0] else "in the PATH"
        return [f"The program '{record.argv[0]}' is looked up {where}: make sure that it is the one that was measured."]
    return []


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None  # nobody that the system knows, as in some containers


def _paths(record: LaunchRecord) -> list[str]:
    """Files and folders of this machine that the command names, also within JSON, and its folder; sorted."""
    named = {text for argument in record.argv[1:] for text in _texts(argument)}
    named |= {record.cwd} if record.cwd else set()
    own = set(record.files)
    found = [
        text
        for text in named
        if text.startswith("/")
        and text not in own
        and len(Path(text).parts) > 2
        and not text.startswith(_OF_EVERY_SYSTEM)
        and os.path.exists(text)
    ]
    return sorted(text for text in found if not any(text != other and text.startswith(other + "/") for other in found))


def _texts(argument: str) -> Iterator[str]:
    yield argument
    if argument.startswith("-"):
        yield argument.partition("=")[2]
    for text in (argument, argument.partition("=")[2]):
        if text.startswith("{"):
            try:
                yield from _strings(json.loads(text))
            except ValueError:
                continue  # braces of something else


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, str):
        yield value
