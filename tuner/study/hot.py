"""Which slots a running server can serve, and which launch a study should stay on. Pure functions of its records.

A hot setting is changed on a running server; a cold one needs a launch. A launch serves every slot whose candidate
differs from it in hot settings alone, so that launches are paid for once for each combination of cold ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.records import Candidate, Setting
from tuner.space import Space
from tuner.space.space import SPECULATIVE
from tuner.study.ahead import Scope
from tuner.study.data import Slot, StoredLaunch, StudyData
from tuner.study.policy import HOT_BASELINE_EVERY, LEAST_ROW, MOST_ROW
from tuner.study.wear import worn

LOST_CAUSE = 3
"""Changes in a row that failed on running servers, or servers in a row that changes have worn, after which the study
does without them."""


def reachable(hot: Iterable[str], launched: Mapping[str, Setting], wanted: Mapping[str, Setting]) -> bool:
    """Whether a server launched with these settings can be put to the wanted ones.

    Settings that only say how to speculate do not matter where the wanted ones do not speculate.
    """
    names = launched.keys() | wanted.keys()
    idle = SPECULATIVE if wanted.get("speculation") == "none" else frozenset()
    return all(launched.get(name) == wanted.get(name) for name in names - set(hot) - idle)


def cold_part(hot: Iterable[str], settings: Mapping[str, Setting]) -> tuple[tuple[str, Setting], ...]:
    """What of a candidate's settings needs a launch."""
    idle = SPECULATIVE if settings.get("speculation") == "none" else frozenset()
    return tuple(sorted((name, value) for name, value in settings.items() if name not in set(hot) | idle))


def scope_to_try(candidates: Iterable[Candidate], hot: frozenset[str], baseline: Candidate) -> Scope:
    """What there is to try of these candidates, where `hot` settings can be changed on a running server."""
    several = [*candidates]
    if not hot:
        return Scope(len(several))
    parts = {cold_part(hot, one.settings): one for one in several}
    away = sum(not reachable(hot, baseline.settings, one.settings) for one in parts.values())
    return Scope(len(several), len(parts), away)


@dataclass(frozen=True)
class Running:
    """The server that is up, in the eyes of the planner: `launch`, with what is `hot` on it."""

    launch: StoredLaunch
    hot: frozenset[str]

    def serves(self, data: StudyData, slot: Slot) -> bool:
        """Whether it may measure a slot of the search: its own, or one that is in reach and has not failed so."""
        if not (slot.searches and self.launch.slot.searches) or self.launch.failure is not None:
            return False
        if slot == self.launch.slot and not self.changed(data):
            return True
        if any(each.failure and not each.forgiven for each in data.changed_to.get(slot, ())):
            return False
        if given_up(data) or worn(data, self.launch.id):
            return False
        launched = data.settings_of(self.launch.slot.candidate_id)
        return reachable(self.hot, launched, data.settings_of(slot.candidate_id))

    def changed(self, data: StudyData) -> bool:
        """Whether it was ever put to other settings than it was launched with."""
        return any(each.launch_id == self.launch.id for each in data.reconfigurations)

    def candidates(self, data: StudyData) -> list[str]:
        """The candidates that were measured on it, in order, the baseline's turns among them."""
        seen: list[str] = []
        for stored in data.on_launch.get(self.launch.id, ()):
            if stored.role == "edge":
                continue
            if not seen or seen[-1] != stored.candidate_id:
                seen.append(stored.candidate_id)
        return seen


def given_up(data: StudyData) -> bool:
    """Whether changes on running servers keep failing, so that every slot gets a launch of its own."""
    counted = [each for each in data.reconfigurations if not each.forgiven and each.state != "asked"]
    last = counted[-LOST_CAUSE:]
    if len(last) == LOST_CAUSE and all(each.state == "failed" for each in last):
        return True
    servers = list(dict.fromkeys(each.launch_id for each in reversed(counted)))[:LOST_CAUSE]
    return len(servers) == LOST_CAUSE and all(worn(data, launch) for launch in servers)


def baseline_slot(data: StudyData, running: Running) -> Slot | None:
    """The screening of the baseline that is due on a running server before its next candidate; None when none is.

    One is due at first and again after every so many candidates, or after each once changes have worn a server. A
    screening that has begun on this server is finished on it; otherwise it has a number of its own.
    """
    baseline, fresh = data.baseline.id, fresh_baseline(data)
    mine = _baselines_on(data, running.launch)
    seen = running.candidates(data)
    since = list(reversed(seen)).index(baseline) if baseline in seen else 0
    whole = not mine or all(data.block(mine[-1], level) is not None for level in data.levels)
    changed = {each.launch_id for each in data.reconfigurations}
    every = 1 if any(worn(data, launch) for launch in changed) else HOT_BASELINE_EVERY[data.space.profile]
    stale = since >= every
    if not mine or stale or (whole and not has_baseline(data, running.launch)):
        return fresh if running.serves(data, fresh) else None
    return mine[-1]


