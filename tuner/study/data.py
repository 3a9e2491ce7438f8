"""A study as it stands: everything its database holds, as plain records. All decisions are functions of `StudyData`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tuner.records import Candidate, Failure, LaunchRecord, Pair, Role, Setting, StoredBlock, Verdict

if TYPE_CHECKING:
    from tuner.space import Space

TrialKind = Literal["baseline", "measured", "duplicate", "illegal", "known_crash", "out_of_launches", "imported"]
ReconfigurationState = Literal["asked", "in_effect", "failed"]
LaunchState = Literal["running", "done", "failed", "interrupted", "imported"]
StudyState = Literal["new", "running", "interrupted", "stopped", "done"]

BUDGET = "budget"
"""The event of another budget; its fact is the first trial that it holds for, `from_trial`."""

CONFIRMATION = "confirmation"
"""The event of a round that begins, with why the search had ended by then, after so many trials."""


@dataclass(frozen=True)
class Budget:
    """Where the search ends: totals over the whole life of the study. `hours` counts time with a server."""

    launches: int
    candidates: int
    hours: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the keyword arguments of `Budget`."""
        return {"launches": self.launches, "candidates": self.candidates, "hours": self.hours}


@dataclass(frozen=True)
class StoredTrial:
    """One proposal of the sampler, as Optuna keeps it.

    `running` trials have no value yet. `value` is the log speed-up over the baseline, `constraints` are met at 0 and
    below. A duplicate repeats what is known of an equal candidate; an illegal one was never launched (`why`),
    nor one that is known to crash, nor one that would need a launch when none is left for the search.
    An imported one was measured in an earlier study.
    """

    number: int
    candidate_id: str
    kind: TrialKind
    running: bool
    params: Mapping[str, Any]
    value: float | None
    constraints: Mapping[str, float]
    why: str = ""
    place: str = ""
    repetition: int = 0

    @property
    def slot(self) -> Slot:
        """What is measured for it. One that another place has taken over begins anew, as another repetition."""
        return Slot(self.candidate_id, "screen", self.repetition)

    @property
    def launched(self) -> bool:
        """Whether a server measures it, or has, here or in an earlier study: else nobody knows what it is worth."""
        return self.kind in ("baseline", "measured", "imported")

    @property
    def feasible(self) -> bool:
        """Whether it was told and meets every constraint."""
        return not self.running and all(value <= 0 for value in self.constraints.values())


@dataclass(frozen=True)
class Slot:
    """The blocks of one candidate, in one role, at one repetition. A launch is for one slot, and may serve others.

    A slot of role `edge` has one block, and its repetition is the level of that.
    """

    candidate_id: str
    role: Role
    repetition: int

    @property
    def look(self) -> Slot:
        """The short first blocks of a screening."""
        return replace(self, role="look")

    @property
    def whole(self) -> Slot:
        """The screening that a first look belongs to; any other slot is its own."""
        return replace(self, role="screen") if self.role == "look" else self

    @property
    def searches(self) -> bool:
        """Whether it is of the search, and may be measured on a server that serves others."""
        return self.role in ("screen", "edge")


