"""`engine.env`: variables and command line, read alike by a POSIX shell and by systemd's `EnvironmentFile=`."""

from __future__ import annotations

import re
import shlex

from tuner.errors import UsageError
from tuner.export.head import PLAIN, Options, comment, lines
from tuner.export.provenance import Provenance
from tuner.export.secrets import secret_env, secret_variables
from tuner.export.words import Hole, Word, refuse, words
from tuner.records import LaunchRecord

FILE = "engine.env"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OF_SHELLS = frozenset(
    ("UID", "EUID", "PPID", "GROUPS", "IFS", "OPTIND", "ENV", "BASHOPTS", "SHELLOPTS", "BASH_ENV", "BASH_VERSINFO")
)
"""Variables that a shell does not let be assigned, or reads for itself."""

_OURS = ("ENGINE_COMMAND", "ENGINE_UNSET")


def render_env(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text.

    `ENGINE_COMMAND` is the command line as words of a shell, `ENGINE_UNSET` the variables to remove.

    Raises:
        UsageError: for a record that such a file cannot express.
    """
    refuse(record)
    bad = [name for name in record.env if not _NAME.fullmatch(name) or name in {*_OF_SHELLS, *_OURS}]
    if bad:
        raise UsageError(
            f"the launch record sets {bad[0]!r}, which an env file cannot: no shell takes it from there; --format "
            "shell can express it. Nothing was written."
        )
    if record.files:
        raise UsageError(
            "the launch record brings files of its own, which an env file cannot carry; --format shell can. Nothing "
            "was written."
        )
    hidden = secret_env(record)
    start = 'set -a; . ./engine.env; set +a; eval "unset $ENGINE_UNSET; exec $ENGINE_COMMAND"'
    head = [*lines(record, provenance), "", f"Start: sh -c '{start}'"]
    left_out = secret_variables(record)
    head += [f"Set {name} beforehand: it is a secret and was left out of this file." for name in left_out]
    body = [f"{name}={_value(value)}" for name, value in record.env.items() if value is not None and name not in hidden]
    removed = [name for name, value in record.env.items() if value is None]
    command = ["env", "-C", shlex.quote(record.cwd)] if record.cwd else []
    command += [_word(record, word) for word in words(record)]
    body += [f"ENGINE_UNSET={_value(' '.join([*removed, *_OURS]))}", f"ENGINE_COMMAND={_value(' '.join(command))}", ""]
    return {FILE: comment(head) + "\n".join(body)}


def _value(text: str) -> str:
    """A quoted value, read alike by shells and by systemd, which knows no text behind a closing quote."""
    if "'" not in text:
        return f"'{text}'"
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def _word(record: LaunchRecord, word: Word) -> str:
    address = {"host": record.host, "port": str(record.port)}
    found = ""
    for part in word:
        if isinstance(part, Hole) and part.name:
            found += f'"${{{part.name}}}"'
        else:
            text = address[part.kind] if isinstance(part, Hole) else part
            found += shlex.quote(text) if text else ""
    return found or "''"
