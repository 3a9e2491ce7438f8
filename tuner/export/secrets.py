"""Secrets in a launch record: left out of every artefact, with the variable that takes their place."""

from __future__ import annotations

import re
from dataclasses import replace

from tuner.records import LaunchRecord
from tuner.secrets import is_secret


def secret_env(record: LaunchRecord) -> dict[str, str]:
    """Variable of the record's environment → variable that a deployment reads it from (itself, as a valid name)."""
    return {name: _variable(name) for name, value in record.env.items() if value and is_secret(name)}


def secret_args(record: LaunchRecord) -> dict[int, tuple[str, str]]:
    """Index in argv → (text in front of the secret, variable): for `--api-key X` and `--api-key=X`."""
    found = {}
    for i, element in enumerate(record.argv):
        flag, equals, value = element.partition("=")
        if not flag.startswith("-") or not is_secret(flag):
            continue
        if equals and value:
            found[i] = (flag + "=", _variable(flag))
        elif not equals and i + 1 < len(record.argv) and not record.argv[i + 1].startswith("-"):
            found[i + 1] = ("", _variable(flag))
    return found


def secret_variables(record: LaunchRecord) -> list[str]:
    """The variables that a deployment must be given, sorted."""
    return sorted({*secret_env(record).values(), *(variable for _, variable in secret_args(record).values())})


def without_secrets(record: LaunchRecord) -> LaunchRecord:
    """The record with `${VARIABLE}` in place of each secret; the same record when it holds none."""
    variables = secret_env(record)
    env = {name: f"${{{variables[name]}}}" if name in variables else value for name, value in record.env.items()}
    argv = list(record.argv)
    for i, (prefix, variable) in secret_args(record).items():
        argv[i] = f"{prefix}${{{variable}}}"
    return replace(record, env=env, argv=tuple(argv))


def _variable(name: str) -> str:
    variable = re.sub(r"\W", "_", name.lstrip("-"), flags=re.ASCII).upper()
    return variable if not variable[:1].isdigit() else f"_{variable}"
