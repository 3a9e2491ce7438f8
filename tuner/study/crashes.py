"""Crashes that other studies have paid for: one JSON line each, beside the studies.

A crash is of an exact launch: engine and its version, hardware, model, fixed arguments, environment and settings; for
one under load, of the workload too. Whatever of these changes, the combination deserves a new try.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.files import write_whole
from tuner.records import Candidate, Failure, Setting, short_hash
from tuner.study.data import StudyData
from tuner.study.names import STUDIES

FILE = STUDIES / "crashes.jsonl"

CRASHES = frozenset(
    (
        "invalid_config",
        "startup_crash",
        "startup_hang",
        "oom_startup",
        "oom_under_load",
        "partial_init",
        "crash_on_first_decode",
        "died_mid_bench",
        "hung_decode",
        "engine_dead_5xx",
    )
)
"""The classes that a second launch of the same would end in as well. What gates refuse is a measurement, no crash."""


class CrashMemory:
    """The memory in a file. It can be deleted at any time: at worst a crash is paid for once more."""

    def __init__(self, path: Path = FILE) -> None:
        self.path = path

    def known(self, data: StudyData, candidate: Candidate) -> str | None:
        """The crash of this candidate that another study has met, in a sentence; None when none has."""
        keys = {_key(data, candidate, under_load=under_load) for under_load in (False, True)}
        for entry in self._entries():
            if entry["key"] in keys and entry["uid"] != data.uid:
                return f"known crash of study {entry['study']}: {entry['kind']}: {entry['message']}"
        return None

    def elsewhere(self, data: StudyData) -> tuple[Mapping[str, Setting], ...]:
        """The settings that crashed in other studies of this engine, machine, model and workload."""
        contexts = {_context(data, under_load=under_load) for under_load in (False, True)}
        return tuple(
            entry["settings"]
            for entry in self._entries()
            if entry["uid"] != data.uid and entry.get("context") in contexts and isinstance(entry.get("settings"), dict)
        )

    def remember(self, data: StudyData, candidate: Candidate, failure: Failure) -> None:
        """Keeps a crash; any other failure, and one that is known already, is passed over.

        Raises:
            OSError: it cannot be written.
        """
        if failure.kind not in CRASHES or failure.blame != "candidate":
            return
        key = _key(data, candidate, under_load=failure.phase == "bench")
        if any(entry["key"] == key for entry in self._entries()):
            return
        entry = {
            "key": key,
            "context": _context(data, under_load=failure.phase == "bench"),
            "study": data.name,
            "uid": data.uid,
            "at": time.time(),
            "kind": failure.kind,
            "message": failure.message,
            "settings": dict(candidate.settings),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, uid: str) -> None:
        """Drops what a study has kept, for it turned out not to be the candidates' fault.

        Raises:
            OSError: it cannot be written.
        """
        entries = list(self._entries())
        kept = [entry for entry in entries if entry["uid"] != uid]
        if len(kept) < len(entries):
            write_whole({self.path: "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)})

    def _entries(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return  # there is none yet, or it cannot be read: then every candidate is tried
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if isinstance(entry, dict) and entry.keys() >= {"key", "uid", "study", "kind", "message"}:
                yield entry


def _key(data: StudyData, candidate: Candidate, *, under_load: bool) -> str:
    return short_hash({**_surroundings(data, under_load), "settings": dict(candidate.settings)})


def _context(data: StudyData, *, under_load: bool) -> str:
    return short_hash(_surroundings(data, under_load))


def _surroundings(data: StudyData, under_load: bool) -> dict[str, Any]:
    then: Mapping[str, Any] = data.fingerprint
    workload = data.space.workload
    return {
        "engine": data.space.kind,
        "engine_version": then.get("engine_version"),
        "hardware": then.get("hardware"),
        "model": data.space.model,
        "args": dict(data.space.args),
        "env": dict(data.space.env),
        "workload": [list(workload.concurrency), workload.max_tokens, workload.prompts] if under_load else None,
    }
