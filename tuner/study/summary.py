"""Where a study stands, in figures: a pure function of its records (`glance.py` reads the same from the database)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.records import Candidate
from tuner.study.ahead import SCOPE, Pace, Scope, SoFar, ahead, scope_of
from tuner.study.data import BUDGET, CONFIRMATION, StoredTrial, StudyData
from tuner.study.looks import looks_saved
from tuner.study.policy import policy_of


@dataclass(frozen=True)
class Incumbent:
    """The best candidate of the search so far, with its score as it was told.

    It is chosen for its luck: only a confirmation counts.
    """

    candidate: Candidate
    value: float


@dataclass(frozen=True)
class Summary:
    """Counts and times of a study.

    `left_s` is None while it is not known how long a launch takes; `looks` says what racing has saved.
    """

    trials: Mapping[str, int]
    failures: Mapping[str, int]
    launches_used: int
    interrupted: int
    blocks: int
    invalid_blocks: int
    incumbent: Incumbent | None
    elapsed_s: float
    left_s: float | None
    looks: str = ""


def summary(data: StudyData, *, working: bool = True) -> Summary:
    """Where the study stands. `working`: a tuner is at it; without one, what it had begun is `unfinished`."""
    from tuner.study.planner import launches_used

    failures = Counter(launch.failure.kind for launch in data.launches if launch.failure is not None)
    return Summary(
        trials=trial_counts(data.trials, working=working),
        failures=dict(failures),
        launches_used=launches_used(data),
        interrupted=sum(launch.state == "interrupted" for launch in data.launches),
        blocks=sum(stored.block.valid for stored in data.blocks.values()),
        invalid_blocks=sum(not stored.block.valid for stored in data.blocks.values()),
        incumbent=incumbent(data),
        elapsed_s=data.elapsed_s,
        left_s=time_left_s(data),
        looks=looks_saved(data).sentence,
    )


def trial_counts(trials: Iterable[StoredTrial], *, working: bool) -> dict[str, int]:
    """Trials by kind; those that were launched and have no score are `failed`."""
    kinds: Counter[str] = Counter()
    for trial in trials:
        if trial.running:
            kinds["running" if working else "unfinished"] += 1
        else:
            failed = trial.kind == "measured" and trial.constraints.get("launch", 1.0) > 0
            kinds["failed" if failed else trial.kind] += 1
    return dict(kinds)


def best_of(trials: Iterable[StoredTrial]) -> StoredTrial | None:
    """The feasible trial of the search with the best value; None before there is one."""
    feasible = [trial for trial in trials if trial.kind == "measured" and trial.feasible and trial.value is not None]
    return max(feasible, key=lambda trial: trial.value or 0.0, default=None)


def incumbent(data: StudyData) -> Incumbent | None:
    """The feasible candidate with the best score; None before there is one."""
    best = best_of(data.trials)
    return Incumbent(data.candidates[best.candidate_id], best.value or 0.0) if best else None


def scope(data: StudyData) -> Scope:
    """What there was to try when the study began, as far as it is known."""
    facts = data.facts_of(SCOPE)
    return scope_of(facts[-1] if facts else {})


def settled(trials: Iterable[StoredTrial]) -> int:
    """Candidates that the search need not come back to: tried, equal to one that was, or known not to work."""
    known = [trial for trial in trials if trial.kind != "illegal"]
    baseline = {trial.candidate_id for trial in known if trial.kind == "baseline"}
    return len({trial.candidate_id for trial in known} - baseline)


def time_left_s(data: StudyData) -> float | None:
    """Seconds until the end, at the pace so far; None while it is not known how long a launch takes."""
    from tuner.study.planner import launches_used, search_slot_s, usual_launch_s, whole_slot_s

    each, there = usual_launch_s(data), scope(data)
    if not each or data.state == "done":
        return 0.0 if each else None
    used = launches_used(data)
    confirming = [launch.state for launch in data.launches if launch.slot.role == "confirm"]
    done = SoFar(
        measured=len(data.measured),
        settled=settled(data.trials),
        used=used,
        searched=used - sum(state not in ("interrupted", "imported") for state in confirming),
        confirmed=confirming.count("done"),
        rounds=data.confirmations,
        elapsed_s=data.elapsed_s,
        more=next((e.kind for e in reversed(data.events) if e.kind in (BUDGET, CONFIRMATION)), "") == BUDGET,
    )
    pace = Pace(each)
    if there.groups is not None or any(stored.role == "look" for stored in data.blocks.values()):
        slot_s = whole_slot_s(data)
        pace = Pace(max(0.0, each - slot_s), slot_s, search_slot_s(data))
    return ahead(data.budget, policy_of(data), data.space.profile, len(data.levels), there, pace, done).seconds
