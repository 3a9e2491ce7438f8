"""What a study does next: a pure function of its records, so that a killed study goes on as if nothing had happened.

Order: the baseline, then candidates until the search is over, then confirmation of the best. Who gives more to a study
whose confirmation was cut has that finished before it searches on. Launches for the confirmation are set aside from the
start: a search without a confirmed winner has no answer.

Where the engine has hot settings, a launch of the search stays up and serves every candidate in its reach, with the
baseline in between (`hot.py`); a launch of the confirmation never does, for there the launch is what is repeated.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tuner.bench.gates import ENVIRONMENT_GATES
from tuner.judge.recommend import NEAR
from tuner.launch.kinds import KINDS
from tuner.records import SEARCH, Failure, Gate
from tuner.study.canary import answers
from tuner.study.data import BUDGET, CONFIRMATION, Confirmation, Slot, StoredLaunch, StoredTrial, StudyData
from tuner.study.hot import Running, baseline_slot, fresh_baseline, given_up, group, has_baseline, row, served
from tuner.study.policy import BASELINE_EVERY, CLAIM_PAIRS, Policy, planned_pairs, usual
from tuner.study.quality import refused
from tuner.study.race import looks_due, race, too_slow
from tuner.study.score import Score, has_goodput, late_at, level_ratios, score
from tuner.study.signature import signature
from tuner.study.wear import unworn, worn

WORTH = math.log(1.01)
"""A gain in the search that is worth having."""

EVERYTHING = "every candidate of the space has been tried"
"""Why a search ended that more launches would not help."""

STRAY = 2
"""Proposals in a row, in the reach of a launch that is up, that needed no measuring: then one that has not been tried
is drawn from there. After twice as many the search leaves that launch, for they cannot be listed."""

_ASKED_TO_END = frozenset((-1, -2, -15, 129, 130, 143))
"""Exit statuses of SIGHUP, SIGINT and SIGTERM, which somebody sends; the kernel sends SIGKILL."""


@dataclass(frozen=True)
class Begin:
    """Make trial `number`: the baseline for 0, else what the sampler proposes.

    `within` is the launch that the proposal should be in reach of; `only`: it must be, for no launch is left.
    """

    number: int
    within: int | None = None
    only: bool = False


@dataclass(frozen=True)
class Launch:
    """Launch the slot's candidate, and leave the server up: it serves further slots."""

    slot: Slot


@dataclass(frozen=True)
class Measure:
    """Measure `levels` of a slot, in this order: on the launch `on`, which is up, or on one of its own (None).

    With `look` it is a first look: short, and once.
    """

    slot: Slot
    levels: tuple[int, ...]
    on: int | None = None
    look: bool = False


@dataclass(frozen=True)
class Tell:
    """Trial `number` has all its blocks, or has failed for good: tell Optuna."""

    number: int


@dataclass(frozen=True)
class Confirm:
    """Begin a round of confirmation; `reason` says why the search before it ended."""

    confirmation: Confirmation
    reason: str


@dataclass(frozen=True)
class TakeOver:
    """Trial `number` is of a worker that is gone: measure it here, as this repetition of its slot."""

    number: int
    repetition: int


@dataclass(frozen=True)
class Abandon:
    """A pair of the confirmation is of a worker that is gone, or whose machine is broken: do without it."""

    round: int
    repetition: int
    why: str


@dataclass(frozen=True)
class Wait:
    """Nothing can be done here before another worker is ready; `why` says what it does."""

    why: str


@dataclass(frozen=True)
class Stop:
    """The study should not go on now.

    `kind` says why: the baseline or the machine fails, several candidates in a row fail alike, or the tuner ends again
    and again at the same place. `alike` are the candidates that failed so, in order.
    """

    kind: Literal["baseline_failed", "environment_broken", "same_failure", "interruptions"]
    failure: Failure
    slot: Slot
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """Nothing is left to do; `reason` says why the search ended."""

    reason: str


Step = Begin | Launch | Measure | Tell | Confirm | TakeOver | Abandon | Wait | Stop | Done


@dataclass(frozen=True)
class SlotState:
    """How far a slot is: levels still to measure, and what has ended it before all were.

    `unusable` is the failure of a level whose blocks never passed their gates: the slot is over, and has no result.
    `failure` ends it otherwise: of a launch that is not tried again, or of blocks that the machine spoiled; `broken`
    says that the machine is to blame.
    """

    missing: tuple[int, ...]
    failure: Failure | None = None
    broken: bool = False
    unusable: Failure | None = None


