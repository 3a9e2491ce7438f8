"""A server's words, made fit for a terminal, a database and a message: no control characters, nothing endless."""

from __future__ import annotations

import re

LINE = 2000
"""Characters of one line that are kept: its beginning and its end."""

_SEQUENCE = re.compile(r"\x1b\[[0-9;?]{0,64}[ -/]?[@-~]|\x1b\][^\x07\x1b\n]{0,500}(?:\x07|\x1b\\)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str, limit: int = LINE) -> str:
    """One line without colours and control characters, cut in its middle where it is longer than `limit`."""
    if len(text) > limit:
        text = f"{text[: limit * 3 // 4]} … {text[-limit // 5 :]}"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text)).rstrip()


def plain_lines(text: str) -> list[str]:
    """Every line of a text, `plain`."""
    return [plain(line) for line in text.splitlines()]
