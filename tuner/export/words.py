"""A launch record's command as literal text and the places that a deployment fills: the address, and secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tuner.errors import UsageError
from tuner.export.secrets import Secret, secret_args
from tuner.records import LaunchRecord


@dataclass(frozen=True)
class Hole:
    """A place within an argument: where the server listens, or the variable `name` that holds a secret."""

    kind: Literal["host", "port", "secret"]
    name: str = ""


Word = tuple[str | Hole, ...]
"""One argument, in parts; without holes it is one text."""


def refuse(record: LaunchRecord) -> None:
    """Raises for a record that no format can express.

    Raises:
        UsageError: a NUL character, text that is no Unicode, a variable without a usable name, or no program.
    """
    texts = [*record.argv, *record.env, *(value for value in record.env.values() if value is not None)]
    if any("\0" in text for text in texts):
        raise UsageError("the launch record holds a NUL character, which no command line or environment can")
    if any(re.search("[\ud800-\udfff]", text) for text in [*texts, *record.files, *record.files.values()]):
        raise UsageError("the launch record holds bytes that are no UTF-8 text, which no file of an export can")
    bad = [name for name in record.env if not name or "=" in name or name.startswith("-")]
    if bad:
        raise UsageError(f"the launch record sets {bad[0]!r}, which is not the name of a variable")
    if not record.argv or not record.argv[0] or record.argv[0].startswith("-") or "=" in record.argv[0]:
        raise UsageError("the launch record's command does not begin with the name of a program")


def words(record: LaunchRecord) -> list[Word]:
    """The arguments of the command, program included."""
    hidden = secret_args(record)
    found: list[Word] = []
    for i in range(len(record.argv)):
        if i in hidden:
            parts = hidden[i]
            found.append(tuple(Hole("secret", p.variable) if isinstance(p, Secret) else p for p in parts))
        else:
            found.append(address_parts(record, i))
    return found


def movable(record: LaunchRecord) -> tuple[bool, bool]:
    """Whether the host and the port can be told in the command."""
    kinds = {part.kind for word in words(record) for part in word if isinstance(part, Hole)}
    return "host" in kinds, "port" in kinds


def address_parts(record: LaunchRecord, index: int) -> Word:
    """An argument with holes where the address stands.

    The host and the port are seen behind their flags (`--port 8000`, `--host=::1`) and together (`127.0.0.1:8000`).
    A number that is only equal to the port is left alone.
    """
    element, before = record.argv[index], record.argv[index - 1] if index else ""
    host, port = record.host, str(record.port)
    if index == 0:
        return (element,)
    for hole, value in ((Hole("host"), host), (Hole("port"), port)):
        flag = f"--{hole.kind}"
        if element == value and before in ((flag, "-p") if hole.kind == "port" else (flag,)):
            return (hole,)
        if element == f"{flag}={value}":
            return (f"{flag}=", hole)
    if before == "--publish" and element == f"{host}:{port}:{port}":
        # A container's port outside and inside: the server in it is told the same.
        return (Hole("host"), ":", Hole("port"), ":", Hole("port"))
    shown = f"[{host}]" if ":" in host else host
    address = re.compile(rf"(?<![\w.:-]){re.escape(shown)}:{port}(?!\d)")
    opening, closing = ("[", "]") if ":" in host else ("", "")
    parts: list[str | Hole] = []
    rest = 0
    for match in address.finditer(element):
        parts += [element[rest : match.start()] + opening, Hole("host"), closing + ":", Hole("port")]
        rest = match.end()
    parts.append(element[rest:])
    return tuple(part for part in parts if part) or ("",)
