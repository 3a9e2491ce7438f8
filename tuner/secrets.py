"""Which names hold secrets: their values are written nowhere, not in a database, a log, a report or an artefact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SECRET = re.compile(
    r"(?:^|[_-])(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|"
    r"auth|authorization)(?:$|[_-](?!.*(?:file|path)$))",
    re.IGNORECASE,
)


_OF_TEXT = re.compile(
    r"(?:bos|eos|pad|unk|sep|cls|mask|start|end|stop|think|image|video|audio|special|added|max|min|per)[_-]token(?![a-z])",
    re.IGNORECASE,
)
"""Tokens of a vocabulary, or a number of them."""


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret. A path to one (`…_FILE`) is none."""
    return _SECRET.search(_OF_TEXT.sub("", name.lstrip("-"))) is not None


LEFT_OUT = "(left out)"
"""What stands in a text in place of a secret."""

_NAMED = re.compile(
    r"""(?<![A-Za-z0-9_-])(?P<name>[A-Za-z_-][A-Za-z0-9_-]*)"""
    r"""(?=(?P<between>["']?\s*[=:]\s*|["',\]]*\s+["']?)(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',;}\]]+))"""
)
"""A name, and what stands behind it; that is looked at only, so that a value may be the next one's name."""

_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|nvapi-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[baprs]-[\w-]{10,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
_BEARER = re.compile(r"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE)
_USERINFO = re.compile(r"(://[^\s/:@\"']*:)[^\s/@\"']+@")


def redacted(text: str) -> str:
    """A text, such as a log, without what looks like a secret: by its name before it, or by its shape.

    A value after whitespace alone counts only behind a flag, `--api-key VALUE`.
    """
    text = _USERINFO.sub(rf"\1{LEFT_OUT}@", text)
    text = _BEARER.sub(rf"\1\2{LEFT_OUT}", text)
    text = _SHAPES.sub(LEFT_OUT, text)
    found, rest = "", 0
    for match in _NAMED.finditer(text):
        begin, end = match.span("value")
        if begin >= rest and _is_hidden(match["name"], match["between"], match["value"]):
            quote = match["value"][0] if match["value"][0] in "\"'" else ""
            found += f"{text[rest:begin]}{quote}{LEFT_OUT}{quote}"
            rest = end
    return found + text[rest:]


@dataclass(frozen=True)
class Found:
    """A secret within a text: where it stands, and what it is called there."""

    start: int
    end: int
    name: str


def find(text: str) -> list[Found]:
    """What `redacted` leaves out of a text, in order, but for numbers of tokens."""
    found = [Found(match.end(1), match.end() - 1, "password") for match in _USERINFO.finditer(text)]
    found += [Found(match.end(2), match.end(), "authorization") for match in _BEARER.finditer(text)]
    for match in _NAMED.finditer(text):
        number = "token" in match["name"].lower() and re.fullmatch(r"[\d.]+|true|false|null", match["value"])
        if not number and _is_hidden(match["name"], match["between"], match["value"]):
            quoted = match["value"][0] in "\"'" and len(match["value"]) > 1
            begin, end = match.span("value")
            found.append(Found(begin + quoted, end - quoted, match["name"]))
    found += [Found(*match.span(), "token") for match in _SHAPES.finditer(text)]
    apart: list[Found] = []
    for each in sorted(found, key=lambda one: (one.start, -one.end)):
        if each.end > each.start and (not apart or each.start >= apart[-1].end):
            apart.append(each)
    return apart


def _is_hidden(name: str, between: str, value: str) -> bool:
    if not is_secret(name) or value.strip("\"'").startswith(LEFT_OUT[:5]) or value.lower() in ("bearer", "basic"):
        return False
    assigned = "=" in between or ":" in between
    return assigned or (name.startswith("-") and not value.lstrip("\"'").startswith("-"))


def without_secrets(value: Any) -> Any:
    """A JSON value with every secret in it left out; keys, and flags of a command line, tell which."""
    if isinstance(value, Mapping):
        return {
            key: LEFT_OUT if isinstance(each, str) and each and is_secret(str(key)) else without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        found = [without_secrets(each) for each in value]
        for i, each in enumerate(value[:-1]):
            behind = value[i + 1]
            flag = isinstance(each, str) and each.startswith("-") and "=" not in each and is_secret(each)
            if flag and isinstance(behind, str) and not behind.startswith("-"):
                found[i + 1] = LEFT_OUT
        return found
    return redacted(value) if isinstance(value, str) else value
