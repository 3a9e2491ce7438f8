"""Where a study runs: the host and devices of a worker, what it shares with others, and on what its database lies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.space.devices import VISIBLE


@dataclass(frozen=True)
class Place:
    """Where a worker launches its servers: these devices of a host, all of them when none is named."""

    host: str
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`host`, or `host/0,1`; what is kept with launches."""
        return f"{self.host}/{','.join(self.devices)}" if self.devices else self.host

    @property
    def env(self) -> dict[str, str]:
        """The variables that keep a server to its devices."""
        return {VISIBLE: ",".join(self.devices)} if self.devices else {}

    def overlaps(self, other: Place) -> bool:
        """Whether both could use one device."""
        if self.host != other.host:
            return False
        return not self.devices or not other.devices or bool({*self.devices} & {*other.devices})


def hostname() -> str:
    """Of this machine; workers go by it, so that hosts that share a study need names of their own."""
    return socket.gethostname()


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
def measuring(study: str, folder: Path | None = None, devices: Sequence[str] = ()) -> Iterator[str | None]:
    """Notes for the block that this study measures here; yields a sentence when another one of this user does.

    Two studies on one machine spoil each other's figures, and neither could tell. Who measures on devices of its own
    shares the machine with others that do: only one on the same device, or on the whole machine, is told of.
    """
    base = (folder or Path(tempfile.gettempdir())) / f"spec-tuner-{os.getuid()}.measuring"
    whole = fcntl.LOCK_SH if devices else fcntl.LOCK_EX
    names = [(base, whole), *((base.with_name(f"{base.name}.{_file(device)}"), fcntl.LOCK_EX) for device in devices)]
    with contextlib.ExitStack() as stack:
        met = None
        for path, kind in names:
            met = met or stack.enter_context(_noted(path, kind, f"study {study} (process {os.getpid()})"))
        yield met


@contextlib.contextmanager
def _noted(path: Path, kind: int, who: str) -> Iterator[str | None]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield None  # without the note nothing is lost but the warning
        return
    try:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            other = os.pread(file, 200, 0).decode(errors="replace").strip() or "another study"
            yield f"{other} is measuring on this machine as well: the figures of both suffer; let one end first"
            return
        os.ftruncate(file, 0)
        os.pwrite(file, who.encode(), 0)
        yield None
    finally:
        os.close(file)


def _file(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", device)
