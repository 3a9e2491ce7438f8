"""Where a study stands, in figures: a pure function of its records (`glance.py` reads the same from the database)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.records import Candidate
from tuner.study.data import Budget, Confirmation, StoredTrial, StudyData, StudyState
from tuner.study.looks import looks_saved
from tuner.study.policy import planned_pairs, policy_of


@dataclass(frozen=True)
class Incumbent:
    """The best candidate of the search so far, with its score as it was told.

    It is chosen for its luck: only a confirmation counts.
    """

    candidate: Candidate
    value: float


@dataclass(frozen=True)
class Summary:
    """Counts and times of a study. `left_s` is None while no launch has ended; `looks` says what racing has saved."""

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


def launches_left(data: StudyData) -> int:
    """Launches that are still planned, at most."""
    from tuner.study.planner import launches_used

    return planned_launches(
        data.state,
        data.budget,
        planned_pairs(data.budget.launches, policy_of(data)),
        used=launches_used(data),
        confirmed=sum(launch.slot.role == "confirm" and launch.state == "done" for launch in data.launches),
        measured=len(data.measured),
        confirmations=data.confirmations,
    )


def planned_launches(
    state: StudyState,
    budget: Budget,
    pairs: int,
    *,
    used: int,
    confirmed: int,
    measured: int,
    confirmations: Iterable[Confirmation],
) -> int:
    """Launches that are still planned, at most, after these."""
    if state == "done":
        return 0
    if rounds := list(confirmations):
        return max(0, sum(c.pairs * (1 + len(c.finalists)) for c in rounds) - confirmed)
    return max(0, min(budget.launches - 2 * pairs - used, budget.candidates - measured)) + 2 * pairs


def time_left_s(data: StudyData) -> float | None:
    """Seconds until the end, at the pace so far; None while no launch has ended."""
    from tuner.study.planner import mean_launch_s

    each = mean_launch_s(data)
    return launches_left(data) * each if each else None