@dataclass(frozen=True)
class StoredLaunch:
    """One server start and how it went.

    `interrupted`: the tuner itself ended, and the slot was not done. A failure is `forgiven` once it has stopped the
    study: whoever starts it again has seen to the cause.
    """

    id: int
    slot: Slot
    state: LaunchState
    marker: str
    log_path: str
    record: LaunchRecord | None
    pid: int | None
    started_at: float
    ready_at: float | None
    ended_at: float | None
    effective: Mapping[str, Any] | None
    exit_status: int | None
    stop_mode: str | None
    failure: Failure | None
    forgiven: bool = False
    place: str = ""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end; 0 while it runs."""
        return max(0.0, self.ended_at - self.started_at) if self.ended_at is not None else 0.0


@dataclass(frozen=True)
class Reconfiguration:
    """A running server that is put to the settings of another slot.

    It is kept as `asked` before the server is told, so that a kill leaves no block of unknown settings. `changes` are
    the hot settings as they were sent, `effective` is what the server said afterwards. The failure of a change, or of
    the server under it, is held against nobody: the slot then gets a launch of its own. It is `forgiven` as a launch's
    is.
    """

    id: int
    launch_id: int
    slot: Slot
    at: float
    changes: Mapping[str, Any]
    state: ReconfigurationState
    effective: Mapping[str, Any] | None
    failure: Failure | None
    forgiven: bool = False


@dataclass(frozen=True)
class Confirmation:
    """One round of confirmation: each finalist against the baseline, `pairs` times, from `first_repetition` on.

    A pair with a block that never passes its gates is lost; up to `spares` further ones take the place of such. So does
    one more for each that was `abandoned`, its worker being gone. All blocks of a pair are of one place.
    """

    round: int
    finalists: tuple[str, ...]
    first_repetition: int
    pairs: int
    spares: int = 0
    abandoned: tuple[int, ...] = ()

    @property
    def repetitions(self) -> range:
        """The repetitions that belong to this round, spares included; a pair's index is its repetition."""
        count = self.pairs + self.spares + len(self.abandoned)
        return range(self.first_repetition, self.first_repetition + count)


@dataclass(frozen=True)
class Import:
    """What an earlier study knew of a candidate, and what became of it here (`inherit.py`); `value` is of there."""

    source: str
    candidate_id: str
    state: str
    why: str
    value: float | None


