"""Shared-memory segments in /dev/shm: which a launch has made, and removing them when nobody holds them any more.

Killed servers leave them behind (NCCL, PyTorch and Python's `shared_memory` all make some), and they are memory: a
few dozen crashed launches fill a machine. Only what a process of the family was seen to hold, or what bears the pid of
one in its name, is taken for the family's: another program may make segments at the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tuner.launch import sysv

FOLDER = Path("/dev/shm")


@dataclass(frozen=True)
class Segment:
    """A segment at one moment. The inode tells it from a later one of the same name."""

    name: str
    inode: int
    uid: int
    size: int


def snapshot(folder: Path = FOLDER) -> dict[str, Segment]:
    """The segments that there are, by name; empty where there is no such folder."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = Segment(entry.name, stat.st_ino, stat.st_uid, stat.st_size)
    except OSError:
        return {}
    return found


def held(pid: int, folder: Path = FOLDER) -> set[int]:
    """Inodes of the segments that a process has mapped or open."""
    return _mapped(pid, folder) | _open(pid, folder)


def _mapped(pid: int, folder: Path) -> set[int]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # address perms offset device inode path
    rows = (line.split(None, 5) for line in maps.splitlines() if f"{folder}/" in line)
    return {int(row[4]) for row in rows if len(row) == 6}


def _open(pid: int, folder: Path) -> set[int]:
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if os.readlink(entry.path).startswith(f"{folder}/"):
                        found.add(os.stat(entry.path).st_ino)
                except OSError:
                    continue
    except OSError:
        return found
    return found


class SegmentWatch:
    """The segments of one launch: made after this was, by a process of its family."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._before = {segment.inode for segment in snapshot(folder).values()}
        self._sysv = {segment.id for segment in sysv.snapshot()}
        self._inodes: set[int] = set()
        self._pids: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Notes what these processes hold now."""
        for pid in list(pids):
            self._pids.add(pid)
            self._inodes |= held(pid, self._folder) - self._before

    def mine(self) -> list[Segment]:
        """The family's segments that still exist."""
        return [
            segment
            for segment in snapshot(self._folder).values()
            if segment.inode not in self._before
            and segment.uid == os.getuid()
            and (segment.inode in self._inodes or self._pids & set(map(int, re.findall(r"\d+", segment.name))))
        ]

    def clear(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Removes them, once the family has ended: names that were removed, and names that could not be.

        A segment that somebody outside of the family holds as well is in use, and stays unmentioned.
        """
        mine = self.mine()
        removed, left = remove(mine, self._folder) if mine else ((), ())
        old_removed, old_left = sysv.remove(sysv.made_by(self._pids, self._sysv))
        return (*removed, *old_removed), (*left, *old_left)

    def unclaimed(self) -> tuple[str, ...]:
        """Segments of our user that were made meanwhile and that nobody holds: perhaps the family's, perhaps not."""
        fresh = [s for s in snapshot(self._folder).values() if s.inode not in self._before and s.uid == os.getuid()]
        if not fresh:
            return ()
        in_use, mine = holders(self._folder), set(self.mine())
        return tuple(sorted(s.name for s in fresh if s.inode not in in_use and s not in mine))


def noted(seen: Iterable[tuple[str, int]], folder: Path = FOLDER) -> list[Segment]:
    """Those segments of ours, by name and inode, that still exist."""
    there = snapshot(folder)
    found = (there.get(name) for name, inode in seen if name in there and there[name].inode == inode)
    return [segment for segment in found if segment is not None and segment.uid == os.getuid()]


def remove(segments: Iterable[Segment], folder: Path = FOLDER) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Removes segments that no living process holds: names that were removed, and names that could not be."""
    in_use = holders(folder)
    removed, left = [], []
    for segment in segments:
        if segment.inode in in_use:
            continue
        try:
            (folder / segment.name).unlink()
            removed.append(segment.name)
        except FileNotFoundError:
            continue
        except OSError:
            left.append(segment.name)
    return tuple(sorted(removed)), tuple(sorted(left))


def holders(folder: Path = FOLDER) -> dict[int, set[int]]:
    """Inode of each segment that is in use → pids of the processes that hold it, as far as they may be read."""
    found: dict[int, set[int]] = {}
    for name in os.listdir("/proc") if Path("/proc").is_dir() else ():
        if name.isdigit():
            for inode in held(int(name), folder):
                found.setdefault(inode, set()).add(int(name))
    return found
