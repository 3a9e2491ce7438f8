"""The records of one study in its database. Every method is one transaction: after it, the fact is kept for good."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from tuner.errors import UsageError
from tuner.records import (
    Block,
    Candidate,
    Failure,
    LaunchRecord,
    Pair,
    StoredBlock,
    Verdict,
    short_hash,
)
from tuner.secrets import without_secrets
from tuner.study import tables as t
from tuner.study.address import shown
from tuner.study.data import (
    BUDGET,
    CONFIRMATION,
    Budget,
    Confirmation,
    Import,
    LaunchState,
    Reconfiguration,
    Slot,
    StoredEvent,
    StoredLaunch,
    StudyData,
    StudyState,
)
from tuner.study.database import finite, open_database
from tuner.study.garbage import uncollected
from tuner.study.names import local_studies, sqlite_file, storage_url, unknown_study
from tuner.study.trials import Trials

if TYPE_CHECKING:
    from tuner.space import Space


IMPORTED = "imported"
"""The event that tells what was taken from an earlier study, and what was not; its fact is the `source`."""

MOST_NAMED = 200
"""Rows that a statement names one by one; of more it reads all."""


class AlreadyMeasured(RuntimeError):
    """A valid block of this candidate, level, role and repetition is stored; the second one was refused."""


def sampler_facts(sampler: str) -> dict[str, Any]:
    """What a study keeps of its sampler. Another one would go on with its trials, but would not have made them."""
    return {"name": sampler, "version": 1, "seed": "study seed / trial number"}


class StudyStore:
    """One study's records. Use `open_study` or `create_study`."""

    def __init__(self, engine: Engine, name: str, trials: Trials, clock: Callable[[], float] = time.time) -> None:
        self.engine = engine
        self.name = name
        self.trials = trials
        self.clock = clock
        self._cache: dict[str, dict[Any, Any]] = {}
        self._space: tuple[Any, Space] | None = None
        self._last: StudyData | None = None
        self._there: set[str] = set()

    def close(self) -> None:
        """Gives the connections back."""
        self.trials.close()
        self.engine.dispose()

    # -- reading ----------------------------------------------------------------------------------------------------

    def data(self) -> StudyData:
        """Everything, as plain records; the same object while nothing has changed.

        What can no longer change (blocks, launches that have ended, candidates, events, finished trials) is read once.
        """
        with uncollected():
            return self._read()

    def outline(self) -> StudyData:
        """The study without its records: under what conditions its figures were, or will be, measured."""
        with self.engine.connect() as connection:
            return self._outline(connection)

    def _outline(self, connection: sa.Connection) -> StudyData:
        from tuner.space import Space

        row = connection.execute(sa.select(t.studies).where(t.studies.c.name == self.name)).one()
        if self._space is None or self._space[0] != row.space:
            self._space = (row.space, Space.from_dict(row.space))
        return StudyData(
            name=row.name,
            uid=row.uid,
            created_at=row.created_at,
            state=row.state,
            reason=row.reason,
            seed=row.seed,
            space=self._space[1],
            fingerprint=row.fingerprint,
            budget=Budget(**row.budget),
            candidates={},
            trials=(),
            launches=(),
            blocks={},
            confirmations=(),
            sampler=row.sampler,
        )

    def _read(self) -> StudyData:
        with self.engine.connect() as connection:
            outline = self._outline(connection)
            places = {row.launch: row.place for row in self._younger(connection, t.launch_places)}
            launches = self._launches(connection, places)
            blocks = self._blocks(connection)
            candidates = self._kept(connection, t.candidates, lambda c: Candidate(c.settings))
            events = self._events(connection)
            confirmations = connection.execute(self._of(t.confirmations).order_by(t.confirmations.c.round)).all()
            verdicts = connection.execute(self._of(t.verdicts).order_by(t.verdicts.c.id)).all()
            quality = self._younger(connection, t.quality)
            changed = self._younger(connection, t.reconfigurations)
            imports = self._younger(connection, t.imports)
            abandoned = [(row.round, row.repetition) for row in self._younger(connection, t.abandoned)]
        found = replace(
            outline,
            candidates=candidates,
            trials=self.trials.all(),
            launches=launches,
            blocks=blocks,
            confirmations=tuple(
                Confirmation(
                    c.round,
                    tuple(c.finalists),
                    c.first_repetition,
                    c.pairs,
                    c.spares,
                    tuple(sorted(repetition for number, repetition in abandoned if number == c.round)),
                )
                for c in confirmations
            ),
            verdicts=tuple(Verdict(**v.verdict) for v in verdicts),
            events=tuple(events[number] for number in sorted(events)),
            quality={(q.candidate, q.kind): q.facts for q in quality},
            reconfigurations=tuple(_reconfiguration(each) for each in changed),
            imports=tuple(Import(i.source, i.candidate, i.state, i.why, i.value) for i in imports),
        )
        if self._last is None or found != self._last:
            self._last = found
        return self._last

    def _kept(self, connection: sa.Connection, table: sa.Table, make: Callable[[Any], Any]) -> dict[Any, Any]:
        """The rows of a table by id, as records; those that were read before are not read again."""
        before = self._cache.get(table.name, {})
        ids = list(connection.execute(sa.select(table.c.id).where(table.c.study == self.name)).scalars())
        fresh = {row.id: make(row) for row in self._named(connection, table, [i for i in ids if i not in before])}
        found = {i: before[i] if i in before else fresh[i] for i in ids if i in before or i in fresh}
        self._cache[table.name] = found
        return found

    def _events(self, connection: sa.Connection) -> dict[int, StoredEvent]:
        """All events by id."""
        found = self._kept(connection, t.events, lambda e: StoredEvent(e.id, e.at, e.kind, e.message))
        # Read behind the events: an event and its facts are kept together.
        facts = {row.event: row.facts for row in self._younger(connection, t.event_facts)}
        return {i: replace(event, facts=facts[i]) if i in facts else event for i, event in found.items()}

    def _named(self, connection: sa.Connection, table: sa.Table, ids: Sequence[Any]) -> Sequence[Any]:
        """The rows with these ids, and with many of them all rows."""
        if not ids:
            return ()
        chosen = self._of(table)
        return connection.execute(chosen.where(table.c.id.in_(ids)) if len(ids) <= MOST_NAMED else chosen).all()

    def _launches(self, connection: sa.Connection, places: Mapping[int, str]) -> tuple[StoredLaunch, ...]:
        """All launches in order. Of one that has ended nothing changes but whether it is forgiven."""
        c = t.launches.c
        query = sa.select(c.id, c.ended_at, c.forgiven, c.state).where(c.study == self.name).order_by(c.id)
        rows = connection.execute(query).all()
        before: dict[int, StoredLaunch] = self._cache.get(t.launches.name, {})

        def known(row: Any) -> bool:
            one = before.get(row.id)
            now = (row.ended_at, row.forgiven, row.state, places.get(row.id, ""))
            return one is not None and one.ended_at is not None and now == (
                one.ended_at, one.forgiven, one.state, one.place
            )  # fmt: skip

        stale = [row.id for row in rows if not known(row)]
        fresh = {each.id: _launch(each, places.get(each.id, "")) for each in self._named(connection, t.launches, stale)}
        found = {row.id: fresh.get(row.id) or before[row.id] for row in rows}
        self._cache[t.launches.name] = found
        return tuple(found.values())

    def _blocks(self, connection: sa.Connection) -> dict[int, StoredBlock]:
        """All blocks by id, in order of time."""
        found = self._kept(connection, t.blocks, lambda row: _block(row, 0))
        placed = {}
        for order, number in enumerate(sorted(found)):
            one = found[number]
            placed[number] = one if one.order == order else replace(one, order=order)
        self._cache[t.blocks.name] = placed
        return placed

    def state(self) -> StudyState:
        """What the study is doing; `data` has everything."""
        with self.engine.connect() as connection:
            found: StudyState = connection.execute(
                sa.select(t.studies.c.state).where(t.studies.c.name == self.name)
            ).scalar_one()
        return found

    def stored_pairs(self) -> tuple[Pair, ...]:
        """The pairs as they were written down; `StudyData.pairs` derives them from the blocks again."""
        with self.engine.connect() as connection:
            rows = connection.execute(self._of(t.pairs)).all()
        pairs = (
            Pair(p.candidate, p.concurrency, p.role, p.number, p.baseline_block, p.candidate_block, p.log_ratio)
            for p in rows
        )
        return tuple(
            sorted(pairs, key=lambda p: (p.role == "confirm", p.candidate_id, p.role != "look", p.concurrency, p.index))
        )

    def _of(self, table: sa.Table) -> sa.Select[Any]:
        return sa.select(table).where(table.c.study == self.name)

    def _younger(self, connection: sa.Connection, table: sa.Table) -> Sequence[Any]:
        """The rows of a table that older databases lack."""
        if table.name not in self._there:
            if not sa.inspect(connection).has_table(table.name):
                return ()
            self._there.add(table.name)
        return connection.execute(self._of(table).order_by(*table.primary_key.columns)).all()

    # -- the study --------------------------------------------------------------------------------------------------

    def set_state(self, state: StudyState, reason: str = "") -> None:
        """What the study is doing, and why it is not doing more."""
        with self.engine.begin() as connection:
            self._set_state(connection, state, reason)

    def _set_state(self, connection: sa.Connection, state: StudyState, reason: str) -> None:
        connection.execute(sa.update(t.studies).where(t.studies.c.name == self.name).values(state=state, reason=reason))
        self._event(connection, f"study_{state}", reason)

    def stop(self, reason: str, *slots: Slot, alone: bool = True) -> None:
        """The study stops because of these slots; their failures will not count again once the user goes on.

        Where this worker is not alone, only the worker stops.
        """
        with self.engine.begin() as connection:
            for slot in slots:
                for table in (t.launches, t.reconfigurations):
                    if table is t.launches or sa.inspect(connection).has_table(table.name):
                        connection.execute(sa.update(table).where(*self._slot(table, slot)).values(forgiven=True))
            if alone:
                self._set_state(connection, "stopped", reason)
            else:
                self._event(connection, "worker_stopped", reason)

    def adopt(self, place: str) -> None:
        """Launches that were made before places were noted were made here: nobody else could have."""
        with self.engine.begin() as connection:
            t.launch_places.create(connection, checkfirst=True)
            known = set(connection.execute(sa.select(t.launch_places.c.launch)).scalars())
            ids = connection.execute(sa.select(t.launches.c.id).where(t.launches.c.study == self.name)).scalars()
            rows = [{"launch": number, "study": self.name, "place": place} for number in ids if number not in known]
            if rows:
                connection.execute(sa.insert(t.launch_places), rows)

    def set_budget(self, budget: Budget, why: str) -> None:
        """New totals, and from which trial on they hold (`planner.budget_since`)."""
        first = len(self.trials.outline())
        with self.engine.begin() as connection:
            connection.execute(
                sa.update(t.studies).where(t.studies.c.name == self.name).values(budget=budget.to_dict())
            )
            self._event(connection, BUDGET, f"{why}, from trial {first} on", {"from_trial": first})

    def set_space(self, space: Space, text: str) -> None:
        """Replaces the space by one that means the same (its name, budget or comments may differ)."""
        with self.engine.begin() as connection:
            values = {"space": space.to_dict(), "space_text": text}
            connection.execute(sa.update(t.studies).where(t.studies.c.name == self.name).values(values))

    def event(self, kind: str, message: str, facts: Mapping[str, Any] | None = None) -> None:
        """Something worth remembering, for a person; `facts` is what the study decides by."""
        with self.engine.begin() as connection:
            self._event(connection, kind, message, facts)

    def _event(
        self, connection: sa.Connection, kind: str, message: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        values = {"study": self.name, "at": self.clock(), "kind": kind, "message": message}
        key = connection.execute(sa.insert(t.events).values(values)).inserted_primary_key
        if facts:
            assert key is not None
            t.event_facts.create(connection, checkfirst=True)
            row = {"event": key[0], "study": self.name, "facts": dict(facts)}
            connection.execute(sa.insert(t.event_facts).values(row))

    def put_candidate(self, candidate: Candidate) -> None:
        """Keeps a candidate's settings; again does nothing."""
        key = (t.candidates.c.study == self.name) & (t.candidates.c.id == candidate.id)
        with self.engine.begin() as connection:
            if connection.execute(sa.select(t.candidates.c.id).where(key)).first() is None:
                values = {"study": self.name, "id": candidate.id, "settings": dict(candidate.settings)}
                connection.execute(sa.insert(t.candidates).values(values))

    def put_quality(self, candidate_id: str, kind: str, launch: int, facts: Mapping[str, Any]) -> None:
        """Keeps what a launch has told of a candidate's answers, in place of what was known."""
        key = (t.quality.c.study == self.name) & (t.quality.c.candidate == candidate_id) & (t.quality.c.kind == kind)
        values = {"study": self.name, "candidate": candidate_id, "kind": kind, "launch": launch, "facts": dict(facts)}
        with self.engine.begin() as connection:
            t.quality.create(connection, checkfirst=True)
            connection.execute(sa.delete(t.quality).where(key))
            connection.execute(sa.insert(t.quality).values(values))

    def put_imports(
        self,
        source: str,
        imports: Sequence[Import],
        candidates: Sequence[Candidate],
        launches: Sequence[StoredLaunch],
        blocks: Sequence[StoredBlock],
        message: str,
    ) -> None:
        """Keeps what the earlier study `source` knew, all of it or nothing.

        Its launches and blocks become a place of their own; the baseline's screenings get numbers that no other has.
        """
        with self.engine.begin() as connection:
            for table in (t.imports, t.launch_places):
                table.create(connection, checkfirst=True)
            for candidate in candidates:
                key = (t.candidates.c.study == self.name) & (t.candidates.c.id == candidate.id)
                if connection.execute(sa.select(t.candidates.c.id).where(key)).first() is None:
                    values = {"study": self.name, "id": candidate.id, "settings": dict(candidate.settings)}
                    connection.execute(sa.insert(t.candidates).values(values))
            numbers = {launch.id: self._import_launch(connection, launch) for launch in launches}
            for stored in blocks:
                row: dict[str, Any] = {
                    "study": self.name,
                    "candidate": stored.candidate_id,
                    "concurrency": stored.concurrency,
                    "role": stored.role,
                    "repetition": stored.repetition,
                    "launch": numbers[stored.launch_id],
                    "attempt": 0,
                    "valid": True,
                    "ended_at": stored.block.started_at + stored.block.window_s,
                    "block": stored.block.to_dict(),
                }
                connection.execute(sa.insert(t.blocks).values(row))
            for one in imports:
                connection.execute(sa.insert(t.imports).values(study=self.name, **_import_row(one)))
            self._event(connection, IMPORTED, message, {"source": source})

    def _import_launch(self, connection: sa.Connection, launch: StoredLaunch) -> int:
        values = {
            "study": self.name,
            "candidate": launch.slot.candidate_id,
            "role": launch.slot.role,
            "repetition": launch.slot.repetition,
            "state": "imported",
            "marker": "",
            "log_path": launch.log_path,
            "record": launch.record.to_dict() if launch.record else None,
            "started_at": launch.started_at,
            "ready_at": launch.ready_at,
            "ended_at": launch.ended_at,
            "effective": finite(launch.effective),
            "forgiven": False,
        }
        key = connection.execute(sa.insert(t.launches).values(values)).inserted_primary_key
        assert key is not None
        place = {"launch": key[0], "study": self.name, "place": launch.place}
        connection.execute(sa.insert(t.launch_places).values(place))
        return int(key[0])

    # -- launches ---------------------------------------------------------------------------------------------------

    def begin_launch(self, slot: Slot, place: str = "") -> int:
        """A launch is about to begin at a place; returns its id, which its log and its marker are named after."""
        values = {
            "study": self.name,
            "candidate": slot.candidate_id,
            "role": slot.role,
            "repetition": slot.repetition,
            "state": "running",
            "started_at": self.clock(),
        }
        with self.engine.begin() as connection:
            key = connection.execute(sa.insert(t.launches).values(values)).inserted_primary_key
            assert key is not None
            if place:
                t.launch_places.create(connection, checkfirst=True)
                at = {"launch": key[0], "study": self.name, "place": place}
                connection.execute(sa.insert(t.launch_places).values(at))
        return int(key[0])

    def launch_record(self, launch: int, record: LaunchRecord, marker: str, log_path: str) -> None:
        """What is about to be started, and where it logs."""
        self._launch(launch, record=record.to_dict(), marker=marker, log_path=log_path)

    def launch_started(self, launch: int, pid: int) -> None:
        """The server has a process."""
        self._launch(launch, pid=pid)

    def launch_ready(self, launch: int, effective: Mapping[str, Any] | None) -> None:
        """The server has answered a real request; `effective` is what it says about itself, kept without secrets."""
        self._launch(launch, ready_at=self.clock(), effective=finite(without_secrets(effective)))

    def launch_failed(self, launch: int, failure: Failure) -> None:
        """The launch has failed, and why; it may still have to be ended."""
        self._launch(launch, state="failed", failure=asdict(failure))

    def end_launch(self, launch: int, exit_status: int | None, stop_mode: str) -> None:
        """Nothing is left of the launch. It is `done` unless it was failed or interrupted."""
        with self.engine.begin() as connection:
            row = connection.execute(sa.select(t.launches.c.state).where(t.launches.c.id == launch)).one()
            state = "done" if row.state == "running" else row.state
            values = {"state": state, "ended_at": self.clock(), "exit_status": exit_status, "stop_mode": stop_mode}
            connection.execute(sa.update(t.launches).where(t.launches.c.id == launch).values(values))

    def close_launch(self, launch: int, state: LaunchState, ended_at: float) -> None:
        """Closes what a tuner that is no more has left open."""
        self._launch(launch, state=state, ended_at=ended_at, stop_mode="reaped")

    def _launch(self, launch: int, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.update(t.launches).where(t.launches.c.id == launch).values(values))

    # -- settings changed on a running server -----------------------------------------------------------------------

    def ask_reconfiguration(self, launch: int, slot: Slot, changes: Mapping[str, Any]) -> int:
        """A running server is about to be put to a slot's settings; returns the id of the fact."""
        values = {
            "study": self.name,
            "launch": launch,
            "candidate": slot.candidate_id,
            "role": slot.role,
            "repetition": slot.repetition,
            "at": self.clock(),
            "changes": dict(changes),
            "state": "asked",
        }
        with self.engine.begin() as connection:
            t.reconfigurations.create(connection, checkfirst=True)
            key = connection.execute(sa.insert(t.reconfigurations).values(values)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def reconfigured(self, number: int, effective: Mapping[str, Any] | None) -> None:
        """The server has them in effect, by its own words."""
        self._reconfiguration(number, state="in_effect", effective=finite(without_secrets(effective)))

    def reconfiguration_failed(self, number: int, failure: Failure) -> None:
        """The server did not take them, or failed under them."""
        self._reconfiguration(number, state="failed", failure=asdict(failure))

    def _reconfiguration(self, number: int, **values: Any) -> None:
        with self.engine.begin() as connection:
            c = t.reconfigurations.c
            connection.execute(sa.update(t.reconfigurations).where(c.id == number).values(values))

    def _slot(self, table: sa.Table, slot: Slot) -> tuple[sa.ColumnElement[bool], ...]:
        c = table.c
        return (
            c.study == self.name,
            c.candidate == slot.candidate_id,
            c.role == slot.role,
            c.repetition == slot.repetition,
        )

    # -- blocks and what follows from them ----------------------------------------------------------------------------

    def attempts(self, slot: Slot, concurrency: int) -> int:
        """How many blocks of a slot are kept at a level, valid or not."""
        c = t.blocks.c
        same = (
            c.study == self.name,
            c.candidate == slot.candidate_id,
            c.role == slot.role,
            c.repetition == slot.repetition,
            c.concurrency == concurrency,
        )
        with self.engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(t.blocks).where(*same)).scalar() or 0)

    def put_block(self, launch: int, slot: Slot, block: Block) -> int:
        """Keeps a block; returns its id.

        Raises:
            AlreadyMeasured: a valid one is kept already.
        """
        key = {
            "study": self.name,
            "candidate": slot.candidate_id,
            "concurrency": block.concurrency,
            "role": slot.role,
            "repetition": slot.repetition,
        }
        same = [t.blocks.c[name] == value for name, value in key.items()]
        try:
            with self.engine.begin() as connection:
                attempt = connection.execute(sa.select(sa.func.count()).select_from(t.blocks).where(*same)).scalar()
                values = {
                    **key,
                    "launch": launch,
                    "attempt": attempt,
                    "valid": block.valid,
                    "ended_at": self.clock(),
                    "block": block.to_dict(),
                }
                inserted = connection.execute(sa.insert(t.blocks).values(values)).inserted_primary_key
        except IntegrityError as error:
            raise AlreadyMeasured(f"{key} is measured already; the second block was refused") from error
        assert inserted is not None
        return int(inserted[0])

    def put_pairs(self, pairs: Iterable[Pair]) -> None:
        """Writes down the pairs that are not kept yet."""
        with self.engine.begin() as connection:
            rows = connection.execute(self._of(t.pairs)).all()
            kept = {(row.candidate, row.concurrency, row.role, row.number) for row in rows}
            new = [
                {
                    "study": self.name,
                    "candidate": pair.candidate_id,
                    "concurrency": pair.concurrency,
                    "role": pair.role,
                    "number": pair.index,
                    "baseline_block": pair.baseline_block,
                    "candidate_block": pair.candidate_block,
                    "log_ratio": pair.log_ratio,
                }
                for pair in pairs
                if (pair.candidate_id, pair.concurrency, pair.role, pair.index) not in kept
            ]
            if new:
                connection.execute(sa.insert(t.pairs), new)

    def put_confirmation(self, confirmation: Confirmation, facts: Mapping[str, Any]) -> None:
        """Fixes the finalists of a round; `facts` say why the search before it ended (`data.CONFIRMATION`)."""
        values = {
            "study": self.name,
            "round": confirmation.round,
            "finalists": list(confirmation.finalists),
            "first_repetition": confirmation.first_repetition,
            "pairs": confirmation.pairs,
            "spares": confirmation.spares,
        }
        with self.engine.begin() as connection:
            connection.execute(sa.insert(t.confirmations).values(values))
            finalists = ", ".join(confirmation.finalists)
            self._event(connection, CONFIRMATION, f"round {confirmation.round}: {finalists}", facts)

    def abandon(self, confirmation: int, repetition: int, why: str) -> None:
        """A pair of a confirmation whose worker is gone is not waited for any more."""
        values = {"study": self.name, "round": confirmation, "repetition": repetition, "why": why}
        with self.engine.begin() as connection:
            t.abandoned.create(connection, checkfirst=True)
            connection.execute(sa.insert(t.abandoned).values(values))
            self._event(connection, "abandoned", why)

    def finish(self, verdicts: Sequence[Verdict], reason: str) -> None:
        """The study is done: what was found, in place of what was found before."""
        with self.engine.begin() as connection:
            connection.execute(sa.delete(t.verdicts).where(t.verdicts.c.study == self.name))
            for verdict in verdicts:
                values = {
                    "study": self.name,
                    "candidate": verdict.candidate_id,
                    "concurrency": verdict.concurrency,
                    "verdict": asdict(verdict),
                }
                connection.execute(sa.insert(t.verdicts).values(values))
            self._set_state(connection, "done", reason)


