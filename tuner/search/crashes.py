"""Which candidates surely do not work, and which likely do not: learned from those that crashed, and nowhere else.

What crashes is nearly always a conjunction of a few conditions (this backend with that mode, more rows than so many).

A `Region` is ruled out: one or two conditions on settings ("topk >= 4", "backend = x"), with bounds that crashes have
set, where enough candidates crashed and none worked: two for one condition, three for two, since with two a region is
soon found that fits by chance; one more where all of them did so in other studies, which may never have tried what
works. Each condition must matter, so that something works where it alone is not met. One
failure rules nothing out but its own candidate, and one candidate that works opens a region again.

Elsewhere there is a chance (`Crashes.works`). All conjunctions of up to three conditions are held at once; a candidate
that worked rules out every one that it meets. What is left, and meets a failure, shares the blame for it: simple ones
more than complicated ones, those that explain many failures more than those that explain one. In a region that is ruled
out the chance is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.search.shape import shape_at

NEED_ONE, NEED_TWO = 2, 3
"""Crashes that rule out a region of one condition, and of two."""

MOST_SOURCES = 4
"""Crashes that a region names; of more it says how many."""

PRIOR = 0.05
"""The chance that a candidate like none seen does not work."""

SIMPLER = 0.25
"""A condition more makes a conjunction so much less likely."""

EXPLAINS = 3.0
"""Each failure that a conjunction explains makes it so much likelier than one that leaves it to another cause."""

MOST_EXPLAINED = 12
"""Failures beyond which one more makes no difference."""

ALONE = 0.02
"""The weight of the hypothesis that nothing but the very candidate fails."""

MOST_TRIPLES = 26
"""Conditions beyond which conjunctions of three are too many to hold."""

MOST_LIMITS = 12
"""Values of one number that are tried as limits."""

MOST_PAIRS = 120
"""The same of two."""

MOST_TAUGHT = 1500


@dataclass(frozen=True)
class Crash:
    """Settings that crashed, and where that was learned: a trial, or another study (`elsewhere`)."""

    settings: Mapping[str, Any]
    source: str = ""
    elsewhere: bool = False


@dataclass(frozen=True)
class Condition:
    """`name` is at least, at most or equal to `value`; where the setting is not active it does not hold."""

    name: str
    sign: str
    value: Any

    def of(self, has: Any) -> bool:
        """Of a value of the setting; None where it is not active."""
        if has is None:
            return False
        if self.sign == "=":
            return type(has) is type(self.value) and bool(has == self.value)
        return _is_number(has) and bool(has >= self.value if self.sign == ">=" else has <= self.value)

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Of a candidate's settings."""
        return self.of(settings.get(self.name))

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value}"


@dataclass(frozen=True)
class Region:
    """Where `crashes` candidates crashed and none worked; `sources` say where that was learned."""

    conditions: tuple[Condition, ...]
    crashes: int
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = " and ".join(map(str, self.conditions))
        return f"{self.crashes} of {self.crashes} candidates with {named} crashed" + self._learned

    @property
    def _learned(self) -> str:
        if not self.sources:
            return ""
        known = list(dict.fromkeys(self.sources))
        more = f" and {len(known) - MOST_SOURCES} more" if len(known) > MOST_SOURCES else ""
        return f" ({', '.join(known[:MOST_SOURCES])}{more})"