@dataclass(frozen=True)
class StoredEvent:
    """Something that happened, for the record and for `status`.

    `message` is for a person; what a study decides by is in `facts`, which events of earlier versions do not have.
    """

    id: int
    at: float
    kind: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyData:
    """All records of one study at one moment."""

    name: str
    uid: str
    created_at: float
    state: StudyState
    reason: str
    seed: int
    space: Space
    fingerprint: Mapping[str, Any]
    budget: Budget
    candidates: Mapping[str, Candidate]
    trials: tuple[StoredTrial, ...]
    launches: tuple[StoredLaunch, ...]
    blocks: Mapping[int, StoredBlock]
    confirmations: tuple[Confirmation, ...]
    verdicts: tuple[Verdict, ...] = ()
    events: tuple[StoredEvent, ...] = field(default=(), repr=False)
    sampler: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """(candidate, kind) → what is known of its answers; `study/quality.py` says what."""
    reconfigurations: tuple[Reconfiguration, ...] = ()

    imports: tuple[Import, ...] = ()
    """What was known from earlier studies when this one began."""

    @property
    def baseline(self) -> Candidate:
        """What every candidate is compared with."""
        return self.space.baseline

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels of concurrency."""
        return self.space.workload.concurrency

    @cached_property
    def by_slot(self) -> Mapping[Slot, tuple[StoredBlock, ...]]:
        """The blocks of every slot, valid or not, in order of time."""
        found: dict[Slot, list[StoredBlock]] = {}
        for stored in sorted(self.blocks.values(), key=lambda stored: stored.order):
            slot = Slot(stored.candidate_id, stored.role, stored.repetition)
            found.setdefault(slot, []).append(stored)
        return {slot: tuple(blocks) for slot, blocks in found.items()}

    def block(self, slot: Slot, concurrency: int) -> StoredBlock | None:
        """The valid block of a slot at a level."""
        return next((b for b in self.by_slot.get(slot, ()) if b.concurrency == concurrency and b.block.valid), None)

    def at(self, place: str) -> tuple[StoredLaunch, ...]:
        """The launches at a place, in order."""
        return tuple(launch for launch in self.launches if launch.place == place)

    def facts_of(self, kind: str) -> tuple[Mapping[str, Any], ...]:
        """The facts of the events of a kind that have any, in order."""
        return tuple(event.facts for event in self.events if event.kind == kind and event.facts)

    @property
    def measured(self) -> tuple[StoredTrial, ...]:
        """The trials that were launched, in order, the baseline not among them."""
        return tuple(trial for trial in self.trials if trial.kind == "measured")

    @property
    def scored(self) -> tuple[StoredTrial, ...]:
        """The trials whose candidates are compared with the baseline: those launched here, and imported ones."""
        return tuple(trial for trial in self.trials if trial.kind in ("measured", "imported"))

    @cached_property
    def failed(self) -> frozenset[str]:
        """The candidates whose own trial was told that they do not work, whatever a look at them said before."""
        told = (trial for trial in self.measured if not trial.running)
        return frozenset(trial.candidate_id for trial in told if trial.constraints.get("launch", 0.0) > 0)

    @property
    def simulated(self) -> bool:
        """Whether any launch was of a simulated server, or will be."""
        return self.space.kind == "simulated" or any(
            launch.record is not None and launch.record.simulated for launch in self.launches
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds during which a server of this study was up; of one that is up, until its last block."""
        own = [launch for launch in self.launches if launch.state != "imported"]
        return sum(launch.duration_s or self._so_far_s(launch) for launch in own)

    def _so_far_s(self, launch: StoredLaunch) -> float:
        if launch.ended_at is not None:
            return 0.0
        ends = [b.block.started_at + b.block.window_s for b in self.on_launch.get(launch.id, ())]
        return max(0.0, max([launch.ready_at or 0.0, *ends]) - launch.started_at)

    @cached_property
    def launch(self) -> Mapping[int, StoredLaunch]:
        """The launches by id."""
        return {launch.id: launch for launch in self.launches}

    @cached_property
    def on_launch(self) -> Mapping[int, tuple[StoredBlock, ...]]:
        """The blocks of every launch, valid or not, in order of time."""
        found: dict[int, list[StoredBlock]] = {}
        for stored in sorted(self.blocks.values(), key=lambda stored: stored.order):
            found.setdefault(stored.launch_id, []).append(stored)
        return {launch: tuple(blocks) for launch, blocks in found.items()}

    @cached_property
    def baseline_turns(self) -> Mapping[tuple[str, int], tuple[StoredBlock, ...]]:
        """The baseline's valid blocks of the search on launches of this study, by place and level, in order of time."""
        found: dict[tuple[str, int], list[StoredBlock]] = {}
        for stored in sorted(self.blocks.values(), key=lambda stored: stored.block.started_at):
            launch = self.launch[stored.launch_id]
            mine = stored.candidate_id == self.baseline.id and stored.role == "screen" and launch.state != "imported"
            if mine and stored.block.valid and stored.block.tokens_per_s > 0:
                found.setdefault((launch.place, stored.concurrency), []).append(stored)
        return {key: tuple(blocks) for key, blocks in found.items()}

    @cached_property
    def changed_to(self) -> Mapping[Slot, tuple[Reconfiguration, ...]]:
        """The times when a running server was put to a slot's settings, by slot, in order."""
        found: dict[Slot, list[Reconfiguration]] = {}
        for each in self.reconfigurations:
            found.setdefault(each.slot, []).append(each)
        return {slot: tuple(several) for slot, several in found.items()}

    @cached_property
    def launched_for(self) -> Mapping[Slot, tuple[StoredLaunch, ...]]:
        """The launches of every slot, in order."""
        found: dict[Slot, list[StoredLaunch]] = {}
        for launch in self.launches:
            found.setdefault(launch.slot, []).append(launch)
        return {slot: tuple(several) for slot, several in found.items()}

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs that the blocks make up; a function of the blocks alone."""
        from tuner.study.score import pairs_of

        return pairs_of(self)

    @cached_property
    def screened(self) -> Mapping[str, tuple[Pair, ...]]:
        """The pairs of the search by candidate, of a level the first look's before the screening's."""
        found: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            if pair.role != "confirm":
                found.setdefault(pair.candidate_id, []).append(pair)
        return {candidate: tuple(pairs) for candidate, pairs in found.items()}

    @cached_property
    def scores(self) -> dict[str, Any]:
        """What was scored already of these records (`score.score`)."""
        return {}

    def settings_of(self, candidate_id: str) -> Mapping[str, Setting]:
        """The settings of a candidate of this study."""
        return self.candidates[candidate_id].settings