def _launch(row: Any, place: str) -> StoredLaunch:
    return StoredLaunch(
        id=row.id,
        place=place,
        slot=Slot(row.candidate, row.role, row.repetition),
        state=row.state,
        marker=row.marker,
        log_path=row.log_path,
        record=_record(row.id, row.record) if row.record else None,
        pid=row.pid,
        started_at=row.started_at,
        ready_at=row.ready_at,
        ended_at=row.ended_at,
        effective=row.effective,
        exit_status=row.exit_status,
        stop_mode=row.stop_mode,
        failure=Failure(**row.failure) if row.failure else None,
        forgiven=row.forgiven,
    )


def _reconfiguration(row: Any) -> Reconfiguration:
    return Reconfiguration(
        id=row.id,
        launch_id=row.launch,
        slot=Slot(row.candidate, row.role, row.repetition),
        at=row.at,
        changes=row.changes,
        state=row.state,
        effective=row.effective,
        failure=Failure(**row.failure) if row.failure else None,
        forgiven=row.forgiven,
    )


def _record(launch: int, stored: Any) -> LaunchRecord:
    """A launch record as it was kept.

    Raises:
        UsageError: parts of it are missing.
    """
    try:
        return LaunchRecord.from_dict(stored)
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the record of launch {launch} is not complete ({error}): another version of the tuner wrote it, or "
            "somebody changed its database. It was left as it is"
        ) from error


