"""Where a study stands, in figures: a pure function of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.records import Candidate
from tuner.study.data import StudyData
from tuner.study.planner import launches_used, mean_launch_s, planned_pairs, policy_of
from tuner.study.race import looks_saved
from tuner.study.score import Score, score


@dataclass(frozen=True)
class Incumbent:
    """The best candidate of the search so far. Its figure is chosen for its luck: only a confirmation counts."""

    candidate: Candidate
    score: Score


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
    kinds = Counter(
        "failed" if trial.kind == "measured" and _failed(data, trial.candidate_id, trial.running) else trial.kind
        for trial in data.trials
        if not trial.running
    )
    kinds["running" if working else "unfinished"] = sum(trial.running for trial in data.trials)
    failures = Counter(launch.failure.kind for launch in data.launches if launch.failure is not None)
    return Summary(
        trials={kind: count for kind, count in kinds.items() if count},
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


def _failed(data: StudyData, candidate_id: str, running: bool) -> bool:
    return not running and score(data, candidate_id).constraints["launch"] > 0


def incumbent(data: StudyData) -> Incumbent | None:
    """The feasible candidate with the best score; None before there is one."""
    feasible = [trial for trial in data.measured if trial.feasible and trial.value is not None]
    best = max(feasible, key=lambda trial: trial.value or 0.0, default=None)
    return Incumbent(data.candidates[best.candidate_id], score(data, best.candidate_id)) if best else None


def launches_left(data: StudyData) -> int:
    """Launches that are still planned, at most."""
    if data.state == "done":
        return 0
    pairs = planned_pairs(data.budget.launches, policy_of(data))
    confirming = sum(launch.slot.role == "confirm" and launch.state == "done" for launch in data.launches)
    if data.confirmations:
        return max(0, sum(c.pairs * (1 + len(c.finalists)) for c in data.confirmations) - confirming)
    search = data.budget.launches - 2 * pairs - launches_used(data)
    return max(0, min(search, data.budget.candidates - len(data.measured))) + 2 * pairs


def time_left_s(data: StudyData) -> float | None:
    """Seconds until the end, at the pace so far; None while no launch has ended."""
    each = mean_launch_s(data)
    return launches_left(data) * each if each else None
