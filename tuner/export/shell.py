"""`run.sh`: a POSIX shell script that starts exactly the server that was measured."""

from __future__ import annotations

import json
import re
import shlex

from tuner.errors import UsageError
from tuner.export.provenance import Provenance
from tuner.export.secrets import secret_args, secret_env, secret_variables
from tuner.records import LaunchRecord

FILE = "run.sh"


def render_shell(record: LaunchRecord, provenance: Provenance) -> dict[str, str]:
    """File name → text.

    The environment difference goes through `env`, not through assignments of the shell, some of whose variables are
    read-only or have a meaning of their own. The HOST and PORT that move the server are read, never set.

    Raises:
        UsageError: for a record that no command line can express.
    """
    _refuse(record)
    lines = [*_head(record, provenance), *_address(record), *_secrets(record), *_files(record), _command(record), ""]
    return {FILE: "\n".join(lines)}


def _refuse(record: LaunchRecord) -> None:
    texts = [*record.argv, *record.env, *(value for value in record.env.values() if value is not None)]
    if any("\0" in text for text in texts):
        raise UsageError("the launch record holds a NUL character, which no command line or environment can")
    bad = [name for name in record.env if not name or "=" in name or name.startswith("-")]
    if bad:
        raise UsageError(f"the launch record sets {bad[0]!r}, which is not the name of a variable")
    if not record.argv or not record.argv[0] or record.argv[0].startswith("-") or "=" in record.argv[0]:
        raise UsageError("the launch record's command does not begin with the name of a program")


def _head(record: LaunchRecord, provenance: Provenance) -> list[str]:
    host, port = _movable(record)
    lines = [
        "#!/bin/sh",
        "# Starts the server as it was measured. Written by `tuner export`; change the study, not this file.",
        "#",
        f"#   study        {_plain(provenance.study)}, launch {provenance.launch}, of {provenance.measured_at}",
        f"#   candidate    {_plain(provenance.candidate)}: {_plain(dict(record.settings))}",
        f"#   decision     {_plain(provenance.decision)}",
        f"#   engine       {_plain(record.engine)} {_plain(provenance.engine_version)}",
        f"#   machine      {_plain(dict(provenance.machine))}",
        f"#   record       {provenance.record_hash}",
    ]
    for figure in provenance.figures:
        base = f", baseline {figure.baseline_tokens_per_s:.1f}" if figure.baseline_tokens_per_s is not None else ""
        count = f"{figure.blocks} block{'s' * (figure.blocks != 1)}, {figure.role}"
        rate = f"{figure.tokens_per_s:.1f} tok/s{base}"
        lines.append(f"#   at {figure.concurrency:<9} {rate} ({count})")
    if record.simulated:
        lines.append("#   SIMULATED: these figures come from a model of a machine, not from a measurement")
    movable = [name for name, can in (("HOST", host), ("PORT", port)) if can]
    if movable:
        verb = "move" if len(movable) > 1 else "moves"
        lines += ["#", f"# {' and '.join(movable)} in the environment {verb} the server; nothing else changes."]
    return [*lines, "set -eu"]


def _plain(value: object) -> str:
    """A value inside a comment: on one line, whatever it holds."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(text)


def _address(record: LaunchRecord) -> list[str]:
    host, port = _movable(record)
    lines = []
    for name, can, value in (("HOST", host, record.host), ("PORT", port, str(record.port))):
        if can:
            lines.append(f"spec_tuner_{name.lower()}=${{{name}:-{shlex.quote(value)}}}")
        else:
            message = f"run.sh: the command does not show where {name} stands, so it stays {value}"
            lines += [
                f'if [ -n "${{{name}-}}" ] && [ "${name}" != {shlex.quote(value)} ]; then',
                f"    echo {shlex.quote(message)} >&2",
                "    exit 2",
                "fi",
            ]
    return lines


def _secrets(record: LaunchRecord) -> list[str]:
    said = "is a secret and was left out of this file: set it"
    return [f': "${{{name}:?{said}}}"' for name in secret_variables(record)]


def _files(record: LaunchRecord) -> list[str]:
    """Writes the files that the command names."""
    lines = []
    for path, text in record.files.items():
        lines.append(f"mkdir -p {shlex.quote(path.rpartition('/')[0] or '.')}")
        lines.append(f"printf '%s' {shlex.quote(text)} > {shlex.quote(path)}")
    return lines


def _command(record: LaunchRecord) -> str:
    secret = secret_args(record)
    words = []
    for i in range(len(record.argv)):
        if i in secret:
            prefix, variable = secret[i]
            words.append(f'{_quote(prefix)}"${{{variable}}}"')
        else:
            words.append(_word(record, i))
    lines = []
    if record.env:
        lines.append("exec env")
        lines += [f"-u {shlex.quote(name)}" for name, value in record.env.items() if value is None]
        hidden = secret_env(record)
        for name, value in record.env.items():
            if name in hidden:
                lines.append(f'{shlex.quote(name + "=")}"${{{hidden[name]}}}"')
            elif value is not None:
                lines.append(shlex.quote(f"{name}={value}"))
        lines.append(words[0])
    else:
        lines.append(f"exec {words[0]}")
    return " \\\n    ".join([*lines, *_grouped(words[1:])])


def _grouped(words: list[str]) -> list[str]:
    """A flag and its value on one line, for the reader."""
    lines: list[str] = []
    for word in words:
        if lines and lines[-1].startswith("-") and " " not in lines[-1] and not word.startswith("-"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _movable(record: LaunchRecord) -> tuple[bool, bool]:
    """Whether the host and the port can be told in the command."""
    found = {part for i in range(len(record.argv)) for part in _parts(record, i)[1::2]}
    return "host" in found, "port" in found


def _word(record: LaunchRecord, index: int) -> str:
    """One argument as a word of the shell, with variables where the address stands."""
    parts = _parts(record, index)
    if len(parts) == 1:
        return shlex.quote(record.argv[index])
    variables = {"host": '"$spec_tuner_host"', "port": '"$spec_tuner_port"'}
    return "".join(variables[part] if i % 2 else _quote(part) for i, part in enumerate(parts))


def _quote(text: str) -> str:
    return shlex.quote(text) if text else ""


def _parts(record: LaunchRecord, index: int) -> list[str]:
    """An argument as text, "host" or "port", text, …: odd places stand for the address.

    The host and the port are seen behind their flags (`--port 8000`, `--host=::1`) and together (`127.0.0.1:8000`).
    A number that is only equal to the port is left alone.
    """
    element, before = record.argv[index], record.argv[index - 1] if index else ""
    host, port = record.host, str(record.port)
    if index == 0:
        return [element]
    for name, value in (("host", host), ("port", port)):
        flag = f"--{name}"
        if element == value and before in ((flag, "-p") if name == "port" else (flag,)):
            return ["", name, ""]
        if element == f"{flag}={value}":
            return [f"{flag}=", name, ""]
    if before == "--publish" and element == f"{host}:{port}:{port}":
        # A container's port outside and inside: the server in it is told the same.
        return ["", "host", ":", "port", ":", "port", ""]
    shown = f"[{host}]" if ":" in host else host
    address = re.compile(rf"(?<![\w.:-]){re.escape(shown)}:{port}(?!\d)")
    parts: list[str] = []
    rest = 0
    for match in address.finditer(element):
        opening, closing = ("[", "]") if ":" in host else ("", "")
        parts += [element[rest : match.start()] + opening, "host", closing + ":", "port"]
        rest = match.end()
    return [*parts, element[rest:]]