def fresh_baseline(data: StudyData) -> Slot:
    """A screening of the baseline that has not begun."""
    begun = [slot for slot in (*data.launched_for, *data.changed_to) if slot.candidate_id == data.baseline.id]
    repetitions = [slot.repetition for slot in begun if slot.role == "screen"]
    return Slot(data.baseline.id, "screen", max(repetitions, default=-1) + 1)


def has_baseline(data: StudyData, launch: StoredLaunch) -> bool:
    """Whether the baseline was measured on a launch, at every level."""
    mine = [b for b in data.on_launch.get(launch.id, ()) if b.candidate_id == data.baseline.id and b.block.valid]
    return {b.concurrency for b in mine if b.role == "screen"} == set(data.levels)


def _baselines_on(data: StudyData, launch: StoredLaunch) -> list[Slot]:
    changed = [each.slot for each in data.reconfigurations if each.launch_id == launch.id]
    return [s for s in (launch.slot, *changed) if s.candidate_id == data.baseline.id and s.role == "screen"]


def group(data: StudyData, place: str = "") -> StoredLaunch | None:
    """The launch in whose reach the search of a place is: its last one, whether its server is still up or not.

    So what is proposed next does not hang on whether the tuner was killed in between.
    """
    return next((launch for launch in reversed(data.at(place)) if launch.slot.searches), None)


def served(data: StudyData, hot: Iterable[str], launch: StoredLaunch) -> int:
    """Candidates of the search in a row, the last ones, that are in the reach of a launch."""
    launched, count = data.settings_of(launch.slot.candidate_id), 0
    for trial in reversed(data.measured):
        if trial.place != launch.place:
            continue
        if not reachable(hot, launched, data.settings_of(trial.candidate_id)):
            break
        count += 1
    return count


def row(data: StudyData) -> int:
    """Candidates in a row that a launch should serve, so that its start takes no more time than they do."""
    starts, each = start_s(data), candidate_s(data)
    if not starts or not each:
        return LEAST_ROW
    return min(max(round(starts / each), LEAST_ROW), MOST_ROW)


def start_s(data: StudyData) -> float:
    """Seconds of the first start that went well, to a half power of two; 0 before one has.

    What is tried next hangs on it, and must not hang on how often the tuner was killed since, nor on a second.
    """
    starts = (launch.ready_at - launch.started_at for launch in data.launches if launch.ready_at is not None)
    first = next((seconds for seconds in starts if seconds > 0), 0.0)
    return 2.0 ** (round(2 * math.log2(first)) / 2) if first else 0.0


def candidate_s(data: StudyData) -> float:
    """Seconds that the blocks of a candidate of the search take, in the mean; 0 before one was measured."""
    slots, spent = set(), []
    for stored in data.blocks.values():
        if stored.role != "confirm":
            slots.add((stored.candidate_id, stored.repetition, stored.concurrency))
            spent.append(stored.block.warmup_s + stored.block.window_s)
    seconds = math.fsum(spent)
    return len(data.levels) * seconds / len(slots) if slots else 0.0


def cold_values(space: Space, hot: Iterable[str], candidate: Candidate) -> dict[str, Setting] | None:
    """The values of the cold parameters that a candidate has, for proposals that it shares a launch with.

    None where the space does not offer one of its values: then no proposal shares its launch.
    """
    found = {}
    for parameter in space.parameters:
        if parameter.name in hot or parameter.name not in candidate.settings:
            continue
        value = candidate.settings[parameter.name]
        if parameter.offered(value) != value:
            return None
        found[parameter.name] = value
    return found


@dataclass(frozen=True)
class Saving:
    """What changes on running servers have saved: launches, and seconds of starting servers."""

    candidates: int
    launches: int
    saved_s: float

    @property
    def sentence(self) -> str:
        """For a person; "" where nothing was saved."""
        if not self.candidates:
            return ""
        return (
            f"{self.candidates} candidates were measured on a running server, by changing its hot settings. "
            f"Launches saved: {self.candidates}, about {self.saved_s / 60:.1f} minutes; {self.launches} were made."
        )


def _begun(data: StudyData, slot: Slot) -> bool:
    return bool(data.by_slot.get(slot) or data.by_slot.get(slot.look))


def saving(data: StudyData) -> Saving:
    """The candidates of the search that needed no launch of their own, and the starts that they would have taken."""
    changed = {each.slot for each in data.reconfigurations if each.state == "in_effect"}
    mine = {slot for slot in changed if slot.candidate_id != data.baseline.id and slot.repetition == 0}
    served = {slot for slot in mine if not data.launched_for.get(slot) and _begun(data, slot)}
    starts = [launch.ready_at - launch.started_at for launch in data.launches if launch.ready_at is not None]
    each = sum(starts) / len(starts) if starts else 0.0
    return Saving(len(served), sum(launch.state != "interrupted" for launch in data.launches), len(served) * each)
