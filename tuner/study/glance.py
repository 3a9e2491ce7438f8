"""Where a study stands, counted and summed in the database, so that `status` is quick whatever the size of a study.

The figures are those of `summary.py` and `places.py`; a test holds them against one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuner.records import Candidate
from tuner.study import tables as t
from tuner.study.ahead import SCOPE, Pace, Scope, SoFar, ahead, scope_of
from tuner.study.data import BUDGET, CONFIRMATION, Budget, Confirmation, Slot, StoredTrial, StudyState
from tuner.study.looks import OUT, Look, saved
from tuner.study.places import PlaceWork
from tuner.study.policy import policy_for, usual
from tuner.study.summary import Incumbent, Summary, best_of, settled, trial_counts

EVENTS = 5
LATEST_OUT = 3


@dataclass(frozen=True)
class Glance:
    """What `status` shows of a study; `settings` has the candidates that it names."""

    name: str
    state: StudyState
    reason: str
    seed: int
    space: Mapping[str, Any]
    budget: Budget
    summary: Summary
    out: tuple[StoredTrial, ...]
    places: tuple[PlaceWork, ...]
    events: tuple[tuple[str, str], ...]
    settings: Mapping[str, Candidate]
    baseline: str


def glance(connection: sa.Connection, name: str, trials: Sequence[StoredTrial], *, working: bool) -> Glance:
    """The study as it stands; `trials` are all of its own, and `working` says whether a tuner is at it."""
    look = _Look(connection, name)
    row = connection.execute(sa.select(t.studies).where(t.studies.c.name == name)).one()
    budget = Budget(**row.budget)
    baseline = next((trial.candidate_id for trial in trials if trial.kind == "baseline"), "")
    measured = [trial for trial in trials if trial.kind == "measured"]
    best = best_of(measured)
    out = tuple(trial for trial in measured if trial.why.startswith(OUT))[-LATEST_OUT:]
    confirmations = look.confirmations()
    places = look.places(baseline, confirmations)
    named = {trial.candidate_id for trial in out} | {place.now for place in places if place.now}
    settings = look.candidates(named | ({best.candidate_id} if best else set()))
    launches = look.states()
    counted = {key: count for key, count in launches.items() if key[1] not in ("interrupted", "imported")}
    done = SoFar(
        measured=len(measured),
        settled=settled(trials),
        used=sum(counted.values()),
        searched=sum(count for (role, _), count in counted.items() if role != "confirm"),
        confirmed=launches.get(("confirm", "done"), 0),
        rounds=tuple(confirmations),
        elapsed_s=look.elapsed_s(),
        more=look.more(),
    )
    looked, candidate_s = look.looks(measured, baseline)
    valid = look.valid()
    found = Summary(
        trials=trial_counts(trials, working=working),
        failures=look.failures(),
        launches_used=done.used,
        interrupted=sum(count for (_, state), count in launches.items() if state == "interrupted"),
        blocks=valid.get(True, 0),
        invalid_blocks=valid.get(False, 0),
        incumbent=Incumbent(settings[best.candidate_id], best.value or 0.0) if best else None,
        elapsed_s=done.elapsed_s,
        left_s=look.left_s(row, budget, done, baseline, candidate_s),
        looks=looked,
    )
    events = look.events()
    return Glance(
        name, row.state, row.reason, row.seed, row.space, budget, found, out, places, events, settings, baseline
    )


class _Look:
    """The statements, each about one study."""

    def __init__(self, connection: sa.Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.there = set(sa.inspect(connection).get_table_names())

    def _all(self, *columns: Any, of: sa.Table, where: Sequence[Any] = (), by: Sequence[Any] = ()) -> Sequence[Any]:
        if of.name not in self.there:
            return ()
        query = sa.select(*columns).select_from(of).where(of.c.study == self.name, *where).group_by(*by)
        return self.connection.execute(query).all()

    def states(self) -> dict[tuple[str, str], int]:
        """(role, state) → launches."""
        c = t.launches.c
        rows = self._all(c.role, c.state, sa.func.count(), of=t.launches, by=[c.role, c.state])
        return {(role, state): count for role, state, count in rows}

    def failures(self) -> dict[str, int]:
        # Counted here: PostgreSQL takes an expression with a parameter in it for another one where it groups by it.
        kind = t.launches.c.failure["kind"].as_string()
        return dict(Counter(row[0] for row in self._all(kind, of=t.launches, where=[kind.is_not(None)])))

    def valid(self) -> dict[bool, int]:
        c = t.blocks.c
        return {bool(good): count for good, count in self._all(c.valid, sa.func.count(), of=t.blocks, by=[c.valid])}

    def confirmations(self) -> list[Confirmation]:
        c, a = t.confirmations.c, t.abandoned.c
        lost = self._all(a.round, a.repetition, of=t.abandoned)
        rows = self._all(c.round, c.finalists, c.first_repetition, c.pairs, c.spares, of=t.confirmations)
        return [
            Confirmation(
                row.round,
                tuple(row.finalists),
                row.first_repetition,
                row.pairs,
                row.spares,
                tuple(repetition for number, repetition in lost if number == row.round),
            )
            for row in rows
        ]

    def candidates(self, ids: set[str]) -> dict[str, Candidate]:
        c = t.candidates.c
        rows = self._all(c.id, c.settings, of=t.candidates, where=[c.id.in_(ids)]) if ids else ()
        return {row.id: Candidate(row.settings) for row in rows}

    def events(self) -> tuple[tuple[str, str], ...]:
        c = t.events.c
        query = sa.select(c.kind, c.message).where(c.study == self.name).order_by(c.id.desc()).limit(EVENTS)
        return tuple((row.kind, row.message) for row in reversed(self.connection.execute(query).all()))

    def more(self) -> bool:
        """Whether a larger budget was given since the last round of confirmation began."""
        c = t.events.c
        query = sa.select(c.kind).where(c.study == self.name, c.kind.in_((BUDGET, CONFIRMATION)))
        return bool(self.connection.execute(query.order_by(c.id.desc()).limit(1)).scalar() == BUDGET)

    # -- times ------------------------------------------------------------------------------------------------------

    def elapsed_s(self) -> float:
        """As `StudyData.elapsed_s`."""
        c = t.launches.c
        took = c.ended_at - c.started_at
        own = [c.state != "imported"]
        ended = self._all(sa.func.sum(took), of=t.launches, where=[*own, took > 0])[0][0] or 0.0
        for launch in self._all(c.id, c.started_at, c.ready_at, of=t.launches, where=[*own, c.ended_at.is_(None)]):
            until = max([launch.ready_at or 0.0, *self._ends(t.blocks.c.launch == launch.id)])
            ended += max(0.0, until - launch.started_at)
        return float(ended)

    def _ends(self, *where: Any) -> list[float]:
        """When the windows of some blocks ended."""
        c = t.blocks.c
        ends = (c.block["started_at"].as_float(), c.block["window_s"].as_float())
        return [began + window for began, window in self._all(*ends, of=t.blocks, where=where)]

    def left_s(self, row: Any, budget: Budget, done: SoFar, baseline: str, candidate_s: float) -> float | None:
        """As `summary.time_left_s`; `candidate_s` is what a candidate takes that is looked at, 0 where none was."""
        levels, profile, raced = len(row.space["workload"]["concurrency"]), row.space["profile"], self._raced()
        each, there = self._usual_launch_s(baseline, levels, raced), self._scope()
        if not each or row.state == "done":
            return 0.0 if each else None
        pace = Pace(each)
        if there.groups is not None or raced:
            slot_s = self._whole_slot_s(baseline, levels, raced) or 0.0
            pace = Pace(max(0.0, each - slot_s), slot_s, candidate_s or slot_s)
        policy = policy_for(profile, row.fingerprint, budget.launches)
        return ahead(budget, policy, profile, levels, there, pace, done).seconds

    def _scope(self) -> Scope:
        """As `summary.scope`."""
        if t.event_facts.name not in self.there:
            return Scope()
        c, f = t.events.c, t.event_facts.c
        query = sa.select(f.facts).join(t.events, c.id == f.event).where(c.study == self.name, c.kind == SCOPE)
        return scope_of(self.connection.execute(query.order_by(c.id.desc()).limit(1)).scalar() or {})

    def _raced(self) -> bool:
        """Whether any candidate was looked at."""
        b = t.blocks.c
        return bool(self._all(b.id, of=t.blocks, where=[b.role == "look", b.id == self._first_look()]))

    def _usual_launch_s(self, baseline: str, levels: int, raced: bool) -> float:
        """As `planner.usual_launch_s`."""
        c = t.launches.c
        changed = self._all(t.reconfigurations.c.launch, of=t.reconfigurations)
        rows = self._all(c.state, c.started_at, c.ready_at, c.ended_at, of=t.launches)
        done = [row for row in rows if row.state == "done" and row.ended_at is not None]
        if len(done) > 1 and not changed and not raced:
            return usual([max(0.0, row.ended_at - row.started_at) for row in done])
        starts = [row.ready_at - row.started_at for row in rows if row.ready_at is not None]
        whole = self._whole_slot_s(baseline, levels, raced)
        return usual(starts) + whole if starts and whole is not None else 0.0

    def _first_look(self) -> Any:
        b = t.blocks.c
        return sa.select(sa.func.min(b.id)).where(b.study == self.name, b.role == "look").scalar_subquery()

    def _whole_slot_s(self, baseline: str, levels: int, raced: bool) -> float | None:
        """As `planner.whole_slot_s`; None before a block has been measured."""
        b = t.blocks.c
        took = sa.func.avg(b.block["warmup_s"].as_float() + b.block["window_s"].as_float())
        wanted: list[list[Any]] = [[]]
        if raced:
            wanted.insert(0, [(b.role == "confirm") | (b.candidate == baseline)])
        for where in wanted:
            if (each := self._all(took, of=t.blocks, where=where)[0][0]) is not None:
                return float(levels * each)
        return None

    def looks(self, measured: Sequence[StoredTrial], baseline: str) -> tuple[str, float]:
        """As `looks.looks_saved`; and as `planner.search_slot_s` where candidates were looked at, else 0."""
        b = t.blocks.c
        columns = (b.candidate, b.role, b.repetition, b.concurrency, b.valid)
        seconds = (b.block["warmup_s"].as_float(), b.block["window_s"].as_float())
        looked = sa.select(b.candidate).where(b.study == self.name, b.role == "look")
        where = [b.role.in_(("look", "screen")), b.candidate.in_(looked) | (b.candidate == baseline)]
        if not self.connection.execute(looked.limit(1)).first():
            return "", 0.0
        seen: dict[Slot, list[Look]] = {}
        usual = []
        for candidate, role, repetition, level, valid, warmup_s, window_s in self._all(
            *columns, *seconds, of=t.blocks, where=where
        ):
            if candidate == baseline:
                usual += [window_s] if role == "screen" else []
            else:
                look = Look(level, bool(valid), warmup_s, window_s)
                seen.setdefault(Slot(candidate, role, repetition), []).append(look)
        told = [trial.slot for trial in measured if not trial.running and trial.constraints.get("launch", 1.0) <= 0]
        told = [slot for slot in told if slot.look in seen]
        looks = [look for slot in told for each in (slot.look, slot) for look in seen.get(each, ())]
        candidate_s = sum(look.warmup_s + look.window_s for look in looks) / len(told) if told else 0.0
        return saved(measured, seen, sum(usual) / len(usual) if usual else 0.0).sentence, candidate_s

    # -- places -----------------------------------------------------------------------------------------------------

    def places(self, baseline: str, confirmations: Sequence[Confirmation]) -> tuple[PlaceWork, ...]:
        """As `places.shares`."""
        c, b, at = t.launches.c, t.blocks.c, t.launch_places.c
        if t.launch_places.name not in self.there:
            return ()
        here = (at.launch == c.id) & (at.place != "")
        times = [sa.func.max(column) for column in (c.started_at, c.ready_at, c.ended_at)]
        failed = sa.func.count(c.failure["kind"].as_string())
        query = (
            sa.select(at.place, sa.func.count(), failed, *times)
            .join(t.launches, here)
            .where(c.study == self.name, c.state != "imported")
            .group_by(at.place)
        )
        launched = self.connection.execute(query).all()
        pairs = self._pairs(baseline, confirmations)
        found = []
        for place, launches, failures, *known in launched:
            mine = sa.select(at.launch).where(at.place == place, at.study == self.name)
            blocks = self._all(
                sa.func.count(), sa.func.max(b.id), of=t.blocks, where=[b.valid.is_(True), b.launch.in_(mine)]
            )[0]
            times_here = [at_ for at_ in known if at_ is not None]
            times_here += self._ends(b.id == blocks[1]) if blocks[1] is not None else []
            running = sa.select(c.candidate).where(c.id.in_(mine), c.state == "running").order_by(c.id.desc()).limit(1)
            now = self.connection.execute(running).scalar()
            found.append(PlaceWork(place, launches, blocks[0], pairs.get(place, 0), failures, max(times_here), now))
        return tuple(sorted(found, key=lambda place: place.name))

    def _pairs(self, baseline: str, confirmations: Sequence[Confirmation]) -> dict[str, int]:
        """Pairs of the confirmation, by the place of the candidate's block."""
        b, at = t.blocks.c, t.launch_places.c
        columns = (b.candidate, b.repetition, b.concurrency, b.launch)
        rows = self._all(*columns, of=t.blocks, where=[b.role == "confirm", b.valid.is_(True)])
        if not rows:
            return {}
        places = dict(self._all(at.launch, at.place, of=t.launch_places))
        against = {(row.repetition, row.concurrency) for row in rows if row.candidate == baseline}
        asked = {(one, repetition) for c in confirmations for one in c.finalists for repetition in c.repetitions}
        count: dict[str, int] = {}
        for row in rows:
            pair = (row.candidate, row.repetition) in asked and (row.repetition, row.concurrency) in against
            if pair:
                place = places.get(row.launch, "")
                count[place] = count.get(place, 0) + 1
        return count