class Regions:
    """All regions that crashes have ruled out.

    Args:
        crashed: what crashed, here or elsewhere.
        worked: settings that worked.
    """

    def __init__(self, crashed: Sequence[Crash], worked: Sequence[Mapping[str, Any]]) -> None:
        conditions = region_conditions([each.settings for each in crashed])
        bad = Columns([each.settings for each in crashed]).truth(conditions)
        self._learn(crashed, conditions, bad, Columns(worked).truth(conditions))

    @classmethod
    def told(
        cls, crashed: Sequence[Crash], conditions: Sequence[Condition], bad: np.ndarray, good: np.ndarray
    ) -> Regions:
        """Those of which it is known already where the conditions hold: crashed × conditions, worked × conditions."""
        found = cls.__new__(cls)
        found._learn(crashed, conditions, bad, good)
        return found

    def _learn(
        self, crashed: Sequence[Crash], conditions: Sequence[Condition], bad: np.ndarray, good: np.ndarray
    ) -> None:
        self.crashed, self.conditions = tuple(crashed), tuple(conditions)
        crashes, works = (bad.T @ bad).astype(int), (good.T @ good).astype(int)
        needed = np.full_like(crashes, NEED_TWO)
        np.fill_diagonal(needed, NEED_ONE)
        own = bad[[not each.elsewhere for each in crashed]]
        needed += (own.T @ own).astype(int) == 0
        alone = np.diag(works)
        matters = (alone[:, None] > 0) & (alone[None, :] > 0)
        np.fill_diagonal(matters, len(good) >= NEED_ONE)
        ruled_out = (works == 0) & matters & (crashes >= needed)
        # With equal evidence the simpler region explains more.
        self.weight = np.where(ruled_out, 2 * crashes + np.eye(len(self.conditions), dtype=int), 0)
        self._bad = bad

    def of(self, settings: Mapping[str, Any]) -> Region | None:
        """The region that rules a candidate out, the one with the most crashes; None where none does."""
        here = np.flatnonzero([condition.holds(settings) for condition in self.conditions])
        weight = self.weight[np.ix_(here, here)]
        if not weight.size or not weight.max():
            return None
        first, second = (int(here[i]) for i in divmod(int(weight.argmax()), len(here)))
        met = np.flatnonzero(self._bad[:, first] * self._bad[:, second])
        chosen = dict.fromkeys((self.conditions[first], self.conditions[second]))
        sources = tuple(source for i in met if (source := self.crashed[i].source))
        return Region(tuple(chosen), len(met), sources)

    def rule_out(self, truth: np.ndarray) -> np.ndarray:
        """Which candidates lie in one; `truth`: candidates × `conditions`, whether each holds."""
        if not self.conditions or not self.weight.any():
            return np.zeros(len(truth), bool)
        return ((truth @ (self.weight > 0).astype(np.float32)) * truth).sum(axis=1) > 0


def crash_region(
    settings: Mapping[str, Any], crashed: Sequence[Mapping[str, Any]], worked: Sequence[Mapping[str, Any]]
) -> Region | None:
    """The region that rules a candidate out; see `Regions`."""
    return Regions([Crash(each) for each in crashed], worked).of(settings)


def region_conditions(crashed: Sequence[Mapping[str, Any]]) -> tuple[Condition, ...]:
    """What regions may be made of; nothing before there are crashes enough."""
    return tuple(_conditions(crashed)) if len(crashed) >= NEED_ONE else ()


def _conditions(crashed: Sequence[Mapping[str, Any]]) -> Iterable[Condition]:
    """Every condition that a crash meets, with bounds that crashes have set."""
    values: dict[str, dict[tuple[type, Any], None]] = {}
    for settings in crashed:
        for name, value in settings.items():
            values.setdefault(name, {})[type(value), value] = None
    for name, several in values.items():
        yield from (Condition(name, "=", value) for _, value in several if not _is_number(value))
        bounds = sorted({value for _, value in several if _is_number(value)})
        yield from (Condition(name, sign, bound) for sign in (">=", "<=") for bound in bounds)


