"""The key-value block at the head of a GGUF file, without the tensors.

The `gguf` package makes several NumPy views for each of the 100 000 strings of a vocabulary, which takes seconds; the
frontend needs a tenth of one. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import TokenizerError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys with their values as plain Python ones (arrays as lists).

    Raises:
        TokenizerError: not a little-endian GGUF file of version 2 or 3, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).block()
    except (OSError, struct.error, KeyError, ValueError) as error:
        raise TokenizerError(f"{path}: the GGUF header cannot be read ({error!r})") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def block(self) -> dict[str, Any]:
        magic, version, _tensors, pairs = self._take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        return {self._string(): self._value(self._take("I")[0]) for _ in range(pairs)}

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        start = self._at + 8
        end = start + struct.unpack_from("<Q", self._data, self._at)[0]
        if end > len(self._data):
            raise ValueError("a string runs past the end of the file")
        self._at = end
        return self._data[start:end].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._take("IQ")
            if count > len(self._data):
                raise ValueError("an array runs past the end of the file")
            if element in (_STRING, _ARRAY):
                return [self._value(element) for _ in range(count)]
            return list(self._take(f"{count}{_SCALARS[element]}"))
        return self._take(_SCALARS[kind])[0]
