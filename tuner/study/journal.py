"""The write-ahead record of blocks: one JSON line each, on the disk before the database is asked to keep it.

A block costs minutes. Between its end and its commit stand a lock that somebody else may hold, a disk that may be
full, and a kill; whatever of these comes, the line is there, and the next run takes it over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.records import Block, short_hash
from tuner.study.data import Slot
from tuner.study.database import dumps

FILE = "blocks.jsonl"
"""Of a worker on all devices; one on some devices has a record of its own beside it."""


@dataclass(frozen=True)
class Entry:
    """A block as the record holds it. `attempt` numbers the blocks of a slot at one level, from 0."""

    launch: int
    slot: Slot
    attempt: int
    block: Block

    @property
    def key(self) -> tuple[Slot, int, int]:
        """What the block is of: no two blocks of a study share it."""
        return self.slot, self.block.concurrency, self.attempt


class Journal:
    """The record in a study's folder. `study` is the study's uid: entries of any other are passed over.

    `devices` are the worker's, where they are not all: each worker of a host has a record of its own.
    """

    def __init__(self, folder: Path, study: str, devices: str = "") -> None:
        name = "".join(sign if sign.isalnum() else "-" for sign in devices)
        self.path = folder / (f"blocks.{name}.jsonl" if name else FILE)
        self.study = study

    def append(self, entry: Entry) -> None:
        """Writes an entry through to the disk.

        Raises:
            OSError: it could not be written.
        """
        body = {
            "study": self.study,
            "launch": entry.launch,
            "candidate": entry.slot.candidate_id,
            "role": entry.slot.role,
            "repetition": entry.slot.repetition,
            "attempt": entry.attempt,
            "block": entry.block.to_dict(),
        }
        line = dumps({"sum": short_hash(body), **body})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What a kill or a full disk has left without its end must not swallow the next line as well.
        with open(self.path, "ab+") as file:
            if size := file.tell():
                file.seek(size - 1)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> Iterator[Entry]:
        """All whole entries of this study, in order. A line that was never finished holds none.

        Raises:
            OSError: the file is there and cannot be read.
        """
        yield from self._read(self.path)

    def everything(self) -> Iterator[Entry]:
        """The entries of all workers of this host."""
        for path in sorted({self.path, *self.path.parent.glob("blocks*.jsonl")}):
            yield from self._read(path)

    def _read(self, path: Path) -> Iterator[Entry]:
        if not path.exists():
            return
        with open(path, "rb") as file:
            for line in file:
                if (entry := _entry(line, self.study)) is not None:
                    yield entry


def _entry(line: bytes, study: str) -> Entry | None:
    try:
        body: dict[str, Any] = json.loads(line)
        if body.pop("sum") != short_hash(body) or body["study"] != study:
            return None
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # torn, or not of this record
    slot = Slot(body["candidate"], body["role"], body["repetition"])
    return Entry(body["launch"], slot, body["attempt"], Block.from_dict(body["block"]))
