"""What a new study takes from an earlier one: a function of the earlier one's records and of what is now.

Measurements are taken where everything that they depend on is the same. They keep their own baseline and are a place
of their own, so that no pair is ever made of an old block and a new one. Where something has changed since, they are
stale: none is taken, but the best of their candidates are tried first. What the new space does not offer is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal

from tuner.records import Candidate, Setting
from tuner.space import Space
from tuner.study.data import Import, Slot, StoredBlock, StoredLaunch, StoredTrial, StudyData
from tuner.study.place import Place
from tuner.study.sampler import Proposal, proposal_of
from tuner.study.score import Score, score
from tuner.study.store import IMPORTED, StudyStore

State = Literal["taken", "stale", "outside", "failed", "unfinished"]

MOST_TRIED = 256
"""Combinations of values without effect that are tried, at most, to make up a candidate that does not say them."""

FIRST = 3
"""Stale candidates that a study tries first."""


@dataclass(frozen=True)
class Found:
    """One candidate of the earlier study: whether it applies, and why it does not.

    `value` is its log speed-up there; `proposal` makes it up in the new space.
    """

    candidate: Candidate
    state: State
    why: str = ""
    value: float | None = None
    proposal: Proposal | None = None


@dataclass(frozen=True)
class Inheritance:
    """What an earlier study has for a new one. `changed` says what makes its measurements stale."""

    study: str
    changed: tuple[str, ...]
    found: tuple[Found, ...]

    def of(self, state: State) -> tuple[Found, ...]:
        """The candidates of one state."""
        return tuple(one for one in self.found if one.state == state)

    @property
    def sentences(self) -> list[str]:
        """What is taken and what is not, and why, for a person."""
        taken, stale = self.of("taken"), self.of("stale")
        said = [f"study '{self.study}': {_candidates(len(taken))} taken as measured there"]
        if stale:
            first = "; the best of them are tried first" if any((one.value or 0.0) > 0 for one in stale) else ""
            said.append(
                f"{_candidates(len(stale))} measured there {'is' if len(stale) == 1 else 'are'} stale and not mixed in "
                f"({'; '.join(self.changed)}){first}"
            )
        outside = self.of("outside")
        if outside:
            reasons = list(dict.fromkeys(one.why for one in outside))
            more = f"; and {len(reasons) - 3} reasons more" if len(reasons) > 3 else ""
            said.append(f"{_candidates(len(outside))} left out: {'; '.join(reasons[:3])}{more}")
        if failed := self.of("failed"):
            said.append(f"{_candidates(len(failed))} without a result there, left out")
        if unfinished := self.of("unfinished"):
            said.append(f"{_candidates(len(unfinished))} not measured at every level of the new study, left out")
        if not self.found:
            said.append("no candidate was measured there")
        return said


def best_of_stale(imports: Iterable[Import]) -> list[str]:
    """The candidates that are tried before any other, best first: those that were faster than their baseline."""
    stale = [(one.value, one.candidate_id) for one in imports if one.state == "stale" and (one.value or 0.0) > 0]
    return [candidate for _, candidate in sorted(stale, key=lambda each: -(each[0] or 0.0))[:FIRST]]


def taken_from(data: StudyData, source: str) -> bool:
    """Whether a study was begun with what an earlier one had, even where that was nothing."""
    begun = any(facts["source"] == source for facts in data.facts_of(IMPORTED))
    return begun or any(one.source == source for one in data.imports)


def respelled(data: StudyData, space: Space) -> dict[str, Candidate]:
    """The candidates of a study, by their ids, whose numbers a person writes otherwise: as the space has them now.

    Earlier versions kept sums of steps as they come out in binary (0.7999999999999999 for 0.8).
    """
    found: dict[str, Candidate] = {}
    known = set(data.candidates)
    for name, candidate in data.candidates.items():
        values = space.written(candidate.settings)
        if all(type(value) is type(now := values[key]) and value == now for key, value in candidate.settings.items()):
            continue
        written = Candidate(values)
        if name != data.baseline.id and written.id not in known:
            found[name] = written
            known.add(written.id)
    return found


def as_written(old: StudyData, space: Space) -> StudyData:
    """The study's search with the numbers of the space's ranges as a person writes them, its baseline as it is."""
    moved = respelled(old, space)
    if not moved:
        return old

    def named(name: str) -> str:
        return moved[name].id if name in moved else name

    def slot(of: Slot) -> Slot:
        return replace(of, candidate_id=named(of.candidate_id))

    return replace(
        old,
        candidates={named(name): moved.get(name, candidate) for name, candidate in old.candidates.items()},
        trials=tuple(
            replace(each, candidate_id=named(each.candidate_id), params=space.written(each.params))
            for each in old.trials
        ),
        launches=tuple(replace(each, slot=slot(each.slot)) for each in old.launches),
        reconfigurations=tuple(replace(each, slot=slot(each.slot)) for each in old.reconfigurations),
        blocks={i: replace(each, candidate_id=named(each.candidate_id)) for i, each in old.blocks.items()},
        confirmations=tuple(replace(each, finalists=tuple(map(named, each.finalists))) for each in old.confirmations),
    )


def inherit(old: StudyData, space: Space, now: Mapping[str, Any]) -> Inheritance:
    """What the study `old` has for a study of `space` that is begun under the fingerprint `now`."""
    changed = tuple(changes_since(old, space, now))
    found = [_found(old, trial, space, bool(changed)) for trial in old.scored]
    return Inheritance(old.name, changed, tuple(found))


def changes_since(old: StudyData, space: Space, now: Mapping[str, Any]) -> list[str]:
    """What figures depend on and is not as it was, in sentences."""
    then, before = old.fingerprint, old.space
    pairs: list[tuple[str, Any, Any]] = [
        ("engine", before.kind, space.kind),
        ("engine version", then.get("engine_version"), now.get("engine_version")),
        ("model", before.model, space.model),
        ("baseline", dict(before.baseline.settings), dict(space.baseline.settings)),
        ("fixed settings", before.args, space.args),
        ("environment", before.env, space.env),
        ("profile", before.profile, space.profile),
        ("prompts", before.workload.prompts, space.workload.prompts),
        ("max_tokens", before.workload.max_tokens, space.workload.max_tokens),
        ("temperature", before.workload.temperature, space.workload.temperature),
        ("container image", then.get("image"), now.get("image")),
    ]
    old_machine, machine = then.get("hardware") or {}, now.get("hardware") or {}
    pairs += [(f"hardware, {key}", old_machine[key], machine.get(key)) for key in old_machine if key in machine]
    if before.container is not None and space.container is not None:  # of one alone the image tells
        was_in, is_in = (each.model_dump(exclude={"image"}) for each in (before.container, space.container))
        pairs += [(f"container, {key}", was_in[key], is_in[key]) for key in is_in]
    return [f"{name}: was {was!r}, is now {is_now!r}" for name, was, is_now in pairs if was != is_now]


def _found(old: StudyData, trial: StoredTrial, space: Space, stale: bool) -> Found:
    candidate = old.candidates[trial.candidate_id]
    if trial.running or score(old, candidate.id).constraints["launch"] > 0:
        return Found(candidate, "failed")
    value = score(old, candidate.id).value
    proposal, why = in_space(space, candidate, trial.params)
    if proposal is None:
        return Found(candidate, "outside", why, value)
    if stale:
        return Found(candidate, "stale", value=value, proposal=proposal)
    levels = {pair.concurrency for pair in old.pairs if pair.role != "confirm" and pair.candidate_id == candidate.id}
    if not set(space.workload.concurrency) <= levels:
        return Found(candidate, "unfinished", value=value, proposal=proposal)
    return Found(candidate, "taken", value=value, proposal=proposal)


def in_space(
    space: Space, candidate: Candidate, params: Mapping[str, Setting] | None = None
) -> tuple[Proposal | None, str]:
    """The candidate as a proposal of the space; None, and why, where the space does not have it.

    `params` are values that made it up once, those without effect included. What a candidate does not say, for it has
    no effect, is asked for with any value.
    """
    values: dict[str, Setting] = {**candidate.settings, **(params or {})}
    for parameter in space.parameters:
        value = values.get(parameter.name)
        if value is not None and parameter.offered(value) is None:
            return None, f"the space does not offer {parameter.name}={value}"
    silent = {p.name: p.domain or p.ends[:1] for p in space.parameters if p.name not in values}
    values |= {name: some[0] for name, some in silent.items()}
    made = space.asked(_Asked(values))
    missing = [name for name in made.values if name in silent]
    for some in islice(product(*(silent[name] for name in missing)), MOST_TRIED):
        if made.candidate.id != candidate.id:
            made = space.asked(_Asked({**values, **dict(zip(missing, some, strict=True))}))
    if made.candidate.id != candidate.id and missing:
        return None, f"the space asks for {', '.join(missing)}, which was not tried there"
    if made.candidate.id != candidate.id:
        return None, "the space cannot make it up: " + _difference(candidate, made.candidate)
    if why := space.forbidden(candidate):
        return None, why
    return proposal_of(space, made), ""


class _Asked:
    """Answers a space's questions with given values."""

    def __init__(self, values: Mapping[str, Setting]) -> None:
        self.values = values

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """The given value."""
        return self.values[name]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> Any:
        """The given value."""
        return self.values[name]

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> Any:
        """The given value."""
        return self.values[name]


