"""What this machine may not bear is tried by itself before anything is searched on it.

Whether an all-reduce path or a setting of NCCL works is not known before a server has come up with it, and each
candidate on one that does not would cost a launch. So the first candidate with another value than the baseline's is the
one that differs from the baseline by as little else as can be: the canary. It is measured like any other. Where it
fails, no candidate with that value is launched, unless another worker has seen one work; until it has ended, none is
begun. Such a failure is an answer, and none of those that stop a study for failing alike (`answers`).

Every path and every word of a setting of NCCL has a canary; of more than `MOST_NUMBERS` numbers only the least and the
greatest have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuner.engines.base import UNSET
from tuner.engines.nccl import PATH, searched
from tuner.records import Candidate, Setting
from tuner.space import Listed, Parameter, Space
from tuner.study.data import StoredTrial, StudyData

MOST_NUMBERS = 4
"""So many numbers of one setting are each proven; of more, the two ends, since what lies between seldom fails alone."""

Value = tuple[str, Setting]
"""A setting and one of its values."""


def to_prove(space: Space) -> list[Value]:
    """What is tried by itself, in order: paths first, since settings of NCCL hang on them."""
    known = {(name, base) for name in _names(space) if (base := baseline_value(space, name)) is not None}
    parameters = {parameter.name: parameter for parameter in space.parameters}
    values = [(name, value) for name in _names(space) for value in _values(parameters[name])]
    return [each for each in values if each not in known]


def _names(space: Space) -> list[str]:
    names = [parameter.name for parameter in space.parameters]
    return [name for name in (PATH,) if name in names] + searched(names)


def _values(parameter: Parameter) -> tuple[Setting, ...]:
    values = parameter.domain if parameter.domain is not None else parameter.ends
    numbers = sorted((v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)), key=float)
    dropped = set(numbers[1:-1]) if len(numbers) > MOST_NUMBERS else set()
    return tuple(value for value in values if value not in dropped)


def baseline_value(space: Space, name: str) -> Setting | None:
    """What the baseline has: a variable that neither it nor the engine section names is unset."""
    if name in space.baseline.settings:
        return space.baseline.settings[name]
    if name.startswith("env."):
        given = space.env.get(name.removeprefix("env."))
        return UNSET if given is None else given
    found: Setting | None = space.args.get(name)
    return found


def nearest_ones(space: Space) -> dict[str, Listed]:
    """Candidates near the baseline with each value to prove, by id: for a space that cannot be listed."""
    paths: list[dict[str, Setting]] = [{}, *({PATH: value} for name, value in to_prove(space) if name == PATH)]
    found = [space.near_baseline({**path, name: value}) for name, value in to_prove(space) for path in paths]
    return {each.candidate.id: each for each in found if each is not None and not space.forbidden(each.candidate)}


@dataclass(frozen=True)
class Proofs:
    """What the trials say of the values to prove: which work, which were refuted (why), which are being tried."""

    works: frozenset[Value]
    refuted: Mapping[Value, str]
    running: frozenset[Value]
    wanted: tuple[Value, ...]


NOTHING = Proofs(frozenset(), {}, frozenset(), ())
"""Nothing has been tried."""


def proofs(data: StudyData) -> Proofs:
    """What is known of each value.

    A canary that failed refutes its value. Where it had something else too of which nothing was known, another value or
    a setting that the baseline does not have and that no candidate has worked with, it refutes neither, and the value
    has another canary: one that fails twice in such company is refuted as well. A drafter that does nothing refutes no
    value, which has another canary too. What was forgiven was never tried.
    """
    if not (proven := to_prove(data.space)):
        return NOTHING
    values = {c: _among(data, candidate, proven) for c, candidate in data.candidates.items()}
    working = _working(data)
    works = {v for t in _worked(data) for v in values[t.candidate_id]}
    running = {v for t in data.trials if t.running for v in values[t.candidate_id]} - works
    refuted: dict[Value, str] = {}
    failed: Counter[Value] = Counter()
    tried: Counter[Value] = Counter()
    for trial in data.trials:
        unknown = [each for each in values[trial.candidate_id] if each not in works]
        if trial.running or trial.kind in ("illegal", "out_of_launches") or any(each in refuted for each in unknown):
            continue
        if _forgiven(data, trial):
            continue
        why = _fault(data, trial)
        alone = len(unknown) == 1 and not _news(data, data.candidates[trial.candidate_id], working) - set(unknown)
        for each in unknown:
            counts = why and why != "spec_inactive" and (alone or failed[each] == 1)
            if counts and tried[each] == failed[each] < 2:
                name, value = each
                refuted[each] = f"{name}={value} was tried by itself in trial {trial.number} and failed ({why})"
            tried[each] += 1
            failed[each] += bool(why)
    wanted = [
        each
        for each in proven
        if each not in works and each not in refuted and each not in running
        if not tried[each] or tried[each] == failed[each] == 1
    ]
    return Proofs(frozenset(works), refuted, frozenset(running), tuple(wanted))


def answers(data: StudyData) -> frozenset[str]:
    """The candidates whose failure says something of a value to prove, and of nothing else."""
    if not (proven := to_prove(data.space)):
        return frozenset()
    working = _working(data)
    news = {c: _news(data, candidate, working) for c, candidate in data.candidates.items()}
    return frozenset(c for c, new in news.items() if len(new) == 1 and new <= set(proven))


def next_canary(data: StudyData, universe: Mapping[str, Listed], found: Proofs) -> Listed | None:
    """The canary of the first value that needs one and has a candidate left; None where none has."""
    proven = to_prove(data.space)
    tried = {trial.candidate_id for trial in data.trials}
    working, failing = _working(data), _failing(data)
    for wanted in found.wanted:

        def near(each: Listed, wanted: Value = wanted) -> tuple[int, int, int, int]:
            others = [v for v in _among(data, each.candidate, proven) if v != wanted and v not in found.works]
            new = _news(data, each.candidate, working) - {wanted}
            return len(others), len(new & failing), len(new), _apart(data.space, each.candidate)

        fit = [
            each
            for i, each in universe.items()
            if i not in tried and wanted in (mine := _among(data, each.candidate, proven))
            if not any(value in found.refuted or value in found.running for value in mine)
        ]
        if fit:
            return min(fit, key=near)
    return None


def ruled_out(space: Space, candidate: Candidate, values: Mapping[Value, str]) -> str | None:
    """Why a candidate is not launched, where one of its values is among the refuted."""
    return next((why for (name, value), why in values.items() if _value(space, candidate, name) == value), None)


def in_proof(space: Space, candidate: Candidate, values: frozenset[Value]) -> bool:
    """Whether one of a candidate's values is being tried by itself, so that it has to wait."""
    return any(_value(space, candidate, name) == value for name, value in values)


