"""What a launch's family is, noted in a file while it runs: who has lost the marker is found after a kill all the same.

One file per launch in a folder of this user's, `spec-tuner-UID` beside other temporary files. It holds pids with their
start times, and the shared-memory segments that the family was seen to hold. Without it (the folder cannot be
written), the marker alone finds what a killed tuner leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tuner.launch.processes import Process, pid_namespace

Key = tuple[int, int]
"""A pid and when it started; or a segment's inode in place of the start."""


@dataclass(frozen=True)
class Note:
    """One launch: its marker, its server, the members seen, and the segments seen (name, inode)."""

    marker: str
    server: Key
    members: frozenset[Key] = frozenset()
    segments: frozenset[tuple[str, int]] = frozenset()
    path: Path = field(default=Path(), compare=False)

    def living(self, processes: Mapping[int, Process]) -> set[int]:
        """Pids of its members that run now.

        The server's session counts as long as the server or a noted member of it lives: its id is not reused before.
        """
        keys = self.members | {self.server}
        found = {pid for pid, process in processes.items() if process.key in keys and not process.zombie}
        if any(processes[pid].session == self.server[0] for pid in found):
            found |= {
                pid for pid, process in processes.items() if process.session == self.server[0] and not process.zombie
            }
        return found

    def drop(self) -> None:
        """Removes the file: nothing is left of the launch."""
        self.path.unlink(missing_ok=True)


def folder() -> Path:
    """Where notes are kept."""
    return Path(tempfile.gettempdir()) / f"spec-tuner-{os.getuid()}"


class NoteBook:
    """The note of one running launch, written when something changes."""

    def __init__(self, marker: str, server: Key) -> None:
        self.note = Note(marker, server, path=folder() / f"{sha256(marker.encode()).hexdigest()[:20]}.json")
        self._written: Note | None = None

    def see(self, members: Iterable[Key], segments: Iterable[tuple[str, int]]) -> None:
        """Notes who belongs to the launch now; what was noted before stays."""
        now = Note(
            self.note.marker,
            self.note.server,
            self.note.members | frozenset(members),
            self.note.segments | frozenset(segments),
            self.note.path,
        )
        if now == self._written:
            return
        self.note = now
        with contextlib.suppress(OSError):  # the marker is still there
            if _ours(self.note.path.parent, make=True):
                fresh = now.path.with_suffix(".new")
                fresh.write_text(_text(now), encoding="utf-8")
                fresh.replace(now.path)
                self._written = now


def notes() -> list[Note]:
    """The notes of this boot and PID namespace. Those of an earlier boot are removed: nothing of them can run."""
    found = []
    if not _ours(folder()):
        return []
    for path in sorted(folder().glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            note = Note(
                str(data["marker"]),
                _key(data["server"]),
                frozenset(map(_key, data["members"])),
                frozenset((str(name), int(inode)) for name, inode in data["segments"]),
                path,
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue  # torn, or removed meanwhile
        if data.get("boot") != boot_id():
            with contextlib.suppress(OSError):
                path.unlink()
        elif data.get("namespace") == pid_namespace():
            found.append(note)
    return found


def boot_id() -> str:
    """Of the running kernel; "" where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _text(note: Note) -> str:
    facts = {"marker": note.marker, "boot": boot_id(), "namespace": pid_namespace(), "server": note.server}
    return json.dumps({**facts, "members": sorted(note.members), "segments": sorted(note.segments)})


def _key(pair: Iterable[int]) -> Key:
    pid, started = pair
    return int(pid), int(started)


def _ours(path: Path, *, make: bool = False) -> bool:
    """Whether the folder is a real one that nobody else can write."""
    if make:
        path.mkdir(mode=0o700, exist_ok=True)
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
