"""Carries a server's output from a pipe into capped files: `python pump.py LOG HEAD_BYTES SEGMENT_BYTES < pipe`.

A process of its own, started before the server: it goes on when the tuner is killed, so that the server neither
blocks on a full pipe nor dies of a closed one, and it ends when the last writer has closed the pipe. It imports
nothing but the standard library, so that it starts at once and stays small.

`LOG` keeps the beginning, where the cause of a failure stands. What comes later goes to segments `LOG.OFFSET`, named
by the offset of their first byte in the whole output; only the last two stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import sys
from pathlib import Path

_CHUNK = 1 << 16
_KEPT = 2
"""Segments that stay: the one that is written and the one before it."""


def segments(path: Path) -> list[tuple[int, Path]]:
    """The files of a log, as (offset of the first byte, file), in order; the beginning has offset 0."""
    name = re.compile(re.escape(path.name) + r"\.(\d{12,})")
    found = [(0, path)] if path.exists() else []
    try:
        names = os.listdir(path.parent)
    except OSError:
        return found
    found += [(int(match[1]), path.with_name(match[0])) for match in map(name.fullmatch, names) if match]
    return sorted(found)


def size(path: Path) -> int:
    """Bytes of the whole output so far, those that are not kept included."""
    for offset, file in reversed(segments(path)):
        try:
            return offset + file.stat().st_size
        except FileNotFoundError:  # rotated away between the look and the question; an older one cannot be last
            continue
    return 0


class Sink:
    """Where the output goes. A file that cannot be written loses output, but never holds the server up."""

    def __init__(self, path: Path, head: int, segment: int) -> None:
        self.path = path
        self.head = head
        self.segment = segment
        self.total = size(path)
        self.lost = 0
        last_offset, last = (segments(path) or [(0, path)])[-1]
        self._end = head if last_offset == 0 else last_offset + segment
        self._current = last
        self._file: int | None = None

    def write(self, data: bytes) -> None:
        """Appends, opening a new segment where the current file is full."""
        while data:
            if self.total >= self._end:
                self._rotate()
            part = data[: self._end - self.total]
            data = data[len(part) :]
            self._append(part)

    def _append(self, part: bytes) -> None:
        try:
            if self._file is not None and not os.fstat(self._file).st_nlink:
                self._again()
            if self._file is None:
                self._file = _open(self._current)
            written = os.write(self._file, part)
        except OSError:
            # A full disk, most likely. It may have room again later; until then the server goes on without a log.
            written = 0
        self.total += written
        self.lost += len(part) - written

    def _again(self) -> None:
        """Somebody has removed the file: a new one goes on at the same offset, with a hole for what is lost."""
        assert self._file is not None
        os.close(self._file)
        self._file = None
        self._file = _open(self._current)
        begins = int(self._current.suffix[1:]) if self._current != self.path else 0
        os.ftruncate(self._file, self.total - begins)

    def _rotate(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._current = self.path.with_name(f"{self.path.name}.{self.total:012d}")
        self._end = self.total + self.segment
        for offset, file in segments(self.path)[: 1 - _KEPT]:  # the new one is not there yet
            if offset:
                with contextlib.suppress(OSError):  # a folder that became read-only: the log grows, the server goes on
                    file.unlink(missing_ok=True)


def _open(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)


def main(path: str, head: str, segment: str) -> None:
    """Until the last writer has closed the pipe on standard input."""
    # The end of the server is our end. A signal meant for its family must not cut off its last words.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        lock = _open(Path(path))
    except OSError:  # its folder is gone: nobody reads there, and the server must go on
        lock = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    sink = Sink(Path(path), int(head), int(segment))
    source = sys.stdin.fileno()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while True:
        poll.poll()
        # Held from the read to the write: who finds the pipe empty and then gets the lock has all of it in the files.
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = os.read(source, _CHUNK)
        sink.write(data)
        fcntl.flock(lock, fcntl.LOCK_UN)
        if not data:
            break
    if sink.lost:
        sink.write(f"\n(the log lost {sink.lost} bytes: it could not be written)\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