def _among(data: StudyData, candidate: Candidate, proven: list[Value]) -> list[Value]:
    return [(name, value) for name, value in proven if _value(data.space, candidate, name) == value]


def _fault(data: StudyData, trial: StoredTrial) -> str:
    """The candidate's own failure that ended a trial; "" where it was the machine's, or none."""
    if trial.kind == "known_crash":
        return trial.why
    launches = data.launched_for.get(trial.slot, ())
    failures = [launch.failure for launch in launches if launch.failure is not None and not launch.forgiven]
    return failures[-1].kind if failures and failures[-1].blame == "candidate" else ""


def _forgiven(data: StudyData, trial: StoredTrial) -> bool:
    """Whether a trial failed by what its study was stopped for, and the user has seen to since."""
    launches = data.launched_for.get(trial.slot, ())
    failed = [launch for launch in launches if launch.failure is not None]
    return bool(failed) and trial.constraints.get("launch", 1.0) > 0 and all(launch.forgiven for launch in failed)


def _worked(data: StudyData) -> list[StoredTrial]:
    return [trial for trial in data.trials if trial.constraints.get("launch", 1.0) <= 0]


def _working(data: StudyData) -> set[Value]:
    """Every setting, with its value, that a server has worked with."""
    return {each for trial in _worked(data) for each in data.candidates[trial.candidate_id].settings.items()}


def _failing(data: StudyData) -> set[Value]:
    """Every setting, with its value, of the candidates that did not work."""
    failed = [t for t in data.measured if not t.running and t.constraints.get("launch", 1.0) > 0]
    return {each for trial in failed for each in data.candidates[trial.candidate_id].settings.items()}


def _news(data: StudyData, candidate: Candidate, working: set[Value]) -> set[Value]:
    """What a candidate has and the baseline has not, and no server has worked with."""
    names = set(_differing(data.space, candidate)) & candidate.settings.keys()
    return {(name, candidate.settings[name]) for name in names} - working


def _value(space: Space, candidate: Candidate, name: str) -> Setting | None:
    found: Setting | None = candidate.settings.get(name, space.args.get(name))
    return found


def _apart(space: Space, candidate: Candidate) -> int:
    """In how many settings a candidate differs from the baseline; a variable that both leave unset is none of them."""
    return sum(1 for _ in _differing(space, candidate))


def _differing(space: Space, candidate: Candidate) -> Iterator[str]:
    ours, theirs = candidate.settings, space.baseline.settings
    for name in {*ours, *theirs}:
        unset = UNSET if name.startswith("env.") else None
        if ours.get(name, unset) != theirs.get(name, unset):
            yield name