def next_step(
    data: StudyData,
    policy: Policy,
    *,
    exhausted: bool,
    hot: frozenset[str] = frozenset(),
    serving: int | None = None,
    exhausted_here: bool = False,
    place: str = "",
    busy: Collection[str] = (),
) -> Step:
    """What to do now.

    Args:
        data: the study's records.
        policy: the constants of its profile.
        exhausted: every candidate of the space has been tried.
        hot: the settings that can be changed on a running server.
        serving: the launch whose server is up for whoever asks; None when none is.
        exhausted_here: every candidate in the reach of the launch that the search stays with has been tried.
        place: where whoever asks launches servers.
        busy: the places of the study's other living workers.
    """
    running = Running(data.launch[serving], hot) if serving is not None else None
    now = _Now(exhausted, hot_in(data, hot), running, exhausted_here, place, frozenset(busy))
    step = _next_step(data, policy, now)
    slot = step.slot if isinstance(step, (Measure, Launch)) else None
    if slot is not None and (count := interruptions(data, slot)) >= policy.interruptions:
        said = f"{count} launches in a row ended because the tuner itself did, with no new block in between"
        return Stop("interruptions", Failure("interrupted", "bench", said, blame="environment"), slot)
    return step


def hot_in(data: StudyData, hot: frozenset[str]) -> frozenset[str]:
    """What counts as hot in a study: nothing where no parameter is, or where changes keep failing."""
    if given_up(data) or not any(parameter.name in hot for parameter in data.space.parameters):
        return frozenset()
    return hot


@dataclass(frozen=True)
class _Now:
    """What the records do not say; see `next_step`."""

    exhausted: bool
    hot: frozenset[str]
    running: Running | None
    exhausted_here: bool
    place: str = ""
    busy: frozenset[str] = frozenset()


def interruptions(data: StudyData, slot: Slot) -> int:
    """Launches of the slot, the last of the study, that the tuner's own end cut short before they gave it a block."""
    fruitful = {b.launch_id for each in (slot.look, slot) for b in data.by_slot.get(each, ())}
    own = data.launched_for.get(slot, ())
    count = 0
    for launch in reversed(data.launches if not own else data.at(own[-1].place)):
        if launch.slot != slot or launch.state != "interrupted" or launch.forgiven or launch.id in fruitful:
            break
        count += 1
    return count


def _next_step(data: StudyData, policy: Policy, now: _Now) -> Step:
    if not data.trials:
        return Begin(0)
    running = [trial for trial in data.trials if trial.running]
    for trial in running:
        if trial.place == now.place:
            # One that was taken over may come before anything else that is measured here.
            first = None if trial.kind == "baseline" else _first_baseline(data, policy, now)
            return _within_budget(data, policy, trial, first or _go_on(data, policy, trial, now))
    for trial in running:
        if trial.place not in now.busy:
            return TakeOver(trial.number, _fresh_repetition(data, trial))
    if (step := _round(data, policy, now)) is not None:
        return step
    refresh = _refresh(data, policy, now)
    here = bool(now.hot) and not now.exhausted_here
    serves = here and now.running is not None and not worn(data, now.running.launch.id)
    needs = 2 if _starts(refresh) else 0 if serves else 1
    pending = sum(not data.launched_for.get(trial.slot) for trial in running)  # begun elsewhere, about to launch
    over = search_over(data, policy, exhausted=now.exhausted, needs=needs and needs + pending)
    if over is None:
        return refresh or _begin(data, policy, now.hot if here else frozenset(), now.place)
    if running and isinstance(refresh, Stop):
        return refresh
    if running:
        return Wait("the last candidates of the search are measured elsewhere")
    return _confirm(data, policy, over)


def _refresh(data: StudyData, policy: Policy, now: _Now) -> Step | None:
    """The screening of the baseline that comes before the next candidate; None where none is due.

    One that needs a launch is done without where that would be the last, or none is left, and there is an earlier one:
    a candidate is compared with that, and is worth more.
    """
    due = baseline_due(data, now)
    step = _measure(data, policy, due, now) if due is not None else None
    if not _starts(step) or launches_left(data, policy) >= 2:
        return step
    begun = baselines_at(data, now.place)
    known = bool(begun) and all(data.block(begun[0], level) is not None for level in data.levels)
    return None if known else step


def _starts(step: Step | None) -> bool:
    """Whether a step launches a server."""
    return isinstance(step, Launch) or (isinstance(step, Measure) and step.on is None)


def _within_budget(data: StudyData, policy: Policy, trial: StoredTrial, step: Step) -> Step:
    """A step of a trial, unless it takes a launch that the search has no more: whatever failed before, none is lent it.

    The trial ends then without a result, and nobody is to blame (`out_of_launches`).
    """
    if not _starts(step) or launches_left(data, policy, baseline=trial.kind == "baseline") > 0:
        return step
    if trial.kind != "baseline":
        return Tell(trial.number)
    tried = data.launched_for.get(trial.slot, ())
    last = next((one.failure for one in reversed(tried) if one.failure is not None), None)
    said = f"all {data.budget.launches} launches of the budget are used; give more with --launches"
    why = f"{last.kind}: {last.message}; {said}" if last else said
    return Stop("baseline_failed", Failure("env_broken", "start", why, blame="environment"), trial.slot)


def launches_left(data: StudyData, policy: Policy, *, baseline: bool = False) -> int:
    """Launches that the search may still make; what is kept for the confirmation is not among them.

    The baseline itself may have those, for without it there is nothing to confirm.
    """
    reserve = 0 if baseline else 2 * planned_pairs(data.budget.launches, policy)
    return data.budget.launches - reserve - launches_used(data)


