"""System V shared memory, which is in no folder: segments by the process that made them, and removing them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_IPC_RMID = 0


@dataclass(frozen=True)
class SysvSegment:
    """One segment: its id, who made it, and how many processes are attached."""

    id: int
    maker: int
    attached: int
    uid: int

    @property
    def name(self) -> str:
        """For a person."""
        return f"SysV segment {self.id}"


def snapshot() -> list[SysvSegment]:
    """The segments that there are; empty where they cannot be listed."""
    try:
        rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    except OSError:
        return []
    # key shmid perms size cpid lpid nattch uid ...
    fields = [row.split() for row in rows]
    return [SysvSegment(int(row[1]), int(row[4]), int(row[6]), int(row[7])) for row in fields]


def made_by(pids: Collection[int], before: Iterable[int]) -> list[SysvSegment]:
    """Our user's segments that these processes made, other than those with an id in `before`."""
    old = set(before)
    return [one for one in snapshot() if one.maker in pids and one.id not in old and one.uid == os.getuid()]


def remove(segments: Iterable[SysvSegment]) -> tuple[list[str], list[str]]:
    """Removes segments that nobody is attached to: names that were removed, and names that could not be."""
    libc = ctypes.CDLL(None, use_errno=True)
    removed: list[str] = []
    left: list[str] = []
    for segment in segments:
        if segment.attached == 0:
            done = libc.shmctl(segment.id, _IPC_RMID, None) == 0
            (removed if done else left).append(segment.name)
    return removed, left
