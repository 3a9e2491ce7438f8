"""A systemd unit that starts exactly the server that was measured, and counts as started once it has made a token."""

from __future__ import annotations

import re

from tuner.errors import UsageError
from tuner.export.head import GRACE_S, PLAIN, START_S, Options, comment, label, lines, tensor_parallel
from tuner.export.provenance import Provenance
from tuner.export.secrets import secret_env, secret_variables
from tuner.export.words import Hole, Word, refuse, words
from tuner.export.workload import probe
from tuner.records import LaunchRecord

LONGEST = 1 << 20
"""Bytes of one line of a unit, with what continues it: systemd reads no further."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def render_systemd(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text.

    Raises:
        UsageError: for a record that no unit can express.
    """
    refuse(record)
    name = label(provenance.study)
    if "$" in record.argv[0]:
        raise UsageError(
            "systemd cannot start a program with '$' in its name; --format shell can. Nothing was written."
        )
    secrets = secret_variables(record)
    head = [
        *lines(record, provenance),
        "",
        f"Install: copy to /etc/systemd/system/{name}.service, then systemctl daemon-reload and systemctl enable --now "
        f"{name}.",
    ]
    if secrets:
        head.append(
            f"Secrets were left out: put {', '.join(f'{v}=…' for v in secrets)} into /etc/spec-tuner/{name}.secrets "
            "(mode 0600)."
        )
    body = [
        "[Unit]",
        f"Description=Inference server of study {_text(provenance.study)}, record {provenance.record_hash}",
        "After=network-online.target",
        "Wants=network-online.target",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        *([f"User={_text(options.user)}"] if options.user else []),
        *([f"WorkingDirectory={record.cwd.replace('%', '%%')}"] if _plain_cwd(record.cwd) else []),
        *(f"Environment={_quote(f'{name}={value}')}" for name, value in _plain_env(record).items()),
        *(f"UnsetEnvironment={name}" for name, value in record.env.items() if value is None and _NAME.fullmatch(name)),
        *([f"EnvironmentFile=/etc/spec-tuner/{name}.secrets"] if secrets else []),
        *(_write_file(path, text) for path, text in record.files.items()),
        "ExecStart=" + _command(record, options),
        "# Started means: a real completion was answered.",
        "ExecStartPost=" + _wait(record),
        f"TimeoutStartSec={START_S}",
        "# SIGTERM to the server alone; what is left of its family after the grace time gets SIGKILL.",
        "KillMode=mixed",
        "KillSignal=SIGTERM",
        f"TimeoutStopSec={GRACE_S}",
        "# Some engines end with status 0 when they break.",
        "Restart=always",
        "RestartSec=5",
        "LimitNOFILE=1048576",
        *(["LimitMEMLOCK=infinity", "LimitSTACK=67108864"] if tensor_parallel(record) > 1 else []),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    if any(len(line.encode()) > LONGEST for line in body):
        raise UsageError(
            f"the launch record holds more than a line of a unit may ({LONGEST >> 10} KiB); --format shell can express "
            "it. Nothing was written."
        )
    return {f"{name}.service": comment(head) + "\n".join(body)}


def _sayable(name: str, value: str) -> bool:
    """Whether `Environment=` takes it: a C name, and of control characters only tab and line break."""
    return bool(_NAME.fullmatch(name)) and all(c.isprintable() or c in "\t\n" or c >= "\x80" for c in value)


def _plain_cwd(cwd: str) -> bool:
    """Whether `WorkingDirectory=` takes it: the rest of a line, in which nothing is escaped."""
    return cwd.startswith("/") and cwd.isprintable() and "\\" not in cwd and cwd == cwd.strip()


def _plain_env(record: LaunchRecord) -> dict[str, str]:
    hidden = secret_env(record)
    return {
        name: value
        for name, value in record.env.items()
        if value is not None and name not in hidden and _sayable(name, value)
    }


def _command(record: LaunchRecord, options: Options) -> str:
    """The command line. What `Environment=` does not take goes through env(1), which also looks programs up."""
    said = words(record)
    hidden, plain_env = secret_env(record), _plain_env(record)
    through = ["-C", _quote(record.cwd, argument=True)] if record.cwd and not _plain_cwd(record.cwd) else []
    for name, value in record.env.items():
        if value is None and not _NAME.fullmatch(name):
            through += [_quote("-u"), _quote(name, argument=True)]
        elif name in hidden and hidden[name] != name:
            through.append(f'"{_escape(name + "=", argument=True)}${{{hidden[name]}}}"')
        elif value is not None and name not in hidden and name not in plain_env:
            through.append(_quote(f"{name}={value}", argument=True))
    found = [_word(record, word) for word in said]
    program = record.argv[0] if record.argv[0].startswith("/") else options.program
    if program is None or through:
        return " \\\n    ".join(["/usr/bin/env", *through, *found])
    if program != record.argv[0]:
        return " \\\n    ".join([f"@{_quote(program)}", *found])
    return " \\\n    ".join([_quote(program), *found[1:]])


def _wait(record: LaunchRecord) -> str:
    secrets = secret_variables(record)
    key = next((name for name in secrets if name.endswith("API_KEY")), None)
    _, _, script, *behind = probe(record, record.port, key)
    # The probe ends by `exec`, so it runs in a shell of its own.
    loop = f"until sh -c '{_single(script)}' \"$@\" 2>/dev/null; do sleep 2; done"
    return " ".join(["/bin/sh", "-c", *(_quote(each, argument=True) for each in (loop, "sh", *behind))])


def _single(text: str) -> str:
    return text.replace("'", "'\\''")


def _write_file(path: str, text: str) -> str:
    script = 'mkdir -p "${2%/*}" && printf %s "$1" > "$2"'
    return "ExecStartPre=" + " ".join(
        ["/bin/sh", "-c", *(_quote(each, argument=True) for each in (script, "sh", text, path))]
    )


def _word(record: LaunchRecord, word: Word) -> str:
    address = {"host": record.host, "port": str(record.port)}
    found = ""
    for part in word:
        if isinstance(part, Hole) and part.name:
            found += f"${{{part.name}}}"
        else:
            found += _escape(address[part.kind] if isinstance(part, Hole) else part, argument=True)
    return f'"{found}"'


def _quote(text: str, *, argument: bool = False) -> str:
    return f'"{_escape(text, argument=argument)}"'


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%"}


def _escape(text: str, *, argument: bool) -> str:
    """Text within double quotes of a unit; in arguments of commands `$` means a variable as well."""
    found = ""
    for c in text:
        if c == "$" and argument:
            found += "$$"
        elif c in _ESCAPES:
            found += _ESCAPES[c]
        else:
            found += f"\\x{ord(c):02x}" if ord(c) < 0x20 or c == "\x7f" else c
    return found


def _text(text: str) -> str:
    """A value that is not split into words, in which nothing is escaped: on one line, without specifiers."""
    return re.sub(r"\s+", " ", text).strip().replace("%", "%%")
