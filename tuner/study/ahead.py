"""What a study has still to do, and how long that takes: one that has not begun (`plan.py`), or one under way
(`summary.py`, `glance.py`). Pure functions of figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.study.data import Budget, Confirmation
from tuner.study.policy import (
    BASELINE_EVERY,
    HOT_BASELINE_EVERY,
    LEAST_ROW,
    MOST_ROW,
    Policy,
    pairs_within,
    planned_pairs,
)

SCOPE = "candidates"
"""The event whose facts are what there is to try (`Scope.facts`), kept when a study begins."""


@dataclass(frozen=True)
class Scope:
    """What there is to try beside the baseline: so many `candidates`, None where they cannot be listed.

    `groups` are the combinations of what needs a launch where other settings are hot; None where none is. The server of
    the baseline cannot be changed to `away` of them, nor theirs to the baseline (None: unknown, of an earlier version).
    """

    candidates: int | None = None
    groups: int | None = None
    away: int | None = None

    @property
    def sentence(self) -> str:
        """For a person."""
        hot = "" if self.groups is None else f", in the reach of {self.groups} launches"
        return f"{self.candidates} candidates to try beside the baseline{hot}"

    @property
    def facts(self) -> dict[str, int | None]:
        """For `scope_of`."""
        return {"candidates": self.candidates, "groups": self.groups, "away": self.away}


def scope_of(facts: Mapping[str, Any]) -> Scope:
    """What such facts say; where there are none, nothing is known."""
    return Scope(facts.get("candidates"), facts.get("groups"), facts.get("away"))


@dataclass(frozen=True)
class Pace:
    """Seconds of a server's start, of a whole slot on it, and of the slot of a candidate in the search.

    Where every launch serves one whole slot, the start may stand for all of it.
    """

    start_s: float
    slot_s: float = 0.0
    candidate_s: float = 0.0

    @property
    def launch_s(self) -> float:
        """Of a launch that serves one whole slot."""
        return self.start_s + self.slot_s


@dataclass(frozen=True)
class SoFar:
    """What a study has done.

    Candidates that were measured, and those of its scope that are settled (known and ruled out ones among them);
    launches that count, those of the search among them, and the confirmation's that went well; its rounds; seconds with
    a server. `more`: a larger budget was given since the last round began, so that a search may follow it.
    """

    measured: int = 0
    settled: int = 0
    used: int = 0
    searched: int = 0
    confirmed: int = 0
    rounds: tuple[Confirmation, ...] = ()
    elapsed_s: float = 0.0
    more: bool = False


@dataclass(frozen=True)
class Ahead:
    """What is left: candidates, launches of the search, pairs and launches of the confirmation, and seconds of all.

    `cut`: the hours end the search before all of them.
    """

    candidates: int
    search: int
    pairs: int
    confirmation: int
    seconds: float
    cut: bool = False


def ahead(
    budget: Budget,
    policy: Policy,
    profile: str,
    levels: int,
    scope: Scope,
    pace: Pace,
    done: SoFar = SoFar(),
) -> Ahead:
    """What is left of a study of `levels` levels, where nothing but budget and candidates ends its search."""
    left_s = 3600 * budget.hours - done.elapsed_s if budget.hours is not None else math.inf
    launch_s = max(pace.launch_s, 1e-9)
    under_way = sum(one.pairs * (1 + len(one.finalists)) for one in done.rounds) - done.confirmed
    if under_way > 0:
        round_s = max(0.0, min(under_way * launch_s, left_s))
        whole = replace(
            done,
            used=done.used + under_way,
            confirmed=done.confirmed + under_way,
            elapsed_s=done.elapsed_s + round_s,
        )
        behind = ahead(budget, policy, profile, levels, scope, pace, whole) if done.more else None
        if behind is None or not behind.candidates:
            return Ahead(0, 0, 0, under_way, round_s)
        return replace(behind, confirmation=under_way + behind.confirmation, seconds=round_s + behind.seconds)
    planned = planned_pairs(budget.launches, policy)
    wanted = budget.candidates - done.measured
    if scope.candidates is not None:
        wanted = min(wanted, scope.candidates - done.settled)
    wanted = max(0, wanted)
    search = most = _search(budget.launches - 2 * planned, profile, scope, pace, done, wanted)
    while wanted:
        works = done.measured > 0 or wanted > 1  # by then there is something to confirm, and time for it is kept
        if search.seconds + (2 * planned * launch_s if works else 0.0) <= left_s:
            break
        wanted -= 1
        search = _search(budget.launches - 2 * planned, profile, scope, pace, done, wanted)
    pairs = planned if math.isinf(left_s) else pairs_within(planned, int((left_s - search.seconds) // launch_s) + 1)
    pairs = pairs if done.measured + search.candidates else 0
    finalists = 0
    if pairs:
        sides = (budget.launches - done.used - search.launches) // pairs
        if not math.isinf(left_s):
            sides = min(sides, int((left_s - search.seconds) // (pairs * launch_s)))
        places = 1 if levels == 1 else 1 + levels  # the best overall, and at each level
        finalists = min(max(1, sides - 1), policy.max_finalists, places, done.measured + search.candidates)
    confirmation = pairs * (1 + finalists)
    seconds = max(0.0, min(search.seconds + confirmation * launch_s, left_s))
    cut = search.candidates < most.candidates
    return Ahead(search.candidates, search.launches, pairs, confirmation, seconds, cut)


@dataclass(frozen=True)
class _Search:
    candidates: int
    launches: int
    seconds: float


def _search(launches: int, profile: str, scope: Scope, pace: Pace, done: SoFar, wanted: int) -> _Search:
    """The search for so many `wanted` candidates more, in so many `launches` altogether."""
    first = int(not done.used)  # the baseline's own launch
    room = max(0, launches - done.used - first)
    if scope.groups is None:
        every = BASELINE_EVERY[profile]
        starts = min(room, wanted + (wanted // every if every else 0))
        candidates = starts - (starts // (every + 1) if every else 0)
        turns = starts - candidates
    else:
        row = min(max(round(pace.start_s / max(pace.slot_s, 1e-9)), LEAST_ROW), MOST_ROW)
        whole = done.measured + wanted
        away = scope.groups - 1 if scope.away is None else scope.away
        asked = max(min(away, whole), math.ceil(whole / row) if scope.groups > 1 else 0)
        # What cannot be put to the baseline is compared with a launch of the baseline's own, made now and then.
        every, apart = BASELINE_EVERY[profile], wanted * away // max(scope.groups, 1)
        own = apart // every if every else 0
        starts = min(room, max(0, asked - max(0, done.searched - 1)) + own) if wanted else 0
        candidates = wanted
        turns = own + (wanted - apart) // HOT_BASELINE_EVERY[profile]
    seconds = (first + starts) * pace.start_s + (first + turns) * pace.slot_s + candidates * pace.candidate_s
    return _Search(candidates, first + starts, seconds)
