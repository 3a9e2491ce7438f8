"""Which launch of a study is deployed: a pure function of its records."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

from tuner.errors import TunerError, UsageError
from tuner.export.provenance import Figure, Provenance, record_hash
from tuner.export.reference import Level, Reference
from tuner.judge.intervals import block_variance
from tuner.judge.recommend import percent
from tuner.judge.text import settings_line, verdict_phrase
from tuner.records import Block, LaunchRecord, Recommendation
from tuner.study.data import Slot, StoredLaunch, StudyData
from tuner.study.decide import level_verdicts, pareto_set, recommendation
from tuner.study.quality import ANSWERS


@dataclass(frozen=True)
class Deployable:
    """A launch record to deploy, where it comes from, what to tell the user about it (`note`, or ""), and what a server
    of it is held against."""

    record: LaunchRecord
    provenance: Provenance
    note: str
    reference: Reference


def choose(data: StudyData, candidate_id: str | None = None, *, pair_sd: float | None = None) -> Deployable:
    """The overall winner's launch; without a winner the baseline's; or that of the candidate that is named.

    A candidate may have been launched many times. Its last launch that ended well counts, one of the confirmation
    before one of the search. `pair_sd` is that of a calibration of the machine, where there is one.

    Raises:
        UsageError: the study has no such candidate, or its objective leaves the choice to the user.
        TunerError: the candidate was never launched to a good end.
    """
    found = recommendation(data)
    winner = found.overall.winner
    note = ""
    if candidate_id is None:
        _refuse_many(data)
    if candidate_id is not None:
        wanted = _named(data, candidate_id)
        decision = _said_of(found, wanted)
        if winner is None or wanted != winner.id:
            note = f"Candidate {wanted} is not what the study recommends ({decision})."
    elif winner is not None:
        wanted, decision = winner.id, _said_of(found, winner.id)
    else:
        wanted = data.baseline.id
        decision = f"no winner: keep the baseline, because {found.overall.why}"
        note = f"No winner: keep the baseline. This is the baseline, as it was measured. ({found.overall.why})"
    if data.state != "done":
        note = f"{note} The study is not done ({data.state}); this is what its records say so far.".strip()
    launch = _last_good(data, wanted)
    if launch is None or launch.record is None:
        raise TunerError(
            f"candidate {wanted} has no launch that ended well, so nothing that was measured could be deployed. "
            f"Nothing was written; `tuner report {data.name}` says what failed, or that it was measured on another's "
            "server."
        )
    provenance = Provenance(
        study=data.name,
        launch=launch.id,
        candidate=wanted,
        decision=decision,
        record_hash=record_hash(launch.record),
        engine=launch.record.engine,
        engine_version=launch.record.engine_version,
        measured_at=datetime.fromtimestamp(launch.started_at, UTC).isoformat(timespec="seconds"),
        machine=dict(data.fingerprint.get("hardware", {})),
        figures=_figures(data, wanted, launch.place),
    )
    if len(there := _places(data, wanted)) > 1:
        note = f"{note} It was measured at {', '.join(there)}; the figures are those of {launch.place}.".strip()
    return Deployable(launch.record, provenance, note, _reference(data, wanted, pair_sd, launch.place))


def _refuse_many(data: StudyData) -> None:
    """Raises where a study was asked for a choice: which of a Pareto set is wanted, only its owner can say."""
    if data.space.objective.maximize != "pareto" or len(found := pareto_set(data)) < 2:
        return
    listed = "\n".join(f"  - {one}: {_at_levels(data, one)}" for one in found)
    raise UsageError(
        f"the objective of study {data.name} is pareto, and {len(found)} candidates are in the set:\n{listed}\n"
        "Nothing was written; say which one is wanted: --candidate ID"
    )


def _at_levels(data: StudyData, candidate_id: str) -> str:
    if candidate_id == data.baseline.id:
        return "the baseline"
    verdicts = level_verdicts(data).get(candidate_id, {})
    told = ", ".join(f"{percent(found.speedup)} at {level}" for level, found in verdicts.items())
    return f"{settings_line(data.settings_of(candidate_id))} ({told})"


def _places(data: StudyData, candidate_id: str) -> list[str]:
    at = {launch.id: launch.place for launch in data.launches}
    return sorted({at[b.launch_id] for b in data.blocks.values() if b.candidate_id == candidate_id and b.block.valid})


def reference_of(data: StudyData, candidate: str, pair_sd: float | None, place: str = "") -> Reference:
    """What a server of a candidate (its id, or 'baseline') is held against: its blocks, also those on another's server.

    Where several places have measured it, those of `place` alone count, if there are any.

    Raises:
        UsageError: the study has no such candidate.
        TunerError: it was never measured.
    """
    found = _reference(data, _named(data, candidate), pair_sd, place)
    if not found.levels:
        raise TunerError(f"candidate {candidate} was never measured; `tuner report {data.name}` says what failed.")
    return found


def _reference(data: StudyData, candidate_id: str, pair_sd: float | None, place: str) -> Reference:
    stored = data.quality.get((candidate_id, ANSWERS))
    levels = [
        Level(
            level,
            tuple(block.tokens_per_s for block in blocks),
            tuple(math.sqrt(block_variance(block.series)) for block in blocks),
            role,
        )
        for level in data.levels
        for role, blocks in [_measured(data, candidate_id, level, place)]
        if blocks
    ]
    return Reference(data.space.to_dict(), tuple(levels), stored, pair_sd, dict(data.fingerprint))


def _measured(data: StudyData, candidate_id: str, level: int, place: str) -> tuple[str, list[Block]]:
    """The confirmation's valid blocks at a place, or the search's at a level without any; else those of all places."""
    for where in (place, None):
        for role in ("confirm", "screen", "look"):
            if blocks := _blocks(data, candidate_id, level, role, where):
                return role, blocks
    return "", []


def _named(data: StudyData, candidate_id: str) -> str:
    if candidate_id == "baseline":
        return data.baseline.id
    if candidate_id in data.candidates:
        return candidate_id
    close = difflib.get_close_matches(candidate_id, data.candidates, n=1)
    meant = f"; did you mean '{close[0]}'?" if close else "."
    raise UsageError(
        f"study {data.name} has no candidate '{candidate_id}'{meant} `tuner report {data.name}` lists them. "
        f"Nothing was written."
    )


def _said_of(found: Recommendation, candidate_id: str) -> str:
    overall = found.overall
    if overall.winner is not None and overall.winner.id == candidate_id and overall.verdict is not None:
        return f"winner overall: {verdict_phrase(overall.verdict)}, because {overall.why}"
    levels = [
        f"winner at concurrency {choice.concurrency}: {verdict_phrase(choice.verdict)}"
        for choice in found.per_concurrency
        if choice.winner is not None and choice.winner.id == candidate_id and choice.verdict is not None
    ]
    return "; ".join(levels) or "exported by name, not a winner"


def _last_good(data: StudyData, candidate_id: str) -> StoredLaunch | None:
    good = [
        launch
        for launch in data.launches
        if launch.slot.candidate_id == candidate_id and launch.state == "done" and launch.record is not None
    ]
    return max(good, key=lambda launch: (launch.slot.role == "confirm", launch.id), default=None)


def _figures(data: StudyData, candidate_id: str, place: str) -> tuple[Figure, ...]:
    """Means over the confirmation's valid blocks at a place, or over the search's at a level without any."""
    found = []
    for level in data.levels:
        role, blocks = _measured(data, candidate_id, level, place)
        if blocks:
            rates = [block.tokens_per_s for block in blocks]
            there = _blocks(data, data.baseline.id, level, role, place) or _blocks(data, data.baseline.id, level, role)
            base = [block.tokens_per_s for block in there]
            found.append(Figure(level, fmean(rates), fmean(base) if base else None, len(rates), role))
    return tuple(found)


def _blocks(data: StudyData, candidate_id: str, level: int, role: str, place: str | None = None) -> list[Block]:
    """The valid blocks of a candidate; with a place, those that were measured there."""
    slots = [slot for slot in data.by_slot if slot.candidate_id == candidate_id and slot.role == role]
    blocks = [data.block(Slot(slot.candidate_id, slot.role, slot.repetition), level) for slot in slots]
    at = {launch.id: launch.place for launch in data.launches}
    return [b.block for b in blocks if b is not None and place in (None, at.get(b.launch_id))]
