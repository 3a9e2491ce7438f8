"""JSON from a server, which may hold anything: read within bounds, or refused with a `ValueError`.

What comes out can be stored, written and walked without another look: its depth is bounded, its text can be encoded,
its numbers are finite and fit in 64 bits.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

LIMIT = 8 << 20
"""Bytes of one document, and of one answer to a control request."""

DEEPEST = 100
"""Arrays and objects within one another. Interpreters give up at about ten times as many."""

MOST_TOKENS = 10**9
"""Of one request; a larger count is no count."""

_LARGEST = 2**64
_LONE = re.compile("[\ud800-\udfff]")


def parse(data: bytes | str, *, strict: bool = False) -> Any:
    """A JSON document. Half of a surrogate pair becomes U+FFFD, as do bytes that are not UTF-8.

    Args:
        data: the document.
        strict: refuse numbers that are not finite or too large; without it they become None.

    Raises:
        ValueError: it is no JSON, too long or too deep, or (when strict) holds such a number.
    """
    if len(data) > LIMIT:
        raise ValueError(f"more than {LIMIT >> 20} MiB of JSON")
    text = data if isinstance(data, str) else data.decode("utf-8-sig", "replace")

    def unusable(number: str) -> None:
        if strict:
            raise ValueError(f"{number[:20]} is not a number that can be used")

    def whole(number: str) -> int | None:
        # Converting a long number takes quadratic time; none of more than 21 characters fits.
        value = int(number) if len(number) <= 21 else _LARGEST
        if abs(value) < _LARGEST:
            return value
        unusable(number)
        return None

    def real(number: str) -> float | None:
        value = float(number)
        if math.isfinite(value):
            return value
        unusable(number)
        return None

    try:
        found = json.loads(text, parse_int=whole, parse_float=real, parse_constant=unusable)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    # The usual event is short and shallow; only what could be otherwise is walked.
    deep = text.count("[") + text.count("{") > DEEPEST
    return _plain(found, DEEPEST) if deep or "\\u" in text or _LONE.search(text) else found


def encodable(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, which no encoding can hold."""
    return _LONE.sub("\ufffd", text)


def count(value: object) -> int | None:
    """A count of tokens; None when it is none.

    Raises:
        ValueError: it is something else than a whole number from 0 to `MOST_TOKENS`.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"is {repr(value)[:40]}, no count of tokens")
    return value


def _plain(value: Any, left: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, (dict, list)):
        return value
    if left == 0:
        raise ValueError("the JSON is nested too deeply")
    if isinstance(value, dict):
        return {encodable(key): _plain(inner, left - 1) for key, inner in value.items()}
    return [_plain(inner, left - 1) for inner in value]