def for_each_launch(data: StudyData, policy: Policy, untried: int | None) -> float:
    """Candidates that each launch left to the search has to serve, if all that the budget wants of those `untried` are
    to be tried (None: more than any budget)."""
    wanted = data.budget.candidates - len(data.measured)
    return min(wanted, wanted if untried is None else untried) / max(1, launches_left(data, policy))


def out_of_launches(data: StudyData, policy: Policy, trial: StoredTrial) -> str:
    """Why a trial that is told now has no result, where it is for want of launches alone; "" otherwise."""
    state = slot_state(data, policy, trial.slot)
    looks, whole, _ = to_measure(data, policy, trial.slot)
    if trial.kind == "baseline" or state.failure or state.unusable or not (looks or whole):
        return ""
    failures = [each.failure for each in data.launched_for.get(trial.slot, ()) if each.failure]
    failures += [each.failure for each in data.changed_to.get(trial.slot, ()) if each.failure]
    before = f" after {failures[-1].kind}" if failures else ""
    return f"a launch of its own is needed{before}, and the search has none left"


def _first_baseline(data: StudyData, policy: Policy, now: _Now) -> Step | None:
    """The first screening of the baseline at this place; None once there is one, or another has begun."""
    begun = baselines_at(data, now.place)
    return _measure(data, policy, begun[0] if begun else fresh_baseline(data), now) if len(begun) < 2 else None


def _fresh_repetition(data: StudyData, trial: StoredTrial) -> int:
    """The repetition as which a trial begins anew: none of its blocks is mixed with those of another place."""
    begun = [slot for slot in (*data.launched_for, *data.changed_to) if slot.role == "screen"]
    mine = [slot.repetition for slot in begun if slot.candidate_id == trial.candidate_id]
    return max(mine) + 1 if trial.repetition in mine else trial.repetition


def _begin(data: StudyData, policy: Policy, hot: frozenset[str], place: str) -> Begin:
    number, launch = len(data.trials), group(data, place)
    if not hot or launch is None:
        return Begin(number)
    only = launches_left(data, policy) < 1
    enough = served(data, hot, launch) >= row(data) or idle(data) >= 2 * STRAY
    return Begin(number, launch.id if only or not enough else None, only)


def idle(data: StudyData) -> int:
    """Trials since the last one that needed measuring, or since another budget was given."""
    since = data.trials[budget_since(data) :]
    for count, trial in enumerate(reversed(since)):
        if trial.launched:
            return count
    return len(since)


def _go_on(data: StudyData, policy: Policy, trial: StoredTrial, now: _Now) -> Step:
    slot = trial.slot
    state = slot_state(data, policy, slot)
    if state.broken and state.failure is not None:
        return Stop("environment_broken", state.failure, slot)
    if (failure := state.failure or state.unusable) is not None:
        if trial.kind == "baseline":
            return Stop("baseline_failed", failure, slot)
        alike = failing_alike(data, trial.candidate_id)
        learned = any(t.value is not None and t.constraints.get("launch", 1) <= 0 for t in data.measured)
        if len(alike) >= (policy.same_failures_later if learned else policy.same_failures):
            return Stop("same_failure", failure, slot, alike)
        return Tell(trial.number)
    looks, whole, _ = to_measure(data, policy, slot)
    if looks or whole:
        return _screen(data, policy, slot, looks or whole, now, look=bool(looks))
    return _baseline_behind(data, policy, slot, now) or Tell(trial.number)