def _difference(old: Candidate, new: Candidate) -> str:
    names = sorted(n for n in {*old.settings, *new.settings} if old.settings.get(n) != new.settings.get(n))
    return ", ".join(f"{n} was {old.settings.get(n)!r}, would be {new.settings.get(n)!r}" for n in names)


def _candidates(count: int) -> str:
    return "1 candidate" if count == 1 else f"{count} candidates"


def measurements(old: StudyData, taken: Inheritance, first: int) -> tuple[list[StoredLaunch], list[StoredBlock]]:
    """The launches and blocks that the taken candidates' pairs of the search are made of, in order of time.

    They come as a place of their own; the baseline's screenings are numbered from `first` on, every candidate's is 0.
    """
    ids = {one.candidate.id for one in taken.of("taken")}
    used = {
        block
        for pair in old.pairs
        if pair.role != "confirm" and pair.candidate_id in ids
        for block in (pair.baseline_block, pair.candidate_block)
    }
    blocks = sorted((old.blocks[block] for block in used), key=lambda stored: stored.order)
    baseline = old.baseline.id
    numbers = sorted({b.repetition for b in blocks if b.candidate_id == baseline})

    def repetition(candidate: str, number: int) -> int:
        known = candidate == baseline and number in numbers
        return first + numbers.index(number) if known else first + len(numbers) if candidate == baseline else 0

    launches = []
    for launch in old.launches:
        if launch.id in {stored.launch_id for stored in blocks}:
            number = repetition(launch.slot.candidate_id, launch.slot.repetition)
            place = f"{old.name}:{launch.place}"[:255]
            launches.append(replace(launch, slot=replace(launch.slot, repetition=number), place=place))
    moved = [replace(b, repetition=repetition(b.candidate_id, b.repetition)) for b in blocks]
    return launches, moved