class Columns:
    """The values of candidates' settings by name: the different ones, and which of them each candidate has."""

    def __init__(self, settings: Sequence[Mapping[str, Any]]) -> None:
        self.settings = settings
        self._read: dict[str, tuple[list[Any], np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        """Of all settings that any of them has."""
        return sorted({name for one in self.settings for name in one})

    def of(self, name: str) -> tuple[list[Any], np.ndarray]:
        """Those of a setting; None where it is not active."""
        if name not in self._read:
            self._read[name] = _told_apart([one.get(name) for one in self.settings])
        return self._read[name]

    def truth(self, conditions: Sequence[Condition]) -> np.ndarray:
        """Whether each condition holds (1) or not (0), candidates × conditions."""
        found = np.zeros((len(self.settings), len(conditions)), np.float32)
        for j, condition in enumerate(conditions if self.settings else ()):
            values, which = self.of(condition.name)
            found[:, j] = np.array([condition.of(value) for value in values], np.float32)[which]
        return found


class Crashes:
    """The chance that each candidate works.

    Args:
        settings: all candidates, with what is fixed.
        levels: at which they are measured; a tree that fits one request may not fit a hundred.
    """

    def __init__(self, settings: Sequence[Mapping[str, Any]], levels: Sequence[int]) -> None:
        self.settings = settings
        self._columns = Columns(settings)
        unique: dict[bytes, np.ndarray] = {}
        for values, which in [*map(self._columns.of, self._columns.names), *_most_rows(settings, levels)]:
            for each in _conditions_of(values):
                truth = np.array(each, bool)[which]
                if truth.any() and not truth.all():
                    unique.setdefault(truth.tobytes(), truth)
        self.truth = np.stack(list(unique.values()), axis=1) if unique else np.zeros((len(settings), 0), bool)
        self._lengths, self._meets = self._conjunctions()

    def _conjunctions(self) -> tuple[np.ndarray, np.ndarray]:
        count = self.truth.shape[1]
        singles = list(range(count))
        meets = [self.truth]
        lengths = [np.ones(count, int)]
        pairs = list(itertools.combinations(singles, 2)) if count <= MOST_PAIRS else []
        if pairs:
            first, second = np.array(pairs).T
            meets.append(self.truth[:, first] & self.truth[:, second])
            lengths.append(np.full(len(pairs), 2))
        if count <= MOST_TRIPLES:
            triples = list(itertools.combinations(singles, 3))
            if triples:
                a, b, c = np.array(triples).T
                meets.append(self.truth[:, a] & self.truth[:, b] & self.truth[:, c])
                lengths.append(np.full(len(triples), 3))
        return np.concatenate(lengths), np.concatenate(meets, axis=1)

    def works(self, failed: Sequence[int], worked: Sequence[int], crashed: Sequence[int] = ()) -> np.ndarray:
        """The chance for each candidate, after those of these places failed and worked.

        `crashed` are those of the failed ones that a launch really ended so: only they rule regions out.
        """
        chance = self._chance(failed, worked)
        if len(crashed) >= NEED_ONE:
            conditions = region_conditions([self.settings[i] for i in crashed])
            truth = self._columns.truth(conditions)
            crashes = [Crash(self.settings[i]) for i in crashed]
            regions = Regions.told(crashes, conditions, truth[list(crashed)], truth[list(worked)])
            known = chance[list(worked)]
            chance[regions.rule_out(truth)] = 0.0
            chance[list(worked)] = known
        return chance

    def _chance(self, failed: Sequence[int], worked: Sequence[int]) -> np.ndarray:
        chance = np.full(len(self.truth), 1 - PRIOR) if failed else np.ones(len(self.truth))
        chance[list(worked)] = 1.0
        chance[list(failed)] = 0.0
        failed = list(failed)[-MOST_TAUGHT:]
        if not failed:
            return chance
        alive = ~self._meets[list(worked)].any(axis=0) if len(worked) else np.ones(len(self._lengths), bool)
        taught = self._meets[failed]
        alive &= taught.any(axis=0)
        taught, meets, lengths = taught[:, alive], self._meets[:, alive], self._lengths[alive]
        weight = SIMPLER**lengths * EXPLAINS ** np.minimum(taught.sum(axis=0), MOST_EXPLAINED)
        blamed = taught * weight
        total = blamed.sum(axis=1) + ALONE
        # Alike failures have alike blame: one of each is enough.
        distinct = np.unique(taught, axis=0, return_index=True)[1]
        share = blamed[distinct] / total[distinct][:, None]
        risk = (meets.astype(np.float32) @ share.T.astype(np.float32)).max(axis=1, initial=0.0)
        chance = np.minimum(chance, (1 - PRIOR) * (1 - risk))
        chance[list(worked)] = 1.0
        chance[failed] = 0.0
        return chance


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _told_apart(values: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """The different ones, and which of them each is."""
    known: dict[tuple[type, Any], int] = {}
    which = [known.setdefault((type(value), value), len(known)) for value in values]
    return [value for _, value in known], np.array(which, int)


def _most_rows(settings: Sequence[Mapping[str, Any]], levels: Sequence[int]) -> list[tuple[list[Any], np.ndarray]]:
    """As a setting of its own: the rows that a candidate verifies at most. Nothing where nobody speculates."""
    if not any("speculation" in one for one in settings):
        return []
    return [_told_apart([max(shape_at(one, level).rows * level for level in levels) for one in settings])]


def _conditions_of(values: Sequence[Any]) -> Iterator[list[bool]]:
    """Of the different values of a setting: where each condition holds that may be made of them."""
    distinct = {(_is_number(value), value) for value in values}
    if len(distinct) < 2:
        return
    numbers = sorted(value for number, value in distinct if number)
    some = numbers[:: max(1, len(numbers) // MOST_LIMITS)]
    for number, value in sorted(distinct, key=str):
        if not number or len(some) == len(numbers):
            yield [v == value and _is_number(v) == number for v in values]
    for value in some:
        yield [_is_number(v) and v >= value for v in values]
        yield [_is_number(v) and v <= value for v in values]