def _import_row(one: Import) -> dict[str, Any]:
    return {
        "source": one.source,
        "candidate": one.candidate_id,
        "state": one.state,
        "why": one.why,
        "value": one.value,
    }


def _block(row: Any, order: int) -> StoredBlock:
    return StoredBlock(
        id=row.id,
        candidate_id=row.candidate,
        launch_id=row.launch,
        concurrency=row.concurrency,
        role=row.role,
        repetition=row.repetition,
        order=order,
        block=Block.from_dict(row.block),
    )


def create_study(
    name: str,
    *,
    space: Space,
    space_text: str,
    fingerprint: Mapping[str, Any],
    seed: int,
    budget: Budget,
    storage: str | None = None,
    clock: Callable[[], float] = time.time,
) -> StudyStore:
    """A new study, or the one that a tuner killed in between had begun to create."""
    url = storage_url(name, storage)
    engine = open_database(url, create=True)
    values = {
        "name": name,
        "uid": uuid.uuid4().hex[:16],
        "created_at": clock(),
        "state": "new",
        "reason": "",
        "seed": seed,
        "space": space.to_dict(),
        "space_text": space_text,
        "fingerprint": dict(fingerprint),
        "fingerprint_hash": short_hash(fingerprint),
        "sampler": sampler_facts(space.sampler),
        "budget": budget.to_dict(),
    }
    with engine.begin() as connection:
        if connection.execute(sa.select(t.studies.c.name).where(t.studies.c.name == name)).first() is None:
            connection.execute(sa.insert(t.studies).values(values))
    store = StudyStore(engine, name, Trials(url, name, engine), clock)
    store.put_candidate(space.baseline)
    return store


def open_study(name: str, storage: str | None = None, clock: Callable[[], float] = time.time) -> StudyStore:
    """An existing study.

    Raises:
        UsageError: there is none of this name (with the nearest), or its database cannot be used.
    """
    url = storage_url(name, storage)
    if storage is None and name not in (known := local_studies()):
        raise unknown_study(name, known, "studies/")
    engine = open_database(url, create=False)
    names = study_names(engine)
    if name not in names:
        engine.dispose()
        raise unknown_study(name, names, shown(storage) if storage else "studies/")
    return StudyStore(engine, name, Trials(url, name, engine), clock)


def study_exists(name: str, storage: str | None = None) -> bool:
    """Whether there is a study of this name, complete or only begun.

    Raises:
        UsageError: what lies in its place cannot be used.
    """
    url = storage_url(name, storage)
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return False
    engine = open_database(url, create=True)
    try:
        return name in study_names(engine)
    finally:
        engine.dispose()


def study_names(engine: Engine) -> list[str]:
    """The studies in a database."""
    with engine.connect() as connection:
        return list(connection.execute(sa.select(t.studies.c.name).order_by(t.studies.c.name)).scalars())