def import_study(store: StudyStore, old: StudyData, space: Space, now: Mapping[str, Any], place: Place) -> list[str]:
    """Takes what applies of an earlier study into a new one; returns what was taken and what not, in sentences.

    Again, or after a kill in between, it adds nothing twice. The new study's own baseline is begun at `place`.
    """
    old = as_written(old, space)
    data = store.data()
    if not data.trials:
        store.put_candidate(data.baseline)
        store.trials.begin("baseline", data.baseline.id, None, place.name)
    found = inherit(old, space, now)
    if not taken_from(data, old.name):
        slots = {*data.launched_for, *(Slot(b.candidate_id, b.role, b.repetition) for b in data.blocks.values())}
        numbers = [slot.repetition for slot in slots if slot.candidate_id == data.baseline.id]
        known = {trial.candidate_id for trial in data.trials}
        fresh = replace(found, found=tuple(one for one in found.found if one.candidate.id not in known))
        launches, blocks = measurements(old, fresh, max(numbers, default=0) + 1)
        names = {one.candidate.id for one in fresh.found}
        names |= {launch.slot.candidate_id for launch in launches} | {block.candidate_id for block in blocks}
        rows = [Import(old.name, f.candidate.id, f.state, f.why, f.value) for f in fresh.found]
        candidates = [old.candidates[name] for name in sorted(names)]
        store.put_imports(old.name, rows, candidates, launches, blocks, "; ".join(found.sentences))
        data = store.data()
    at = {launch.id: launch.place for launch in data.launches}
    told = {trial.candidate_id for trial in data.trials}
    for one in found.of("taken"):
        slot = Slot(one.candidate.id, "screen", 0)
        kept = data.by_slot.get(slot) or data.by_slot.get(slot.look)
        if one.candidate.id in told or not kept or one.proposal is None:
            continue
        where = at[kept[0].launch_id]
        result = score_of(data, StoredTrial(-1, one.candidate.id, "imported", False, {}, None, {}, place=where))
        store.trials.record("imported", one.candidate.id, one.proposal, result, f"measured in study {old.name}", where)
    return found.sentences


def score_of(data: StudyData, trial: StoredTrial) -> Score:
    """The score that a trial would have among the others."""
    return score(replace(data, trials=(*data.trials, trial)), trial.candidate_id)
