"""From crashes that were seen to candidates that need not be tried: a pure function of settings.

A region is one or two conditions on settings ("topk >= 4", "backend = x"). It is ruled out where enough candidates
crashed in it and none worked: two for one condition, three for two, since with two a region is soon found that fits by
chance; and each condition must matter, so that something works where it alone is not met. One failure rules nothing out
but its own candidate, and one candidate that works opens a region again. When nothing else is left, candidates of ruled
out regions are tried all the same, those with the least against them first, while crashes are few (`most_crashes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.records import Setting
from tuner.study.crashes import CRASHES
from tuner.study.data import Slot, StudyData

NEED_ONE, NEED_TWO = 2, 3
"""Crashes that rule out a region of one condition, and of two."""


LEAST_CRASHES, CRASH_SHARE = 3, 8
"""Crashes that a search may pay for before ruled out regions are closed for good: so many, or one launch in so many."""


def most_crashes(launches: int) -> int:
    """Crashes up to which ruled out candidates are still tried when no others are left."""
    return max(LEAST_CRASHES, launches // CRASH_SHARE)


@dataclass(frozen=True)
class CrashesSeen:
    """Settings of candidates that crashed, here or in other studies (`elsewhere`), and of those that worked."""

    crashed: tuple[Mapping[str, Setting], ...]
    worked: tuple[Mapping[str, Setting], ...]
    elsewhere: tuple[Mapping[str, Setting], ...] = ()

    def region(self, settings: Mapping[str, Setting]) -> Region | None:
        """The region that rules a candidate out."""
        return crash_region(settings, (*self.crashed, *self.elsewhere), self.worked)


def crashes_seen(data: StudyData, elsewhere: Sequence[Mapping[str, Setting]] = ()) -> CrashesSeen:
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
            crashed.append(settings)
    return CrashesSeen(tuple(crashed), tuple(worked), tuple(elsewhere))


@dataclass(frozen=True)
class Condition:
    """`name` is at least, at most or equal to `value`; where the setting is not active it does not hold."""

    name: str
    sign: str
    value: Setting

    def holds(self, settings: Mapping[str, Setting]) -> bool:
        """Of a candidate's settings."""
        if self.name not in settings:
            return False
        has: Any = settings[self.name]
        if self.sign == "=":
            return type(has) is type(self.value) and has == self.value
        if not _is_number(has):
            return False
        return bool(has >= self.value if self.sign == ">=" else has <= self.value)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value}"


@dataclass(frozen=True)
class Region:
    """Where `crashes` candidates crashed and none worked."""

    conditions: tuple[Condition, ...]
    crashes: int

    def __str__(self) -> str:
        named = " and ".join(map(str, self.conditions))
        return f"{self.crashes} of {self.crashes} candidates with {named} crashed"


def crash_region(
    settings: Mapping[str, Setting], crashed: Sequence[Mapping[str, Setting]], worked: Sequence[Mapping[str, Setting]]
) -> Region | None:
    """The region that rules a candidate out, the one with the most crashes; None where none does."""
    if len(crashed) < NEED_ONE:
        return None
    conditions = _conditions(settings, crashed)
    if not conditions:
        return None
    bad = np.array([[condition.holds(each) for each in crashed] for condition in conditions], dtype=np.int32)
    good = np.array([[condition.holds(each) for each in worked] for condition in conditions], dtype=np.int32)
    good = good.reshape(len(conditions), len(worked))
    crashes, works = bad @ bad.T, good @ good.T
    needed = np.full_like(crashes, NEED_TWO)
    np.fill_diagonal(needed, NEED_ONE)
    alone = np.diag(works)
    matters = (alone[:, None] > 0) & (alone[None, :] > 0)
    np.fill_diagonal(matters, len(worked) >= NEED_ONE)
    ruled_out = (works == 0) & matters & (crashes >= needed)
    # With equal evidence the simpler region explains more.
    weight = np.where(ruled_out, 2 * crashes + np.eye(len(conditions), dtype=np.int32), 0)
    best = int(weight.argmax())
    first, second = divmod(best, len(conditions))
    if not weight[first, second]:
        return None
    chosen = (conditions[first],) if first == second else (conditions[first], conditions[second])
    return Region(chosen, int(crashes[first, second]))


def _conditions(settings: Mapping[str, Setting], crashed: Sequence[Mapping[str, Setting]]) -> list[Condition]:
    """Every condition that holds for the settings, with bounds that crashes have set."""
    found = []
    for name, value in settings.items():
        if not any(name in each for each in crashed):
            continue
        if not _is_number(value):
            found.append(Condition(name, "=", value))
            continue
        bounds = {each[name] for each in crashed if name in each and _is_number(each[name])}
        found += [Condition(name, ">=", b) for b in sorted(b for b in bounds if b <= value)]  # type: ignore[operator]
        found += [Condition(name, "<=", b) for b in sorted(b for b in bounds if b >= value)]  # type: ignore[operator]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
