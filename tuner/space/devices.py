"""Names of the devices that a server may use: indices, ranges of them, or ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that tells a server which devices it may use; AMD's runtime goes by it too."""

MOST = 1024

_RANGE = re.compile(r"(\d+)-(\d+)")
_DEVICE = re.compile(r"[A-Za-z0-9._:-]+")


def device_names(value: object) -> tuple[str, ...]:
    """The devices that `0,1`, `0-3`, `GPU-…` or a list of such names, in order; none for None.

    Raises:
        ValueError: one is named twice, or is no device, or none is named.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",")]
    elif isinstance(value, Sequence) and not any(isinstance(word, (bool, float)) for word in value):
        words = [str(word).strip() for word in value]
    elif isinstance(value, int) and not isinstance(value, bool):
        words = [str(value)]
    else:
        raise ValueError(f"must be a list of devices such as [0, 1], not {value!r}")
    found = [device for word in words for device in _devices(word)]
    if not found:
        raise ValueError("names no device; leave it out for all of them")
    if doubled := sorted({device for device in found if found.count(device) > 1}):
        raise ValueError(f"{doubled[0]} is named twice")
    return tuple(found)


def _devices(word: str) -> list[str]:
    ends = _RANGE.fullmatch(word)
    if ends is not None and int(ends[1]) <= int(ends[2]) < MOST:
        return [str(index) for index in range(int(ends[1]), int(ends[2]) + 1)]
    if ends is not None or not _DEVICE.fullmatch(word):
        raise ValueError(f"'{word}' is no device; write indices such as 0,1 or 0-3, or ids such as GPU-…")
    return [str(int(word)) if word.isdigit() else word]
