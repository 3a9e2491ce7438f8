"""The log of a launch: written through a pump process, capped, read by offsets into the whole output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

from tuner.launch import pump
from tuner.launch.processes import wait_until
from tuner.plain import plain_lines

HEAD = 64 << 20
"""Bytes of the beginning that are kept for good: it holds the cause of a failure at start."""

SEGMENT = 16 << 20
"""Bytes of each of the two files that hold the end of a longer log. A log takes HEAD + 2 SEGMENT at most."""

_PIPE = 1 << 20
_GAP = b"\n(%d bytes of the log are not kept)\n"
_HOLE = re.compile(rb"\0{8,}")
"""What the pump leaves out where a log was removed under it: bytes that were never written."""


class LaunchLog:
    """The output of one server on its way into files. `close` it once the server and its family have ended.

    Args:
        path: the beginning of the log; replaced, with its segments, when it exists.
        env: of the pump process. With the launch's marker in it, a pump that outlives the tuner is found.
        head: bytes of the beginning to keep.
        segment: bytes of each of the two later files.

    Raises:
        OSError: the log cannot be written.
    """

    def __init__(self, path: Path, env: Mapping[str, str], head: int = HEAD, segment: int = SEGMENT) -> None:
        self.path = path
        self._env = dict(env)
        self._argv = [sys.executable, "-I", "-S", pump.__file__, str(path), str(head), str(segment)]
        self._lock = threading.Lock()
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        for _, file in pump.segments(path):
            file.unlink(missing_ok=True)
        path.touch()
        self._source, self.write_end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # the usual size does too; it costs more switches
            fcntl.fcntl(self._source, fcntl.F_SETPIPE_SZ, _PIPE)
        self._pump = self._start()

    @property
    def pump_pid(self) -> int:
        """Of the pump process: it is of the launch, but not of the server's family."""
        return self._pump.pid

    @property
    def size(self) -> int:
        """Bytes that the server has written so far, those that are not kept included."""
        return pump.size(self.path)

    def started(self) -> None:
        """The server has its end of the pipe: closes ours, so that its end is noticed."""
        os.close(self.write_end)

    def tend(self) -> None:
        """Starts the pump again when somebody has ended it: nobody else reads the pipe, and the server would block."""
        with self._lock:
            if not self._closed and self._pump.poll() not in (None, 0):
                with contextlib.suppress(OSError):  # no process to be had just now; the next look tries again
                    self._pump = self._start()

    def drain(self, timeout_s: float = 2.0) -> None:
        """Waits until what has been written to the pipe stands in the files."""
        self.tend()
        if self._closed or not wait_until(lambda: not self._pending() or self._pump.poll() is not None, timeout_s):
            return
        try:
            with self.path.open("rb") as file:
                wait_until(lambda: _locked(file.fileno()), timeout_s)
        except OSError:
            return  # somebody has removed the log, or its folder: what is left of it is all there is to read

    def close(self, timeout_s: float = 2.0) -> bool:
        """Ends the pump, which ends by itself once nobody can write any more. False when it had to be killed."""
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        try:
            self._pump.wait(timeout_s)
            return True
        except subprocess.TimeoutExpired:
            self._pump.kill()
            self._pump.wait()
            return False
        finally:
            os.close(self._source)

    def _pending(self) -> bool:
        count = bytearray(4)
        fcntl.ioctl(self._source, termios.FIONREAD, count)
        return any(count)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._argv,
            stdin=self._source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._env,
            start_new_session=True,
        )


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read(path: Path, start: int = 0, end: int | None = None, limit: int | None = None) -> str:
    """The part of a log from `start` to `end`, offsets into the whole output; a gap says how much is not kept.

    Args:
        path: the beginning of the log.
        start: first byte.
        end: behind the last byte; the end of the log when None.
        limit: at most so many bytes: the first half and the last, where causes and last words stand.
    """
    end = pump.size(path) if end is None else end
    if limit is None or end - start <= limit:
        return read_bytes(path, start, end).decode(errors="replace")
    head = read_bytes(path, start, start + limit // 2)
    tail = read_bytes(path, end - limit // 2, end)
    return (head + _GAP % (end - start - limit // 2 * 2) + tail).decode(errors="replace")


def read_bytes(path: Path, start: int, end: int) -> bytes:
    """As `read`, undecoded: a part may begin or end within a character."""
    parts = []
    at = start
    for offset, file in pump.segments(path):
        if offset >= end:
            break
        try:
            with file.open("rb") as source:
                source.seek(max(0, at - offset))
                data = source.read(max(0, end - max(at, offset)))
        except FileNotFoundError:  # rotated away meanwhile
            continue
        except OSError as error:
            return f"(the log cannot be read: {error})".encode()
        if data and offset > at:
            parts.append(_GAP % (offset - at))
        parts.append(data)
        if data:
            at = max(at, offset) + len(data)
    return _HOLE.sub(lambda hole: _GAP % len(hole[0]), b"".join(parts))


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, fit for a terminal."""
    end = pump.size(path)
    return "\n".join(plain_lines(read(path, max(0, end - 400 * lines - 4096), end))[-lines:])
