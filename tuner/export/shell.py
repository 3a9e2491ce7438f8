"""`run.sh`: a POSIX shell script that starts exactly the server that was measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tuner.export.head import PLAIN, Options, comment, lines
from tuner.export.provenance import Provenance
from tuner.export.secrets import secret_env, secret_variables
from tuner.export.words import Hole, Word, movable, refuse, words
from tuner.records import LaunchRecord

FILE = "run.sh"


def render_shell(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text.

    The environment difference goes through `env`, not through assignments of the shell, some of whose variables are
    read-only or have a meaning of their own. The HOST and PORT that move the server are read, never set.

    Raises:
        UsageError: for a record that no command line can express.
    """
    return {FILE: script(record, provenance)}


def script(record: LaunchRecord, provenance: Provenance, raw: Mapping[int, str] | None = None) -> str:
    """The script's text; `raw` holds words of the shell that stand for some arguments, by index.

    They may use `$here`, the folder of the script.

    Raises:
        UsageError: see `render_shell`.
    """
    refuse(record)
    head = lines(record, provenance)
    names = [name for name, can in zip(("HOST", "PORT"), movable(record), strict=True) if can]
    if names:
        verb = "move" if len(names) > 1 else "moves"
        head += ["", f"{' and '.join(names)} in the environment {verb} the server; nothing else changes."]
    here = ['here=$(cd "$(dirname "$0")" && pwd)'] if raw else []
    body = ["set -eu", *here, *_address(record), *_secrets(record), *_files(record), _command(record, raw or {}), ""]
    return "#!/bin/sh\n" + comment(head) + "\n".join(body)


def _address(record: LaunchRecord) -> list[str]:
    found = []
    for name, can, value in zip(("HOST", "PORT"), movable(record), (record.host, str(record.port)), strict=True):
        if can:
            found.append(f"spec_tuner_{name.lower()}=${{{name}:-{shlex.quote(value)}}}")
        else:
            message = f"{FILE}: the command does not show where {name} stands, so it stays {value}"
            found += [
                f'if [ -n "${{{name}-}}" ] && [ "${name}" != {shlex.quote(value)} ]; then',
                f"    echo {shlex.quote(message)} >&2",
                "    exit 2",
                "fi",
            ]
    return found


def _secrets(record: LaunchRecord) -> list[str]:
    said = "is a secret and was left out of this file: set it"
    return [f': "${{{name}:?{said}}}"' for name in secret_variables(record)]


def _files(record: LaunchRecord) -> list[str]:
    """Writes the files that the command names."""
    found = [f"cd {shlex.quote(record.cwd)}"] if record.cwd else []
    for path, text in record.files.items():
        found.append(f"mkdir -p {shlex.quote(path.rpartition('/')[0] or '.')}")
        found.append(f"printf '%s' {shlex.quote(text)} > {shlex.quote(path)}")
    return found


def _command(record: LaunchRecord, raw: Mapping[int, str]) -> str:
    said = [raw.get(i) or _word(word) for i, word in enumerate(words(record))]
    found = []
    if record.env:
        found.append("exec env")
        found += [f"-u {shlex.quote(name)}" for name, value in record.env.items() if value is None]
        hidden = secret_env(record)
        for name, value in record.env.items():
            if name in hidden:
                found.append(f'{shlex.quote(name + "=")}"${{{hidden[name]}}}"')
            elif value is not None:
                found.append(shlex.quote(f"{name}={value}"))
        found.append(said[0])
    else:
        found.append(f"exec {said[0]}")
    return " \\\n    ".join([*found, *_grouped(said[1:])])


def _grouped(said: list[str]) -> list[str]:
    """A flag and its value on one line, for the reader."""
    found: list[str] = []
    for word in said:
        if found and found[-1].startswith("-") and " " not in found[-1] and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _word(word: Word) -> str:
    """One argument as a word of the shell."""
    variables = {"host": "$spec_tuner_host", "port": "$spec_tuner_port"}
    found = ""
    for part in word:
        if isinstance(part, Hole):
            found += f'"{variables.get(part.kind) or f"${{{part.name}}}"}"'
        else:
            found += shlex.quote(part) if part else ""
    return found or "''"
