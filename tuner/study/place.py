"""Where a study runs: what of the machine it shares with others, and on what its database lies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FUSE = "fuse.sshfs fuse.glusterfs fuse.s3fs fuse.juicefs fuse.gcsfuse"
NETWORK = frozenset(f"nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs lustre beegfs gpfs {_FUSE}".split())
"""File systems on which SQLite's locks, or its write-ahead log, cannot be relied on."""


def network_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The kind of network file system that a path lies on; None for a local one, or where it cannot be told."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    place = path.resolve()
    under = [(Path(_plain(row[1])), row[2]) for row in rows if len(row) > 2]
    over = [(mounted, kind) for mounted, kind in under if place == mounted or mounted in place.parents]
    # The longest mount point counts, of equal ones the last: it covers the others.
    _, kind = max(enumerate(over), key=lambda entry: (len(entry[1][0].parts), entry[0]), default=(0, (Path(), "")))[1]
    return kind if kind in NETWORK else None


def _plain(name: str) -> str:
    """A mount point as it is called: spaces and the like are written as octal numbers."""
    return name.encode().decode("unicode_escape") if "\\" in name else name


@contextlib.contextmanager
def measuring(study: str, folder: Path | None = None) -> Iterator[str | None]:
    """Notes for the block that this study measures here; yields a sentence when another one of this user does.

    Two studies on one machine spoil each other's figures, and neither could tell.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"spec-tuner-{os.getuid()}.measuring"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield None  # without the note nothing is lost but the warning
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = os.pread(file, 200, 0).decode(errors="replace").strip() or "another study"
            yield f"{who} is measuring on this machine as well: the figures of both suffer; let one end first"
            return
        os.ftruncate(file, 0)
        os.pwrite(file, f"study {study} (process {os.getpid()})".encode(), 0)
        yield None
    finally:
        os.close(file)