def to_measure(data: StudyData, policy: Policy, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """What is left of a slot: levels to look at, levels to measure, and why others need no measuring any more."""
    missing = slot_state(data, policy, slot).missing
    if not policy.look or slot.role != "screen" or slot.candidate_id == data.baseline.id or not missing:
        return (), missing, ""
    order = level_order(data, slot)
    due = looks_due(data, slot)
    if due:
        return tuple(level for level in order if level in due), (), ""
    found = race(data, slot, disqualified(data, policy) | refused(data).keys())
    return (), tuple(level for level in missing if level in found.levels), found.why


def share_of_window(data: StudyData, policy: Policy, slot: Slot, level: int, *, look: bool) -> float:
    """What of a block's usual window is measured: behind a valid look, what that has left."""
    if look:
        return policy.look
    return 1.0 - policy.look if data.block(slot.look, level) is not None else 1.0


def _screen(
    data: StudyData, policy: Policy, slot: Slot, missing: tuple[int, ...], now: _Now, *, look: bool = False
) -> Step:
    """A slot of the search: on the server that is up where it is in reach, with the baseline before it when due.

    Where candidates race, the server stays up until it is known whether this one has to be measured further.
    """
    races = policy.look > 0 and slot.candidate_id != data.baseline.id
    if not now.hot and not races:
        return Measure(slot, missing)
    running = now.running
    if running is None or not running.serves(data, slot):
        return Launch(slot)
    own = running.launch.slot == slot and not running.changed(data)
    before = None if own else _hot_baseline(data, policy, running)
    return before or Measure(slot, missing, running.launch.id, look)


def _baseline_behind(data: StudyData, policy: Policy, slot: Slot, now: _Now) -> Step | None:
    """The baseline behind the candidate that a launch was made for: it came first, so that a crash is its own."""
    running = now.running
    if not now.hot or running is None or running.launch.slot != slot or has_baseline(data, running.launch):
        return None
    return _hot_baseline(data, policy, running)


def _hot_baseline(data: StudyData, policy: Policy, running: Running) -> Step | None:
    """The baseline on a running server, where it is due; what cannot be measured there is done without."""
    slot = baseline_slot(data, running)
    state = slot_state(data, policy, slot) if slot is not None else None
    if slot is None or state is None:
        return None
    if state.broken and state.failure is not None:
        return Stop("environment_broken", state.failure, slot)
    if state.failure or state.unusable or not state.missing:
        return None
    return Measure(slot, state.missing, running.launch.id)


def failing_alike(data: StudyData, candidate_id: str) -> tuple[str, ...]:
    """The latest candidates of the search, this one last, whose launches all ended in the same failure.

    The machine's own faults, and those that the user has been told of already, end the row. What shows that a path or a
    setting of NCCL does not work here (a canary) is not of it.
    """
    expected = answers(data)
    if candidate_id in expected:
        return ()
    last: dict[str, StoredLaunch] = {}
    for launch in data.launches:
        if launch.slot.role == "screen" and launch.slot.candidate_id != data.baseline.id:
            last[launch.slot.candidate_id] = launch
    alike: list[str] = []
    for trial in reversed(data.measured):
        if trial.candidate_id in expected:
            continue
        ended = last.get(trial.candidate_id)
        if ended is None or ended.failure is None or ended.forgiven or ended.failure.blame != "candidate":
            break
        if signature(ended.failure) != signature(last[candidate_id].failure or ended.failure):
            break
        alike.append(trial.candidate_id)
    return tuple(reversed(alike))


def _measure(data: StudyData, policy: Policy, slot: Slot, now: _Now) -> Step | None:
    """The step of a slot of the baseline outside of its trial; None when it is complete."""
    state = slot_state(data, policy, slot)
    if (failure := state.failure or state.unusable) is not None:
        return Stop("environment_broken" if state.broken else "baseline_failed", failure, slot)
    return _screen(data, policy, slot, state.missing, now) if state.missing else None


def baseline_due(data: StudyData, now: _Now | None = None) -> Slot | None:
    """The screening of the baseline that the next candidate will be compared with, if there is to be another one.

    Every place has its own: the first comes before its first candidate. A launch that can be put to the baseline has it
    measured on itself; others compare with the latest of their place, as is done where nothing is hot.
    """
    every, place = BASELINE_EVERY[data.space.profile], now.place if now else ""
    begun = baselines_at(data, place)
    if not begun:
        return fresh_baseline(data)
    latest = begun[-1]
    if now is None or not now.hot:
        due = sum(trial.place == place for trial in data.measured) // every if every else 0
        if due < len(begun):
            return begun[due]
        return fresh_baseline(data)
    if any(data.block(latest, level) is None for level in data.levels):
        return latest
    if not every:
        return None
    here = {launch.id for launch in data.at(place)}
    blocks = [b for b in data.blocks.values() if b.role in SEARCH and b.launch_id in here]
    blocks.sort(key=lambda b: b.order)
    last = max((i for i, b in enumerate(blocks) if b.candidate_id == data.baseline.id and b.block.valid), default=-1)
    if len({b.candidate_id for b in blocks[last + 1 :]} - {data.baseline.id}) < every:
        return None
    return (baseline_slot(data, now.running) if now.running else None) or fresh_baseline(data)


def baselines_at(data: StudyData, place: str) -> list[Slot]:
    """The screenings of the baseline that have begun at a place, in order."""
    here = {launch.id for launch in data.at(place)}
    begun = {launch.slot for launch in data.at(place)}
    begun |= {each.slot for each in data.reconfigurations if each.launch_id in here}
    mine = [slot for slot in begun if slot.role == "screen" and slot.candidate_id == data.baseline.id]
    return sorted(mine, key=lambda slot: slot.repetition)


def slot_state(data: StudyData, policy: Policy, slot: Slot) -> SlotState:
    """How far a slot is; failures that were forgiven do not count."""
    launches = [launch for launch in data.launched_for.get(slot, ()) if not launch.forgiven]
    own = {launch.id for launch in launches}
    changes = [each for each in data.changed_to.get(slot, ()) if not each.forgiven and each.state != "failed"]
    counted = own | {each.launch_id for each in changes}
    missing = []
    for level in level_order(data, slot):
        if data.block(slot, level) is not None:
            continue
        attempts = [b for b in data.by_slot.get(slot, ()) if b.concurrency == level and b.launch_id in counted]
        if len(attempts) >= policy.block_attempts:
            invalid = invalid_block(attempts[-1].block.gates, level, len(attempts))
            # What a server gives after a change is held against nobody: the slot's own launch tells.
            blamed = invalid.blame == "candidate" and sum(b.launch_id in own for b in attempts) >= policy.block_attempts
            if blamed or slot.role == "confirm":  # a lost pair is made up for by a spare one
                return SlotState((), unusable=invalid)
            if invalid.blame != "candidate" and len(attempts) >= policy.block_attempts + policy.environment_retries:
                return SlotState((), invalid, broken=True)
        missing.append(level)
    failures = [launch.failure for launch in launches if launch.state == "failed" and launch.failure is not None]
    if missing and failures and not _may_retry(failures, policy):
        last = failures[-1]
        if _kills_itself(data, slot, last):
            said = f"{last.message}; ended so {len(failures)} times, while others work here"
            return SlotState(tuple(missing), replace(last, message=said, blame="candidate", retryable=False))
        return SlotState(tuple(missing), last, last.blame == "environment")
    return SlotState(tuple(missing))


def _kills_itself(data: StudyData, slot: Slot, last: Failure) -> bool:
    """Whether what ends this candidate's servers by SIGKILL, again and again, is its own doing: others work.

    The kernel leaves nothing in the log of a server that it ends for want of memory.
    """
    if last.kind != "killed_externally" or last.exit_status in _ASKED_TO_END or slot.candidate_id == data.baseline.id:
        return False
    return any(one.state == "done" and one.slot.candidate_id != slot.candidate_id for one in data.launches)


def _may_retry(failures: Sequence[Failure], policy: Policy) -> bool:
    last = failures[-1]
    # Whoever measures makes failures of its own, and knows nothing of second tries.
    retryable = last.retryable or (last.kind in KINDS and KINDS[last.kind].retryable)
    alike = sum(failure.blame == last.blame for failure in failures)
    limit = policy.environment_retries if last.blame == "environment" else policy.candidate_retries
    return retryable and alike <= limit


def invalid_block(gates: Sequence[Gate], level: int, attempts: int) -> Failure:
    """The failure of a level that was measured `attempts` times and never passed its gates, named after the first.

    The machine is to blame where nothing but its own gates failed: it is too busy, or slower than its client.
    """
    red = [gate for gate in gates if not gate.ok]
    said = "; ".join(f"{gate.name} {gate.value:g}, limit {gate.limit:g} ({gate.detail})" for gate in red)
    message = f"no valid block at concurrency {level} in {attempts} attempts: {said}"
    if all(gate.name in ENVIRONMENT_GATES for gate in red):
        return Failure(red[0].name, "bench", message, blame="environment", retryable=True)
    return Failure(red[0].name, "bench", message)


def level_order(data: StudyData, slot: Slot) -> tuple[int, ...]:
    """The levels in the order in which a slot measures them: shuffled by the study's seed, equal within a pair."""
    if slot.role == "edge":
        return (slot.repetition,)
    levels = list(data.levels)
    repetition = slot.repetition if slot.role == "confirm" else 0
    random.Random(f"{data.seed}/{slot.whole.role}/{repetition}").shuffle(levels)
    return tuple(levels)


def launches_used(data: StudyData) -> int:
    """Launches that count against the budget: all but those that ended because the tuner itself did."""
    return sum(launch.state not in ("interrupted", "imported") for launch in data.launches)


def search_over(data: StudyData, policy: Policy, *, exhausted: bool, needs: int = 1, candidates: int = 1) -> str | None:
    """Why no further candidate, which takes `needs` launches, is tried; None while the search goes on.

    Where that takes no launch, time for so many `candidates` has to be left.
    """
    reserve = 2 * planned_pairs(data.budget.launches, policy)
    used = launches_used(data)
    if len(data.measured) >= data.budget.candidates:
        return f"{len(data.measured)} of {data.budget.candidates} candidates tried"
    if used + needs > data.budget.launches - reserve:
        # One that breaks a guard works all the same, and may be confirmed at a level.
        works = any(trial.value is not None and trial.constraints.get("launch", 1.0) <= 0 for trial in data.measured)
        kept = f", {reserve} kept for confirmation" if works else f", {reserve} left over: no candidate works"
        kept = kept if reserve else ""
        return f"{used} of {data.budget.launches} launches used{kept}"
    if exhausted:
        return EVERYTHING
    if said := fruitless(data):
        return said
    if (unused := idle(data)) >= policy.max_idle_trials:
        return f"the last {unused} proposals were known or ruled out{_ruled_out_by(data, unused)}"
    if (unpaid := without_gain(data)) >= policy.no_gain:
        at = " at any level" if data.space.objective.maximize == "pareto" else ""
        return (
            f"the last {unpaid} candidates brought no gain of {100 * math.expm1(WORTH):.0f} % over the best before them"
            f"{at}, so more search is not expected to pay"
        )
    return _out_of_hours(data, policy, needs, candidates)


def _out_of_hours(data: StudyData, policy: Policy, needs: int, candidates: int) -> str | None:
    """Why no further candidate is tried, where the hours do not hold it; None where they do.

    Once there is something to confirm, time for the planned pairs is kept.
    """
    if data.budget.hours is None:
        return None
    works = any(not trial.running and trial.constraints.get("launch", 1.0) <= 0 for trial in data.scored)
    kept_s = 2 * planned_pairs(data.budget.launches, policy) * usual_launch_s(data) if works else 0.0
    elsewhere = sum(trial.running and bool(data.launched_for.get(trial.slot)) for trial in data.measured)
    next_s = (needs + elsewhere) * search_launch_s(data) + (0.0 if needs else candidates * search_slot_s(data))
    if data.elapsed_s + kept_s + next_s <= 3600 * data.budget.hours:
        return None
    spent = f"{data.elapsed_s / 3600:.2g} of {data.budget.hours:g} hours"
    if not data.measured:
        return f"the baseline alone took {spent}, and left none for a candidate"
    return f"{spent} used" + (f", {(kept_s + next_s) / 3600:.2g} h kept for what remains" if kept_s else "")


def in_time(data: StudyData, launches: int) -> bool:
    """Whether the hours hold so many launches."""
    hours = data.budget.hours
    return hours is None or data.elapsed_s + launches * usual_launch_s(data) <= 3600 * hours


def claim_in_time(data: StudyData, pairs: int) -> bool:
    """Whether the hours hold, to within a launch, as many of the `pairs` of one finalist as a claim takes."""
    return in_time(data, 2 * min(pairs, CLAIM_PAIRS) - 1)


def _more_hours(data: StudyData, launches: int) -> str:
    """How a study gets the time for so many launches."""
    hours = math.ceil((data.elapsed_s + launches * usual_launch_s(data)) / 36) / 100
    return f"tuner resume {data.name} --hours {hours:g} gives it the time"


def budget_since(data: StudyData) -> int:
    """The number of the first trial under the budget as it is; 0 where no other was ever given."""
    facts = data.facts_of(BUDGET)
    return int(facts[-1]["from_trial"]) if facts else 0


def due_again(data: StudyData) -> frozenset[str]:
    """Candidates that had no launch left under an earlier budget, and have had no trial since."""
    since = budget_since(data)
    lost = {trial.candidate_id for trial in data.trials[:since] if trial.kind == "out_of_launches"}
    if not lost:
        return frozenset()
    return frozenset(lost - {t.candidate_id for t in data.trials if t.launched or t.number >= since})


def _ruled_out_by(data: StudyData, count: int) -> str:
    """What ruled out the last trials, the commonest first; "" where no more than half of them were."""
    why = Counter(trial.why for trial in data.trials[-count:] if trial.kind == "illegal")
    if 2 * why.total() <= count:
        return ""
    return ", " + "; ".join(f"{number} by: {reason}" for reason, number in why.most_common(3))


FRUITLESS = "fruitless"
"""The event that keeps why, by the model of the search, more of it cannot pay."""


def fruitless(data: StudyData) -> str:
    """Why more search cannot pay, as the model once said; "" where it did not, or a larger budget was given since."""
    for event in reversed(data.events):
        if event.kind in (FRUITLESS, BUDGET):
            return event.message if event.kind == FRUITLESS else ""
    return ""


def may_be_fruitless(data: StudyData, policy: Policy) -> bool:
    """Whether the model is to be asked if more search can pay: enough was measured for it to be believed.

    Who gives a larger budget to a search that ended so wants more of it all the same.
    """
    if data.confirmations or any(event.kind == FRUITLESS for event in data.events):
        return False
    works = sum(trial.value is not None and trial.constraints.get("launch", 1.0) <= 0 for trial in data.measured)
    return works >= policy.fewest and not any(trial.running for trial in data.trials)


def without_gain(data: StudyData) -> int:
    """Candidates of the search, the last ones, that brought no gain worth having over the best before them.

    For `pareto` a gain at any level is one. Those before another budget was given do not count.
    """
    best: dict[int | None, float] = {}
    since, first = 0, budget_since(data)
    front = data.space.objective.maximize == "pareto"
    for trial in data.measured:
        if trial.running:
            continue
        since += trial.number >= first
        if not trial.feasible or trial.value is None:
            continue
        values: list[tuple[int | None, float]] = [(None, trial.value)]
        if front:
            values += level_ratios(data, trial.candidate_id).items()
        if gains := {at: value for at, value in values if value > best.get(at, 0.0) + WORTH}:
            best |= gains
            since = 0
    return since


def usual_launch_s(data: StudyData) -> float:
    """Seconds that a launch of this study usually takes that serves one whole slot; 0 before one has been measured."""
    changed = {each.launch_id for each in data.reconfigurations}
    ended = [each.duration_s for each in data.launches if each.state == "done" and each.id not in changed]
    raced = any(stored.role == "look" for stored in data.blocks.values())
    if len(ended) > 1 and not changed and not raced:
        return usual(ended)
    starts = [each.ready_at - each.started_at for each in data.launches if each.ready_at is not None]
    return usual(starts) + whole_slot_s(data) if starts and data.blocks else 0.0


def whole_slot_s(data: StudyData) -> float:
    """Seconds that all levels of a slot take on a server that is up; 0 before a block has been measured.

    Of blocks with a whole window: the baseline's and the confirmation's, where candidates race.
    """
    blocks = list(data.blocks.values())
    if any(stored.role == "look" for stored in blocks):
        blocks = [b for b in blocks if b.role == "confirm" or b.candidate_id == data.baseline.id] or blocks
    each = [stored.block.warmup_s + stored.block.window_s for stored in blocks]
    return len(data.levels) * sum(each) / len(each) if each else 0.0


def search_slot_s(data: StudyData) -> float:
    """Seconds that one more candidate takes on a server that is up: what those before it took that ended well."""
    told = [t for t in data.measured if not t.running and t.constraints.get("launch", 1.0) <= 0]
    looked = [t.slot for t in told if data.by_slot.get(t.slot.look)]
    if not looked:
        return whole_slot_s(data)
    blocks = [b.block for slot in looked for each in (slot.look, slot) for b in data.by_slot.get(each, ())]
    return sum(block.warmup_s + block.window_s for block in blocks) / len(looked)


def search_launch_s(data: StudyData) -> float:
    """Seconds that a launch of the search takes that serves one candidate; 0 before one has been measured.

    The first start of all may have found a cold cache: until there is another one, only what is measured on it counts.
    """
    if sum(launch.ready_at is not None and launch.state != "imported" for launch in data.launches) < 2:
        return search_slot_s(data)
    each = usual_launch_s(data)
    return max(0.0, each - whole_slot_s(data)) + search_slot_s(data) if each else 0.0


def affordable(data: StudyData) -> int:
    """Launches that the budget still has room for."""
    left = data.budget.launches - launches_used(data)
    if data.budget.hours is not None and (each := usual_launch_s(data)):
        left = min(left, int((3600 * data.budget.hours - data.elapsed_s) // each))
    return left


def finalists(data: StudyData, policy: Policy, pairs: int) -> tuple[str, ...]:
    """Whom to confirm, best first: the best overall, then the best at each level, as far as launches allow.

    Out are: candidates that failed, in the search or in confirmation, those whose answers may not win, and for the
    overall place those that break a guard or have no goodput. Who is out of sight of the baseline is not worth the
    launches. Who misses the guard on speed-ups by no more than noise, and promises more than those that keep it, is
    confirmed behind the best of them, or in its place where that one promises no gain.
    """
    scores = {t.candidate_id: score(data, t.candidate_id) for t in data.scored if not t.running}
    dropped = disqualified(data, policy) | refused(data).keys()
    scores = {c: s for c, s in scores.items() if s.constraints["launch"] <= 0 and c not in dropped}
    scores = {c: unworn(data, c, s) for c, s in scores.items()}
    able = {c: s for c, s in scores.items() if all(v <= 0 for v in s.constraints.values()) and has_goodput(data, c)}
    overall = [c for c, s in able.items() if s.value > NEAR]
    chosen = [max(overall, key=lambda c: scores[c].value)] if overall else []
    best = max((scores[c].value for c in chosen), default=0.0)
    if (close := _nearly_able(data, scores, able)) and scores[close].value > max(best, 0.0):
        chosen.insert(int(best > 0), close)
    late = {c: late_at(data, c) for c in scores}
    best_at: dict[int, str] = {}
    for level in data.levels:
        faster = [c for c, s in scores.items() if s.ratios[level] > 0]
        if faster:
            # Who was over a limit by a hair may keep it yet, and comes behind all who kept it.
            best_at[level] = max(faster, key=lambda c: (level not in late[c], scores[c].ratios[level]))
    for level in sorted(best_at, key=lambda level: -scores[best_at[level]].ratios[level]):
        if best_at[level] not in chosen:
            chosen.append(best_at[level])
    confirmed = {c for confirmation in data.confirmations for c in confirmation.finalists}
    room = affordable(data) // pairs - 1
    fresh = [c for c in chosen if c not in confirmed]
    # The search has kept enough for its best, whatever retries have cost; all others live on what is left.
    most = max(room, 1 if chosen[:1] == fresh[:1] and not dropped else 0)
    return tuple(fresh[: min(most, policy.max_finalists)])


def _nearly_able(data: StudyData, scores: Mapping[str, Score], able: Collection[str]) -> str | None:
    """The best by its score of those that keep all guards but the one on speed-ups, which they miss within noise."""
    near = {c: s for c, s in scores.items() if c not in able and has_goodput(data, c)}
    only = [c for c, s in near.items() if all(v <= 0 for name, v in s.constraints.items() if name != "min_speedup")]
    only = [c for c in only if not too_slow(data, c)]
    return max(only, key=lambda c: scores[c].value, default=None)


def disqualified(data: StudyData, policy: Policy) -> set[str]:
    """Finalists that failed in confirmation."""
    return {
        finalist
        for confirmation in data.confirmations
        for finalist in confirmation.finalists
        for repetition in confirmation.repetitions
        if (failure := slot_state(data, policy, Slot(finalist, "confirm", repetition)).failure)
        and failure.blame == "candidate"
    }


def slots_of(data: StudyData, policy: Policy, confirmation: Confirmation) -> list[Slot]:
    """The launches of a round, in order: the baseline, then the finalists, and every other pair mirrored (ABBA BAAB).

    Which pairs are mirrored follows the Thue-Morse sequence: a drift, linear or not, then cancels. Finalists that have
    failed are left out, and so is what remains of a lost pair; a spare pair follows for it.
    """
    dropped = disqualified(data, policy)
    order = (data.baseline.id, *(finalist for finalist in confirmation.finalists if finalist not in dropped))
    slots: list[Slot] = []
    kept = 0
    for i, repetition in enumerate(confirmation.repetitions if len(order) > 1 else ()):
        if kept == confirmation.pairs:
            break
        mirrored = i.bit_count() % 2 == 1
        pair = [Slot(candidate, "confirm", repetition) for candidate in (order[::-1] if mirrored else order)]
        if repetition in confirmation.abandoned:
            continue
        lost = [n for n, slot in enumerate(pair) if slot_state(data, policy, slot).unusable is not None]
        slots += pair[: lost[0]] if lost else pair
        kept += not lost
    return slots


def open_slots(data: StudyData, policy: Policy, confirmation: Confirmation) -> list[Slot]:
    """The launches that a round still wants."""
    return [slot for slot in slots_of(data, policy, confirmation) if slot_state(data, policy, slot).missing]


def owed(data: StudyData, policy: Policy) -> int:
    """Launches that the rounds of confirmation which have begun still want."""
    return sum(len(open_slots(data, policy, confirmation)) for confirmation in data.confirmations)


_ELSEWHERE = "the last pairs of the confirmation are measured elsewhere"


def _round(data: StudyData, policy: Policy, now: _Now) -> Step | None:
    """What a round of confirmation that is not finished does next; None where none is, or the hours hold no more of it.

    It comes before any search: who gives a study more hours goes on with what they cut.
    """
    for confirmation in data.confirmations:
        elsewhere = 0
        slots = slots_of(data, policy, confirmation)
        for slot in slots:
            state = slot_state(data, policy, slot)
            owner = pair_place(data, slot.repetition)
            sides = sum(other.repetition == slot.repetition for other in slots)
            if owner is None and not _may_begin(data, confirmation, sides, elsewhere):
                return Wait(_ELSEWHERE) if elsewhere else None
            if owner in (None, now.place):
                if state.failure is not None:
                    return Stop("environment_broken" if state.broken else "baseline_failed", state.failure, slot)
                if state.missing:
                    return Measure(slot, state.missing)
            elif state.missing or state.failure is not None:
                if owner not in now.busy:
                    why = f"pair {slot.repetition + 1} was begun at {owner}, where nobody is at work any more"
                    return Abandon(confirmation.round, slot.repetition, f"{why}; another one takes its place")
                elsewhere += 1
        if elsewhere:
            return Wait(_ELSEWHERE)
    return None


def _confirm(data: StudyData, policy: Policy, over: str) -> Step:
    """Begins a round of confirmation, where there is somebody to confirm; the end of the study otherwise."""
    over = _ended_before(data) or over
    for confirmation in data.confirmations:
        if left := open_slots(data, policy, confirmation):
            whole = f"{whole_pairs(data, confirmation)} of {confirmation.pairs} pairs"
            said = f"the hours ended its confirmation after {whole}"
            return Done(f"{over}; {said}: {_more_hours(data, len(left))}")
    planned = planned_pairs(data.budget.launches, policy)
    if planned and launches_left(data, policy) >= 0 and (chosen := finalists(data, policy, planned)):
        if not claim_in_time(data, planned):
            said = f"no time is left to confirm the best candidate in {planned} pairs"
            return Done(f"{over}; {said}: {_more_hours(data, 2 * planned)}")
        last = data.confirmations[-1] if data.confirmations else None
        first = last.repetitions.stop if last else 0
        return Confirm(Confirmation(len(data.confirmations), chosen, first, planned, policy.spare_pairs), over)
    return Done(over)


def _ended_before(data: StudyData) -> str:
    """Why the search had ended when the last round began; "" where it went on, or has got a larger budget, since."""
    for event in reversed(data.events):
        if event.kind == BUDGET:
            break
        if event.kind == CONFIRMATION and event.facts:
            return str(event.facts["ended"]) if event.facts["trials"] == len(data.trials) else ""
    return ""


def _may_begin(data: StudyData, confirmation: Confirmation, sides: int, elsewhere: int) -> bool:
    """Whether the hours hold another pair of so many `sides`, beside launches that are still to be made `elsewhere`.

    All but its last launch has to fit; of the pair that makes a claim possible, nothing: all before would be in vain.
    """
    claims = whole_pairs(data, confirmation) + 1 == min(confirmation.pairs, CLAIM_PAIRS)
    return in_time(data, elsewhere + (0 if claims else sides - 1))


def whole_pairs(data: StudyData, confirmation: Confirmation) -> int:
    """Pairs of a round that are measured at every level."""
    known = {(pair.index, pair.concurrency) for pair in data.pairs if pair.role == "confirm"}
    return sum(all((i, level) in known for level in data.levels) for i in confirmation.repetitions)


def pair_place(data: StudyData, repetition: int) -> str | None:
    """Where a pair of the confirmation is measured: where it was begun; None before that."""
    return next(
        (
            launch.place
            for launch in data.launches
            if launch.slot.role == "confirm" and launch.slot.repetition == repetition
        ),
        None,
    )
