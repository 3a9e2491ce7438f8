"""What a study, and others before it, have met of crashes; what follows from them is told by `tuner/search/crashes.py`.

Crashes that other studies have paid for are kept beside the studies, one JSON line each. A crash is of an exact launch:
engine and its version, hardware, model, fixed arguments, environment and settings; for one under load, of the workload
too. Whatever of these changes, the combination deserves a new try.

Beside the crashes of a study stands what worked in it: what some had in common that crashed there is not to blame where
others had it too, and worked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.files import write_whole
from tuner.records import Candidate, Failure, Setting, short_hash
from tuner.search.crashes import Crash, Region, Regions
from tuner.space import Space
from tuner.study.data import Slot, StudyData
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


LEAST_CRASHES, CRASH_SHARE = 3, 8
"""Crashes that a search may pay for before ruled out regions are closed for good: so many, or one launch in so many."""


def most_crashes(launches: int) -> int:
    """Crashes up to which ruled out candidates are still tried when no others are left."""
    return max(LEAST_CRASHES, launches // CRASH_SHARE)


@dataclass(frozen=True)
class Elsewhere:
    """What `crashed` in other studies of the same engine, machine, model and workload, and settings of what `worked`.

    `telling` are the crashes of those studies of which it is known what worked: from others no region is learned.
    """

    crashed: tuple[Crash, ...] = ()
    telling: tuple[Crash, ...] = ()
    worked: tuple[Mapping[str, Setting], ...] = ()


@dataclass(frozen=True)
class CrashesSeen:
    """What crashed here and in other studies (`elsewhere`), and settings of what worked."""

    crashed: tuple[Crash, ...]
    worked: tuple[Mapping[str, Setting], ...]
    elsewhere: Elsewhere = Elsewhere()

    @cached_property
    def _regions(self) -> Regions:
        return Regions((*self.crashed, *self.elsewhere.telling), (*self.worked, *self.elsewhere.worked))

    def region(self, settings: Mapping[str, Setting]) -> Region | None:
        """The region that rules a candidate out."""
        return self._regions.of(settings)


def crashes_seen(data: StudyData, elsewhere: Elsewhere = Elsewhere()) -> CrashesSeen:
    """What a study has seen of crashes."""
    crashed, worked = [], [data.baseline.settings]
    for trial in data.measured:
        if trial.running:
            continue
        settings = data.settings_of(trial.candidate_id)
        if trial.constraints.get("launch", 1.0) <= 0:
            worked.append(settings)
            continue
        launches = data.launched_for.get(Slot(trial.candidate_id, "screen", 0), ())
        failures = [launch.failure for launch in launches if launch.failure is not None and not launch.forgiven]
        if failures and failures[-1].kind in CRASHES and failures[-1].blame == "candidate":
            crashed.append(Crash(settings, f"trial {trial.number}"))
    return CrashesSeen(tuple(crashed), tuple(worked), elsewhere)


class CrashMemory:
    """The memory in a file. It can be deleted at any time: at worst a crash is paid for once more."""

    def __init__(self, path: Path = FILE) -> None:
        self.path = path
        self._read: tuple[tuple[int, int] | None, list[dict[str, Any]]] = (None, [])

    def known(self, data: StudyData, candidate: Candidate) -> str | None:
        """The crash of this candidate that another study has met, in a sentence; None when none has."""
        keys = {_key(data, candidate, under_load=under_load) for under_load in (False, True)}
        for entry in self._crashes():
            if entry["key"] in keys and entry["uid"] != data.uid:
                return f"known crash of study {entry['study']}: {entry['kind']}: {entry['message']}"
        return None

    def elsewhere(self, data: StudyData) -> Elsewhere:
        """What crashed, and what worked, in other studies of this engine, machine, model and workload."""
        return self.of(data.space, data.fingerprint, data.uid)

    def of(self, space: Space, fingerprint: Mapping[str, Any], uid: str = "") -> Elsewhere:
        """What crashed, and what worked, in studies of this engine, machine, model and workload, but that of this uid.

        What worked under another workload counts too: its servers came up.
        """
        contexts = {short_hash(_surroundings(space, fingerprint, under_load)) for under_load in (False, True)}
        others = [
            entry
            for entry in self._entries()
            if entry["uid"] != uid and entry.get("context") in contexts and isinstance(entry.get("settings"), dict)
        ]
        worked = [entry for entry in others if _worked(entry)]
        tells = {entry["uid"] for entry in worked}
        crashed = [
            (entry["uid"], Crash(entry["settings"], f"study {entry['study']}", elsewhere=True))
            for entry in others
            if _crashed(entry)
        ]
        return Elsewhere(
            tuple(crash for _, crash in crashed),
            tuple(crash for of, crash in crashed if of in tells),
            tuple(entry["settings"] for entry in worked),
        )

    def remember(self, data: StudyData, candidate: Candidate, failure: Failure) -> None:
        """Keeps a crash, and what has worked so far beside it; a failure that is no crash, or known, is passed over.

        Raises:
            OSError: it cannot be written.
        """
        if failure.kind not in CRASHES or failure.blame != "candidate":
            return
        under_load = failure.phase == "bench"
        key = _key(data, candidate, under_load=under_load)
        if any(entry["key"] == key for entry in self._crashes()):
            return
        crash = {
            "key": key,
            "context": _context(data, under_load=under_load),
            "study": data.name,
            "uid": data.uid,
            "at": time.time(),
            "kind": failure.kind,
            "message": failure.message,
            "settings": dict(candidate.settings),
        }
        self._add([crash, *self._worked_of(data, crashes_seen(data).worked)])

    def works(self, data: StudyData, candidate: Candidate) -> None:
        """Keeps that a candidate worked, where something crashed that it may have much in common with.

        Raises:
            OSError: it cannot be written.
        """
        contexts = {_context(data, under_load=under_load) for under_load in (False, True)}
        if any(entry.get("context") in contexts for entry in self._crashes()):
            self._add(self._worked_of(data, [data.baseline.settings, candidate.settings]))

    def _worked_of(self, data: StudyData, settings: Sequence[Mapping[str, Setting]]) -> list[dict[str, Any]]:
        """What is to be kept of these settings of a study: what is not yet."""
        context = _context(data, under_load=False)
        known = [
            e["settings"] for e in self._entries() if _worked(e) and e["uid"] == data.uid and e["context"] == context
        ]
        about = {"worked": True, "context": context, "study": data.name, "uid": data.uid, "at": time.time()}
        return [{**about, "settings": dict(one)} for one in settings if dict(one) not in known]

    def _add(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if not entries:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())

    def forget(self, uid: str) -> None:
        """Drops what a study has kept, for it turned out not to be the candidates' fault.

        Raises:
            OSError: it cannot be written.
        """
        entries = self._entries()
        kept = [entry for entry in entries if entry["uid"] != uid]
        if len(kept) < len(entries):
            write_whole({self.path: "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)})

    def _crashes(self) -> list[dict[str, Any]]:
        return [entry for entry in self._entries() if _crashed(entry)]

    def _entries(self) -> list[dict[str, Any]]:
        try:
            known = self.path.stat()
            if (found := (known.st_mtime_ns, known.st_size)) != self._read[0]:
                text = self.path.read_text(encoding="utf-8", errors="replace")
                self._read = found, [*_lines(text)]
        except OSError:
            return []  # there is none yet, or it cannot be read: then every candidate is tried
        return self._read[1]


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if isinstance(entry, dict) and _plausible(entry) and (_crashed(entry) or _worked(entry)):
            yield entry


def _crashed(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(name), str) for name in ("key", "uid", "study", "kind", "message"))


def _worked(entry: Mapping[str, Any]) -> bool:
    named = all(isinstance(entry.get(name), str) for name in ("uid", "study", "context"))
    return entry.get("worked") is True and named and "settings" in entry


def _plausible(entry: Mapping[str, Any]) -> bool:
    """Whether settings and context are such, where there are any: others may have written to the file."""
    settings, context = entry.get("settings", {}), entry.get("context", "")
    values = settings.values() if isinstance(settings, dict) else (None,)
    return isinstance(context, str) and all(isinstance(value, (bool, int, float, str)) for value in values)


def _key(data: StudyData, candidate: Candidate, *, under_load: bool) -> str:
    surroundings = _surroundings(data.space, data.fingerprint, under_load)
    return short_hash({**surroundings, "settings": dict(candidate.settings)})


def _context(data: StudyData, *, under_load: bool) -> str:
    return short_hash(_surroundings(data.space, data.fingerprint, under_load))


def _surroundings(space: Space, then: Mapping[str, Any], under_load: bool) -> dict[str, Any]:
    workload = space.workload
    return {
        "engine": space.kind,
        "engine_version": then.get("engine_version"),
        "hardware": then.get("hardware"),
        "model": space.model,
        "args": dict(space.args),
        "env": dict(space.env),
        "workload": [list(workload.concurrency), workload.max_tokens, workload.prompts] if under_load else None,
    }
