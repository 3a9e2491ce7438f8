"""A path that this machine may not have is tried by itself before anything is searched on it.

Whether an all-reduce path works is not known before a server has come up with it, and each candidate on one that does
not would cost a launch. So the first candidate with another value than the baseline's is the one that differs from the
baseline by as little else as can be: the canary. It is measured like any other. Where it fails, no candidate with that
value is launched, unless another worker has seen one work. Spaces that cannot be listed have no canaries.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.records import Candidate, Setting
from tuner.space import Listed
from tuner.study.data import Slot, StoredTrial, StudyData

PROVEN_FIRST = ("allreduce",)
"""Settings whose values are proven one by one."""


def next_canary(data: StudyData, universe: Mapping[str, Listed]) -> Listed | None:
    """The canary of the first value that no trial has had yet; None where every value has had one."""
    tried = {trial.candidate_id for trial in data.trials}
    for name in PROVEN_FIRST:
        known = {_value(data, data.candidates[c], name) for c in (*tried, data.baseline.id)}
        with_new: dict[Setting, list[Listed]] = {}
        for i, each in universe.items():
            value = _value(data, each.candidate, name)
            if value is not None and value not in known and i not in tried:
                with_new.setdefault(value, []).append(each)
        for candidates in with_new.values():
            return min(candidates, key=lambda one: _apart(one.candidate.settings, data.baseline.settings))
    return None


def refuted(data: StudyData) -> dict[tuple[str, Setting], str]:
    """Values that failed in their canary, each with that in a sentence."""
    found: dict[tuple[str, Setting], str] = {}
    works = {(name, _value(data, data.baseline, name)) for name in PROVEN_FIRST}
    first: dict[tuple[str, Setting], StoredTrial] = {}
    for trial in data.trials:
        for name in PROVEN_FIRST:
            value = _value(data, data.candidates[trial.candidate_id], name)
            if value is None or trial.running or trial.kind in ("illegal", "duplicate", "out_of_launches"):
                continue
            first.setdefault((name, value), trial)
            if trial.constraints.get("launch", 1.0) <= 0:
                works.add((name, value))
    for (name, value), trial in first.items():
        if (name, value) not in works and (why := _fault(data, trial)):
            found[name, value] = f"{name}={value} was tried by itself in trial {trial.number} and failed ({why})"
    return found


def ruled_out(data: StudyData, candidate: Candidate, values: Mapping[tuple[str, Setting], str]) -> str | None:
    """Why a candidate is not launched, where one of its values is among the refuted."""
    return next((why for (name, value), why in values.items() if _value(data, candidate, name) == value), None)


def _fault(data: StudyData, trial: StoredTrial) -> str:
    """The candidate's own failure that ended a trial; "" where it was the machine's, or none."""
    if trial.kind == "known_crash":
        return trial.why
    launches = data.launched_for.get(Slot(trial.candidate_id, "screen", 0), ())
    failures = [launch.failure for launch in launches if launch.failure is not None and not launch.forgiven]
    return failures[-1].kind if failures and failures[-1].blame == "candidate" else ""


def _value(data: StudyData, candidate: Candidate, name: str) -> Setting | None:
    return candidate.settings.get(name, data.space.args.get(name))


def _apart(one: Mapping[str, Setting], other: Mapping[str, Setting]) -> int:
    """In how many settings two candidates differ."""
    return len({*one.items()} ^ {*other.items()})
