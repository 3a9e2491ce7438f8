"""Carries out what the planner says, one step after the other, and keeps every fact the moment it is known."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tuner.engines.base import Change, Reconfigurable
from tuner.errors import EnvironmentBroken, LaunchFailed, StudyStopped
from tuner.judge.quality import Answers
from tuner.launch.kinds import failure as kind_failure
from tuner.plain import plain
from tuner.records import SHOWN, Block, Candidate, Failure, Gate, LaunchRecord
from tuner.search.evidence import Evidence
from tuner.space import Listed
from tuner.study.ahead import SCOPE
from tuner.study.canary import NOTHING, Proofs, in_proof, nearest_ones, next_canary, proofs, ruled_out
from tuner.study.crashes import CrashesSeen, CrashMemory, Elsewhere, crashes_seen, most_crashes
from tuner.study.data import LaunchState, Slot, StoredLaunch, StoredTrial, StudyData, StudyState
from tuner.study.database import finite, storage_problem
from tuner.study.decide import compared, recommendation, verdicts_of
from tuner.study.edges import edge_due
from tuner.study.effect import Effects
from tuner.study.engine import (
    StudyEngine,
    hot_settings,
    illegal,
    launch_record,
    legality,
    not_in_effect,
    pointless,
    speculates,
    unsettled,
)
from tuner.study.evidence import Reader, costs_of, evidence_of, goal_of, goals_of
from tuner.study.garbage import uncollected
from tuner.study.hot import Running, cold_values, group, reachable, scope_to_try
from tuner.study.inherit import best_of_stale, in_space, respelled
from tuner.study.journal import Entry, Journal
from tuner.study.place import Place
from tuner.study.plain import NO_PLAIN, out_of_race, plain_due
from tuner.study.planner import (
    FRUITLESS,
    STRAY,
    Abandon,
    Begin,
    Confirm,
    Done,
    Launch,
    Measure,
    Step,
    Stop,
    TakeOver,
    Tell,
    Wait,
    due_again,
    for_each_launch,
    hot_in,
    idle,
    invalid_block,
    launches_left,
    launches_used,
    may_be_fruitless,
    next_step,
    out_of_launches,
    search_over,
    share_of_window,
    slot_state,
    to_measure,
)
from tuner.study.policy import Policy
from tuner.study.probe import NoAnswer, Probe, check
from tuner.study.progress import Event, Observer, Silent
from tuner.study.quality import ANSWERS, COMPARED, JUDGED, VETO, wanted
from tuner.study.quality import verdicts as quality_verdicts
from tuner.study.sampler import PATIENCE, Proposal, Proposer, draw_untried, proposal_of
from tuner.study.schedule import Planned, part_of, plain_beside, planned
from tuner.study.score import FAILED, ILLEGAL, Score, score
from tuner.study.store import AlreadyMeasured, StudyStore
from tuner.study.words import change, described
from tuner.study.world import ENDING_S, RunningServer, StopReport, World

HOST = "127.0.0.1"

KEPT = 2
"""Candidates of a budget, and launches where each takes one, with which the search turns to schedules."""

WAIT_S = 5.0
"""How long a worker that has nothing to do waits before it looks again."""


@dataclass
class _Up:
    """The server that is up: its launch, how it was launched, and whose settings it has now (`slot`, `record`).

    `change` is the reconfiguration that gave it those; None while it is as it was launched. `asked` is still
    to be sent.
    """

    launch: int
    server: RunningServer
    record: LaunchRecord
    slot: Slot
    change: int | None = None
    asked: Change | None = None


class Controller:
    """Runs one study to its end.

    Args:
        store: the study's records. Whoever calls holds its lease.
        engine: how candidates become launches.
        world: what acts on the machine.
        policy: the constants of the study's profile.
        folder: where logs go.
        observer: is told what happens.
        check: called before each step; raises when the study is not ours any more.
        alert: called twice a second within a block; raises when it has to end.
        shield: delays interruptions while facts are kept and servers are ended.
        probe: asks servers for answers, for the output-quality gate; None to do without it.
        crashes: what other studies have learned to crash; None to try everything.
        place: where servers are launched, and with which devices; None for a study of one worker.
        others: the places of the study's other living workers.
        siblings: whether one of them launches its servers on this host.
        turn: held while it is decided what is next, so that no two workers decide the same.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        store: StudyStore,
        engine: StudyEngine,
        world: World,
        *,
        policy: Policy,
        folder: Path,
        observer: Observer | None = None,
        check: Callable[[], None] = lambda: None,
        alert: Callable[[], None] = lambda: None,
        shield: Callable[[], AbstractContextManager[None]] = nullcontext,
        crashes: CrashMemory | None = None,
        probe: Probe | None = None,
        place: Place | None = None,
        others: Callable[[], frozenset[str]] = frozenset,
        siblings: Callable[[], bool] = lambda: False,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.engine = engine
        self.world = world
        self.policy = policy
        self.folder = folder
        self.observer = observer or Silent()
        self.check = check
        self.alert = alert
        self.shield = shield
        self.crashes = crashes
        self.probe = probe
        self.place = place.name if place else ""
        self.place_env = place.env if place else {}
        self.others = others
        self.siblings = siblings
        self.turn = turn
        self.pause = pause
        self._waiting = ""
        self._unsettled: StopReport | None = None
        self._names: dict[str, str] = {}
        self._up: _Up | None = None
        self._asked_of: tuple[int, int] | None = None
        self._reader = Reader()
        self._known: tuple[StudyData | None, Proofs] = (None, NOTHING)
        self._asked_for: tuple[StudyData | None, Planned | None] = (None, None)
        self._shown_beside: tuple[StudyData | None, Candidate | None] = (None, None)

    @cached_property
    def journal(self) -> Journal:
        """The write-ahead record of the blocks that this worker measures."""
        return Journal(self.folder, self.store.data().uid, ",".join(self.place.partition("/")[2:]))

    def run(self) -> StudyData:
        """Works until nothing is left to do; returns the finished study.

        Raises:
            StudyStopped: the baseline cannot be measured, candidates fail alike, or the tuner itself is ended again and
                again at the same place.
            EnvironmentBroken: the machine is at fault. Both can be run again.
        """
        with self.turn():
            data = self._recover()
            if isinstance(self._next(data), Done) and data.state == "done":
                return data
            self._note_scope(data)
            if (why_not := out_of_race(data.space, self.engine)) and not any(e.kind == NO_PLAIN for e in data.events):
                self._event(NO_PLAIN, why_not)
            self.store.set_state("running")
        try:
            return self._work()
        except BaseException:
            if self._up is not None:
                with self.shield():
                    self._end(self._up.slot, self._up.launch, self._up.server, interrupted=True)
            raise

    def _note_scope(self, data: StudyData) -> None:
        """Keeps what there is to try, once, whoever has begun the first trial: an import does so too."""
        if self._universe is None or data.facts_of(SCOPE):
            return
        to_try = [each.candidate for i, each in self._universe.items() if i != data.baseline.id]
        found = scope_to_try(to_try, hot_in(data, self._hot), data.baseline)
        self.store.event(SCOPE, found.sentence, found.facts)

    def _work(self) -> StudyData:
        while True:
            self.check()
            with self.turn():
                data = self._tidied(self.store.data())
                self.observer.state(data)
                step = self._next(data)
                if isinstance(step, Done) and self._up is None:
                    return data if data.state == "done" else self._finish(data, step.reason)
                first = self._first(step)
                if first is None:
                    act = self._decide(data, step)
            (first or act)()

    def _first(self, step: Step) -> Callable[[], object] | None:
        """What has to be done before a step, and takes time; afterwards another step may be due."""
        if self._up is not None and not _needs(step, self._up.launch):
            return self._take_down
        launches = isinstance(step, Launch) or (isinstance(step, Measure) and step.on is None)
        return self._settle if launches and self._unsettled is not None else None

    def _decide(self, data: StudyData, step: Step) -> Callable[[], object]:
        """Keeps what a step decides, at once; returns what it does, which takes time."""
        if not isinstance(step, Wait):
            self._waiting = ""
        match step:
            case Begin():
                if (edge := self._edge(data, step)) is not None:
                    return edge
                if not self._begin(data, step):
                    return lambda: self._wait("what would be tried next is measured elsewhere")
            case Launch(slot=slot):
                launch = self.store.begin_launch(slot, self.place)
                return lambda: self._launch(data, slot, launch)
            case Measure(slot=slot, levels=levels, on=None):
                launch = self.store.begin_launch(slot, self.place)
                return lambda: self._launch_for(data, slot, launch, levels)
            case Measure(slot=slot, levels=levels, look=look):
                self._ask(data, slot)
                return lambda: self._measure(data, slot, levels, look=look)
            case Tell(number=number):
                self._tell(data, data.trials[number])
            case Confirm(confirmation=confirmation, reason=reason):
                self.store.put_confirmation(confirmation, {"ended": reason, "trials": len(data.trials)})
                named = " and ".join(self._named(data, c) for c in confirmation.finalists)
                most = "" if data.budget.hours is None else "up to "
                self._say(
                    "confirmation",
                    f"confirming {named} in {most}{confirmation.pairs} pairs with the baseline: the search "
                    "measured each candidate once and so picks the lucky, and only fresh launches beside the "
                    "baseline's can tell",
                )
            case TakeOver(number=number, repetition=repetition):
                self.store.trials.take_over(number, self.place, repetition)
                whom = self._named(data, data.trials[number].candidate_id)
                self._event("taken_over", f"trial {number} ({whom}): its worker is gone; it is measured anew here")
            case Abandon():
                self.store.abandon(step.round, step.repetition, step.why)
                self._say("abandoned", step.why)
            case Wait(why=why):
                return lambda: self._wait(why)
            case Stop():
                self._stop(data, step)
        return _nothing

    def _wait(self, why: str) -> None:
        if why != self._waiting:
            self._waiting = why
            self._say("waiting", f"waiting: {why}")
        self.pause(WAIT_S)

    def _tidied(self, data: StudyData) -> StudyData:
        """Closes what workers that are gone have left open; what they were at is free again."""
        busy = self.others()
        mine = self._up.launch if self._up else None
        left = [one for one in data.launches if one.ended_at is None and one.id != mine and one.place not in busy]
        for launch in left:
            if launch.state == "imported":
                continue
            # The server of a dead worker on this host would hold its devices, and spoil what is measured here.
            here = launch.place.partition("/")[0] == self.place.partition("/")[0]
            pids = self.world.reap({"study": data.uid, "launch": str(launch.id)}) if here else []
            if pids:
                self._event("reaped", f"ended {len(pids)} processes that a dead worker had left", pids=pids)
            self._close(data, launch)
        return self.store.data() if left else data

    def _next(self, data: StudyData) -> Step:
        with uncollected():
            data = self._asked_model(data)
            return next_step(
                data,
                self.policy,
                exhausted=self._exhausted(data) and not self._unlisted_left(data),
                hot=self._hot,
                serving=self._up.launch if self._up else None,
                exhausted_here=self._exhausted_here(data) and not self._unlisted_here(data),
                place=self.place,
                busy=self.others(),
            )

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.store.data().space, self.engine)

    @cached_property
    def _hot(self) -> frozenset[str]:
        return hot_settings(self.engine)

    # -- taking up --------------------------------------------------------------------------------------------------

    def _recover(self) -> StudyData:
        """Ends what a dead tuner has left running, and closes its open launches."""
        data = self.store.data()
        for mine in self._left_markers(data):
            if pids := self.world.reap(mine):
                self._event("reaped", f"ended {len(pids)} processes that an earlier run had left", pids=pids)
                if left := self.world.remaining(mine):
                    self._broken(f"{', '.join(map(str, left))} of an earlier run cannot be ended; see `tuner doctor`")
        for sentence in self.world.neighbours():
            self._event("neighbour", sentence)
        self._take_over(data)
        return self._tidied(self.store.data())

    def _left_markers(self, data: StudyData) -> list[dict[str, str]]:
        """The markers of what an earlier run may have left here; what another worker has launched is at work."""
        if not self.siblings():
            return [{"study": data.uid}]
        busy = self.others()
        return [{"study": data.uid, "launch": str(one.id)} for one in data.launches if one.place not in busy]

    def _close(self, data: StudyData, launch: StoredLaunch) -> None:
        state: LaunchState = launch.state
        if state != "failed":
            # With all blocks in, only the teardown was missing, and the launch counts like any other.
            looks, whole, _ = to_measure(data, self.policy, launch.slot)
            # A launch beside a change may be for a slot that has its block: it counts when it gave any.
            barren = launch.slot.role == "edge" and not data.on_launch.get(launch.id)
            state = "interrupted" if looks or whole or barren else "done"
        # When it really ended is not known: the last that is known of it counts.
        blocks = [stored.block for stored in data.blocks.values() if stored.launch_id == launch.id]
        ends = [block.started_at + block.window_s for block in blocks]
        self.store.close_launch(launch.id, state, max(launch.started_at, launch.ready_at or 0.0, *ends))

    # -- trials -----------------------------------------------------------------------------------------------------

    @cached_property
    def _universe(self) -> Mapping[str, Listed] | None:
        """Every candidate that may be launched, by id; None where they cannot be listed."""
        space = self.store.data().space
        listed = space.listed()
        if listed is None:
            return None
        why_not = legality(space, self.engine)
        legal = (each for each in listed.values() if not why_not(each.candidate))
        if self._kept_otherwise:
            legal = (replace(each, candidate=self._as_kept(each.candidate)) for each in legal)
        return {each.candidate.id: each for each in legal}

    @cached_property
    def _kept_otherwise(self) -> Mapping[str, Candidate]:
        """The study's own candidates by the ids that the space has for them, where an earlier version wrote numbers
        otherwise."""
        data = self.store.data()
        return {one.id: data.candidates[kept] for kept, one in respelled(data, data.space).items()}

    def _as_kept(self, candidate: Candidate) -> Candidate:
        """A candidate of the space as the study's records have it."""
        return self._kept_otherwise.get(candidate.id, candidate)

    @cached_property
    def _proposer(self) -> Proposer:
        data = self.store.data()
        space = data.space

        def legal(one: Candidate) -> bool:
            found = self._known[1]
            kept = ruled_out(space, one, found.refuted) is not None or in_proof(space, one, found.running)
            return not kept and one.id not in self._kept_otherwise and illegal(space, self.engine, one) is None

        part = part_of(space, lambda one: illegal(space, self.engine, one) is None)
        return Proposer(space, data.seed, self._universe, legal, part)

    def _exhausted(self, data: StudyData, within: int | None = None) -> bool:
        """Whether every candidate has been tried, or every one in the reach of a launch, or may not be any more."""
        universe = self._reach(data, within)
        if universe is None:
            return False
        left = universe.keys() - frozenset(_tried(data)) - self._hopeless(data)
        if not left or idle(data) < PATIENCE:
            return not left
        seen = self._crashes_seen(data)
        if len(seen.crashed) < most_crashes(data.budget.launches):
            return False
        return all(seen.region(universe[each].candidate.settings) for each in left)

    def _asked_model(self, data: StudyData) -> StudyData:
        """The study, with what the model says where it sees no use in more search: that is kept, and ends it.

        It is asked once for each state of the search, since it takes longer than all else that is decided.
        """
        seen = (len(data.trials), len(data.blocks))
        if self._asked_of == seen or not may_be_fruitless(data, self.policy):
            return data
        self._asked_of = seen
        if self._planned(data) is not None or self._unlisted_left(data):
            return data
        why = self._proposer.fruitless(_tried(data), self._evidence(data), goals_of(data), self._hopeless(data))
        if not why:
            return data
        self._event(FRUITLESS, why)
        return self.store.data()

    def _evidence(self, data: StudyData) -> Evidence:
        return evidence_of(data, self._reader)

    def _crashes_seen(self, data: StudyData) -> CrashesSeen:
        return crashes_seen(data, self.crashes.elsewhere(data) if self.crashes is not None else Elsewhere())

    def _hopeless(self, data: StudyData) -> frozenset[str]:
        """The candidates with a value whose canary failed."""
        if self._universe is None or not (values := self._proofs(data).refuted):
            return frozenset()
        return frozenset(i for i, each in self._universe.items() if ruled_out(data.space, each.candidate, values))

    def _proofs(self, data: StudyData) -> Proofs:
        """What canaries have shown, found out once for each state of the study."""
        if self._known[0] is not data:
            self._known = (data, proofs(data))
        return self._known[1]

    @cached_property
    def _canaries(self) -> Mapping[str, Listed]:
        """Where canaries come from: all candidates, or those near the baseline where they cannot be listed."""
        if self._universe is not None:
            return self._universe
        space = self.store.data().space
        near, why_not = nearest_ones(space), legality(space, self.engine)
        return {i: each for i, each in near.items() if not why_not(each.candidate)}

    def _exhausted_here(self, data: StudyData) -> bool:
        launch = group(data, self.place) if self._hot else None
        return launch is not None and self._exhausted(data, launch.id)

    def _reach(self, data: StudyData, within: int | None) -> Mapping[str, Listed] | None:
        """The candidates that a launch can serve, all for None; None where they cannot be listed."""
        if within is None or self._universe is None:
            return self._universe
        return {i: each for i, each in self._universe.items() if self._in_reach(data, within, each.candidate)}

    def _in_reach(self, data: StudyData, launch: int, candidate: Candidate) -> bool:
        launched = data.settings_of(data.launch[launch].slot.candidate_id)
        return reachable(self._hot, launched, candidate.settings)

    def _begin(self, data: StudyData, step: Begin) -> bool:
        """Makes a trial, unless what it would be is being measured. What needs no launch is told at once."""
        number = step.number
        if number == 0:
            # A baseline that the parameters do not make up has none: the sampler passes over it.
            self.store.put_candidate(data.baseline)
            self.store.trials.begin("baseline", data.baseline.id, None, self.place)
            return True
        told = sorted(data.trials, key=lambda trial: (trial.launched, -trial.number))
        tried = {trial.candidate_id: trial for trial in told}  # each with the first that was launched, else its first
        equal = {self._effects.of(data.candidates[c]): trial for c, trial in tried.items() if trial.launched}
        settled = frozenset(_tried(data))
        seen = self._crashes_seen(data)
        proven = self._proofs(data)
        waiting: frozenset[str] = frozenset()
        if proven.running and self._universe is not None:
            listed = self._universe.items()
            waiting = frozenset(i for i, each in listed if in_proof(data.space, each.candidate, proven.running))
            if not self._universe.keys() - settled - waiting - self._hopeless(data):
                return False
        proposal, drawn = self._propose(data, step, settled, seen, waiting)
        candidate = self._as_kept(proposal.candidate)
        if in_proof(data.space, candidate, proven.running):
            return False
        due = self._plain(data)  # whatever kept it from being launched before
        anew = candidate.id in due_again(data) or (due is not None and due.id == candidate.id)
        self.store.put_candidate(candidate)
        same = equal.get(self._effects.of(candidate))
        if any(one is not None and one.running for one in (tried.get(candidate.id), same)):
            return False
        if candidate.id in tried and not anew:
            known = self._score(data, tried[candidate.id])
            why = f"the same as trial {tried[candidate.id].number}"
            self.store.trials.record("duplicate", candidate.id, proposal, known, why)
        elif same is not None:
            known, why = self._score(data, same), f"the same in effect as trial {same.number}"
            self.store.trials.record("duplicate", candidate.id, proposal, known, why)
            self._say("duplicate", f"trial {number}: {described(candidate)} is {why}, and not launched again")
        elif why_not := illegal(data.space, self.engine, candidate):
            self.store.trials.record("illegal", candidate.id, proposal, ILLEGAL, why_not)
            self._say("illegal", f"trial {number}: {described(candidate)} is ruled out: {why_not}")
        elif self.crashes is not None and (known_crash := self.crashes.known(data, candidate)):
            self.store.trials.record("known_crash", candidate.id, proposal, FAILED, known_crash)
            self._say("known_crash", f"trial {number}: {described(candidate)} is not launched: {known_crash}")
        elif no_path := ruled_out(data.space, candidate, proven.refuted):
            self.store.trials.record("known_crash", candidate.id, proposal, FAILED, no_path)
            self._say("known_crash", f"trial {number}: {described(candidate)} is not launched: {no_path}")
        elif not drawn and (region := seen.region(candidate.settings)):
            self.store.trials.record("known_crash", candidate.id, proposal, FAILED, f"{region}, and none worked")
            self._say("known_crash", f"trial {number}: {described(candidate)} is not launched: {region}")
        elif step.only and step.within is not None and not self._in_reach(data, step.within, candidate):
            why_not = "it needs a launch of its own, and none is left for the search"
            self.store.trials.record("out_of_launches", candidate.id, proposal, FAILED, why_not)
        else:
            self.store.trials.begin("measured", candidate.id, proposal, self.place)
            self._say("trial", f"trial {number}: {described(candidate)}", trial=number, candidate=candidate.id)
        return True

    def _propose(
        self,
        data: StudyData,
        step: Begin,
        tried: Collection[str],
        seen: CrashesSeen,
        waiting: frozenset[str] = frozenset(),
    ) -> tuple[Proposal, bool]:
        """What the sampler picks, within the reach of the launch that the step names, if the space has that.

        Where its picks are of no use, an untried candidate is drawn instead (True), from where nothing crashed if there
        is such; from elsewhere only while crashes are few.
        """
        if (first := self._first_of_stale(data, tried)) is not None:
            return first, False
        space, fixed = data.space, None
        if (plain := self._within_reach(data, step, self._plain(data))) is not None:
            return in_space(space, plain)[0] or Proposal(plain, {}, {}), True
        if (beside := self._beside(data)) is not None:
            return in_space(space, beside)[0] or Proposal(beside, {}, {}), True
        by_batch = self._schedule(data, step)
        # What the server that is up can become comes before what takes it down.
        stays = by_batch is not None and self._serves_now(data, by_batch.candidate)
        if step.within is None and not stays and (canary := next_canary(data, self._canaries, self._proofs(data))):
            return proposal_of(space, canary), False
        if step.within is not None:
            launched = data.candidates[data.launch[step.within].slot.candidate_id]
            fixed = cold_values(space, self._hot, launched)
        if by_batch is not None:
            tried_next = by_batch.candidate
            self._say("schedule", f"the blocks ask for other depths at other loads: trying {described(tried_next)}")
            return Proposal(tried_next, {}, {}), False
        launch = data.launch[step.within] if step.within is not None else None
        history = self.store.trials.history
        hopeless = self._hopeless(data) | waiting
        untried = len(self._universe.keys() - {*tried, *hopeless}) if self._universe is not None else None
        each = for_each_launch(data, self.policy, untried)
        costs = costs_of(data, hot_in(data, self._hot), launch, stay=step.only, each=each)
        proposal = self._proposer.propose(
            _tried(data), history, self._evidence(data), goal_of(data), costs, fixed, hopeless
        )
        stray = step.only and step.within is not None and not self._in_reach(data, step.within, proposal.candidate)
        running = {trial.candidate_id for trial in data.trials if trial.running}
        stray = stray or proposal.candidate.id in running
        if not stray and idle(data) < (PATIENCE if step.within is None else STRAY):
            return proposal, False
        reach = self._reach(data, step.within) or {}
        left = {i: each for i, each in reach.items() if i not in tried and i not in hopeless}
        regions = {i: seen.region(each.candidate.settings) for i, each in left.items()}
        if free := {i: each for i, each in left.items() if regions[i] is None}:
            left = free
        elif len(seen.crashed) < most_crashes(data.budget.launches):
            against = {i: region.crashes for i, region in regions.items() if region is not None}
            left = {i: left[i] for i, crashes in against.items() if crashes == min(against.values())}
        else:
            return proposal, False
        drawn = draw_untried(space, left, (), data.seed, step.number)
        return (drawn, True) if drawn else (proposal, False)

    def _planned(self, data: StudyData) -> Planned | None:
        """The schedule that the blocks ask for, late in the search; found out once for each state of the study."""
        if self._asked_for[0] is not data:
            space, found = data.space, None
            if self._late(data):
                found = planned(data, lambda one: illegal(space, self.engine, one) is None)
            self._asked_for = (data, found)
        return self._asked_for[1]

    def _late(self, data: StudyData) -> bool:
        """Whether the search knows enough, or has little enough left, for a schedule: an early one is soon outdone."""
        enough = min(self.policy.fewest, data.budget.candidates - KEPT)
        if len(data.measured) >= enough or idle(data) >= PATIENCE or self._exhausted(data):
            return True
        if not hot_in(data, self._hot):
            return search_over(data, self.policy, exhausted=False, needs=KEPT + 1) is not None
        if launches_left(data, self.policy) <= 1 and len(data.measured) > KEPT:
            return True  # the server that is up, and another one: who leaves this one does not come back to it
        return search_over(data, self.policy, exhausted=False, needs=0, candidates=KEPT + 1) is not None

    def _beside(self, data: StudyData) -> Candidate | None:
        """Plain decoding beside the best, late in the search, where the launch that it is at can show it."""
        if self._shown_beside[0] is not data:
            found = None
            if not data.confirmations and data.state != "done" and hot_in(data, self._hot) and self._late(data):
                found = plain_beside(data, lambda one: illegal(data.space, self.engine, one) is None)
            if found is not None and (self._bad(data, found) or not self._serves_now(data, found)):
                found = None
            self._shown_beside = (data, found)
        return self._shown_beside[1]

    def _serves_now(self, data: StudyData, candidate: Candidate) -> bool:
        """Whether the launch that the search is at can serve a candidate."""
        launch = group(data, self.place) if hot_in(data, self._hot) else None
        return launch is not None and self._in_reach(data, launch.id, candidate)

    def _plain(self, data: StudyData) -> Candidate | None:
        """Plain decoding, where it is still to be tried beside a baseline that speculates."""
        found = plain_due(data, self._effects.of)
        if found is None or illegal(data.space, self.engine, found) is not None or self._failed(data, found):
            return None
        seen = self._crashes_seen(data)
        few = len(seen.crashed) < most_crashes(data.budget.launches)
        return found if few or seen.region(found.settings) is None else None

    def _unlisted(self, data: StudyData) -> list[Candidate]:
        """What a search that has nothing else left still tries: a schedule, plain decoding, the same beside the best.

        Behind its confirmation only those that had no launch left before a larger budget was given.
        """
        again = due_again(data) if data.confirmations or data.state == "done" else None
        if again is not None and not again:
            return []
        asked = self._planned(data)
        schedule = asked.candidate if asked is not None else None
        found = [one for one in (self._plain(data), schedule, self._beside(data)) if one is not None]
        return [one for one in found if again is None or one.id in again]

    def _unlisted_here(self, data: StudyData) -> bool:
        """Whether there is such that the launch which the search stays with can serve."""
        launch = group(data, self.place) if hot_in(data, self._hot) else None
        return launch is not None and any(self._in_reach(data, launch.id, one) for one in self._unlisted(data))

    def _unlisted_left(self, data: StudyData) -> bool:
        """Whether there is such that can be tried with the launches that are left."""
        return self._unlisted_here(data) if launches_left(data, self.policy) < 1 else bool(self._unlisted(data))

    def _within_reach(self, data: StudyData, step: Begin, candidate: Candidate | None) -> Candidate | None:
        """A candidate, where there is a launch for it."""
        if candidate is None or (step.only and step.within and not self._in_reach(data, step.within, candidate)):
            return None
        return candidate

    def _schedule(self, data: StudyData, step: Begin) -> Planned | None:
        """The schedule that is to be tried next, where there is one, and a launch for it."""
        found = self._planned(data)
        return found if found is not None and self._within_reach(data, step, found.candidate) is not None else None

    def _edge(self, data: StudyData, step: Begin) -> Callable[[], object] | None:
        """What measures a block beside a change of the schedule that is tried next, or brings up its server.

        None where nothing of that is due or can be had, and where it might cost the schedule its own chance: a launch
        is made with one more to spare, and a block is measured with one to spare and with time for what follows.
        """
        hot, space, spare = hot_in(data, self._hot), data.space, launches_left(data, self.policy)
        if step.number == 0 or not hot or spare < 1 or self._comes_first(data, step):
            return None
        asked = self._schedule(data, step)
        if asked is None:
            return None
        if self._edges_elsewhere(data):
            return lambda: self._wait("where a schedule should change is measured elsewhere")
        edge = edge_due(data, self.policy, asked, lambda one: illegal(space, self.engine, one) is None)
        if edge is None or search_over(data, self.policy, exhausted=False, needs=0, candidates=KEPT + 1):
            return None
        both = (edge.candidate, edge.speculating)
        if any(not reachable(hot, asked.candidate.settings, one.settings) or self._bad(data, one) for one in both):
            return None
        running = Running(data.launch[self._up.launch], hot) if self._up is not None else None
        with_both = replace(data, candidates={**data.candidates, **{one.id: one for one in both}})
        serves = running is not None and running.serves(with_both, edge.slot)
        if not serves and spare < 2:
            return None
        if running is not None and not serves:
            return self._take_down
        if not serves and self._unsettled is not None:
            return self._settle
        for one in both:
            self.store.put_candidate(one)
        self._say(
            "edge", f"where depths should change: {self._named(with_both, edge.candidate.id)} at {edge.load} requests"
        )
        if serves:
            self._ask(with_both, edge.slot)
            return lambda: self._measure(with_both, edge.slot, (edge.load,))
        launch = self.store.begin_launch(edge.launched, self.place)
        return lambda: self._launch(with_both, edge.launched, launch)

    def _comes_first(self, data: StudyData, step: Begin) -> bool:
        """Whether something else than a schedule is tried next (`_propose`)."""
        if self._first_of_stale(data, _tried(data)) is not None:
            return True
        if step.within is None and next_canary(data, self._canaries, self._proofs(data)) is not None:
            return True
        return self._within_reach(data, step, self._plain(data)) is not None

    def _bad(self, data: StudyData, candidate: Candidate) -> bool:
        """Whether a candidate is known not to work, here or from other studies: nothing is launched for it."""
        return self._failed(data, candidate) or self._crashes_seen(data).region(candidate.settings) is not None

    def _failed(self, data: StudyData, candidate: Candidate) -> bool:
        """Whether it was launched and did not work, here or in another study, or has a value whose canary failed."""
        launched = [trial for trial in data.trials if trial.launched and trial.candidate_id == candidate.id]
        if any(trial.constraints.get("launch", 0) > 0 for trial in launched):
            return True
        if self.crashes is not None and self.crashes.known(data, candidate):
            return True
        return ruled_out(data.space, candidate, self._proofs(data).refuted) is not None

    def _edges_elsewhere(self, data: StudyData) -> bool:
        """Whether another living worker is about to measure beside a change, or does."""
        others = self.others()
        up = [launch for launch in data.launches if launch.ended_at is None and launch.place in others]
        for launch in up:
            changed = [each.slot for each in data.reconfigurations if each.launch_id == launch.id]
            slot = changed[-1] if changed else launch.slot
            if slot.role == "edge" and data.block(slot, slot.repetition) is None:
                return True
        return False

    def _first_of_stale(self, data: StudyData, tried: Collection[str]) -> Proposal | None:
        """The best of what an earlier study measured under other conditions, before anything else is tried."""
        for candidate in best_of_stale(data.imports):
            found, _ = in_space(data.space, data.candidates[candidate])
            if candidate not in tried and found is not None:
                return found
        return None

    def _score(self, data: StudyData, trial: StoredTrial) -> Score:
        if trial.kind == "illegal":
            return ILLEGAL
        if trial.kind in ("known_crash", "out_of_launches"):
            return FAILED
        return score(data, trial.candidate_id)

    def _tell(self, data: StudyData, trial: StoredTrial) -> None:
        state = slot_state(data, self.policy, trial.slot)
        failure = state.failure or state.unusable
        if why_not := out_of_launches(data, self.policy, trial):
            self.store.trials.tell(trial.number, FAILED, why_not, kind="out_of_launches")
            self._say("out_of_launches", f"trial {trial.number} has no score: {why_not}", trial=trial.number)
            return
        result = FAILED if failure else self._score(data, trial)
        out = "" if failure or trial.kind == "baseline" else to_measure(data, self.policy, trial.slot)[2]
        why = f"{failure.kind}: {failure.message}" if failure else out
        self.store.put_pairs(data.pairs)
        again = trial.kind == "out_of_launches"  # cut short between two writes, and given more launches since
        self.store.trials.tell(trial.number, result, why, kind="measured" if again else None)
        if trial.kind == "baseline":
            self._say("baseline", "the baseline is measured")
        elif failure:
            if state.failure is not None:
                self._remember(data, trial, state.failure)
            self._say("failed", f"trial {trial.number} has no score: {why}", trial=trial.number, kind=failure.kind)
        else:
            said = ", ".join(f"{change(ratio)} at {level}" for level, ratio in sorted(result.ratios.items()))
            if result.constraints["launch"] <= 0:
                self._remember(data, trial)
            self._say(
                "score",
                f"trial {trial.number}: {change(result.value)} over the baseline in the search ({said})"
                + (f"; {out}" if out else ""),
                trial=trial.number,
                log_speedup=result.value,
            )

    def _remember(self, data: StudyData, trial: StoredTrial, failure: Failure | None = None) -> None:
        """For other studies: a crash, or that a candidate worked."""
        if self.crashes is None:
            return
        candidate = data.candidates[trial.candidate_id]
        try:
            if failure is None:
                self.crashes.works(data, candidate)
            else:
                self.crashes.remember(data, candidate, failure)
        except OSError as error:
            self._event(
                "crash_memory",
                f"{self.crashes.path} cannot be written ({error.strerror}); other studies do not learn of it",
            )

    # -- launches ---------------------------------------------------------------------------------------------------

    def _launch_for(self, data: StudyData, slot: Slot, launch: int, levels: tuple[int, ...]) -> None:
        """A launch that serves one slot and no other."""
        if self._launch(data, slot, launch):
            self._measure(data, slot, levels)
        if self._up is not None:
            self._take_down()

    def _launch(self, data: StudyData, slot: Slot, launch: int) -> bool:
        """Launches the slot's candidate; whether its server is up, or else the failure is kept."""
        server: RunningServer | None = None
        try:
            try:
                record = self._record(data, slot)
                marker = {"study": data.uid, "launch": str(launch)}
                log_path = self.folder / "logs" / f"launch-{launch}.log"
                self.store.launch_record(launch, record, ";".join(f"{k}={v}" for k, v in marker.items()), str(log_path))
                self._working(data, slot, launch)
                server = self.world.start(record, marker=marker, log_path=log_path)
                self.store.launch_started(launch, server.pid)
                self._await(launch, server, record, slot)
            except LaunchFailed as error:
                self.check()  # a tuner that has taken the study over ends our server, which is no fault of its own
                with self.shield():
                    self.store.launch_failed(launch, error.failure)
                self._report_failure(data, slot, error.failure)
                with self.shield():
                    self._end(slot, launch, server)
                return False
        except BaseException:
            with self.shield():
                self._end(slot, launch, server, interrupted=True)
            raise
        self._up = _Up(launch, server, record, slot)
        return True

    def _record(self, data: StudyData, slot: Slot, port: int | None = None) -> LaunchRecord:
        candidate = data.candidates[slot.candidate_id]
        image = data.fingerprint.get("image")
        port = self.world.free_port() if port is None else port
        return launch_record(
            data.space, self.engine, candidate, host=HOST, port=port, image=image, place_env=self.place_env
        )

    def _await(self, launch: int, server: RunningServer, record: LaunchRecord, slot: Slot) -> None:
        self.observer.working(slot, "ready")
        server.wait_ready()
        self.observer.working(slot, "smoke")
        server.smoke()
        info = server.server_info()
        self.store.launch_ready(launch, info)
        if info is not None and (failure := not_in_effect(self.engine.mismatches(record, info))):
            raise LaunchFailed(failure)

    def _measure(self, data: StudyData, slot: Slot, levels: tuple[int, ...], *, look: bool = False) -> None:
        """The levels of a slot on the server that is up, which is put to its settings first where it has others."""
        up = self._up
        assert up is not None
        try:
            self._reconfigure(up)
            for level in levels:
                share = share_of_window(data, self.policy, slot, level, look=look)
                kept = slot.look if look else slot
                invalid = self._block(data, up.launch, up.server, up.record, kept, level, share)
                if invalid is None or look:
                    continue
                if up.change is not None and invalid.blame == "candidate":
                    raise LaunchFailed(invalid)  # of the change, as far as is known: a launch of its own tells
                break  # without this level there is no result: the others would be measured for nothing
            else:
                self._ask_answers(up.launch, up.server, up.record, slot)
        except LaunchFailed as error:
            self.check()  # as when it is brought up
            with self.shield():
                if up.change is None:
                    self.store.launch_failed(up.launch, error.failure)
                else:
                    self.store.reconfiguration_failed(up.change, error.failure)
            self._report_failure(data, slot, error.failure, up.change is not None)
            self._take_down()

    def _ask(self, data: StudyData, slot: Slot) -> None:
        """Keeps that the server that is up is about to get a slot's settings, where it has others."""
        up = self._up
        assert up is not None
        if up.slot == slot:
            return
        record = self._record(data, slot, up.record.port)
        assert isinstance(self.engine, Reconfigurable)
        up.asked = self.engine.change(record)
        # From here on the server may be half changed: whatever comes is the change's.
        up.change = self.store.ask_reconfiguration(up.launch, slot, up.asked.body)
        up.slot, up.record = slot, record
        self._say("reconfigure", f"on the running server: {self._named(data, slot.candidate_id)} ({slot.role})")

    def _reconfigure(self, up: _Up) -> None:
        """Puts the server that is up to the settings that were asked for, and reads back whether they are in effect.

        Raises:
            LaunchFailed: they are not; what the server runs with is then not known.
        """
        asked, up.asked = up.asked, None
        if asked is None or up.change is None:
            return
        self.observer.working(up.slot, "reconfigure")
        self.world.reconfigure(up.server, up.record, asked)
        info = up.server.server_info()
        if problem := unsettled(self.engine, up.record, asked, info):
            ended = up.server.failure(wait_s=ENDING_S if info is None else 0.0)
            raise LaunchFailed(ended or kind_failure("reconfigure_failed", "readback", problem))
        self.store.reconfigured(up.change, info)

    def _take_down(self) -> None:
        up, self._up = self._up, None
        assert up is not None
        with self.shield():
            self._end(up.slot, up.launch, up.server)

    def _block(
        self,
        data: StudyData,
        launch: int,
        server: RunningServer,
        record: LaunchRecord,
        slot: Slot,
        level: int,
        share: float,
    ) -> Failure | None:
        """Measures one level until it passes its gates, as often as the policy allows; every block is kept.

        `share` is the part of the usual window. Returns None when a block passed, else what they failed by. A look that
        does not pass is not repeated: the whole block follows.
        """
        had = [b.launch_id for b in data.by_slot.get(slot, ()) if b.concurrency == level]
        own = {launch, *(one.id for one in data.launched_for.get(slot.whole, ()))}
        attempts = 1 if slot.role == "look" else self.policy.block_attempts - sum(one in own for one in had)
        gates: tuple[Gate, ...] = ()
        for attempt in range(len(had), len(had) + max(1, attempts)):
            self.observer.working(slot, "block", level)
            outcome = self.world.measure(
                server,
                record,
                concurrency=level,
                role=slot.role,
                seed=block_seed(data.seed, slot.whole, level),
                on_progress=self._progress,
                share=share,
            )
            block = outcome.block
            if block is None or not _is_finite(block):
                raise LaunchFailed(outcome.failure or _nothing_measured(level))
            if (gate := speculates(record, block)) is not None:
                block = replace(block, gates=(*block.gates, gate))
            with self.shield():
                number = self._keep(Entry(launch, slot, attempt, block))
                self.world.keep_requests(outcome, self.folder / "requests" / f"block-{number}.jsonl.gz")
            gates = block.gates
            rate = f"{block.tokens_per_s:.1f} tokens/s at {level}"
            if block.valid:
                self._say("block", f"{self._named(data, slot.candidate_id)}: {rate}", level=level)
                return None
            red = ", ".join(gate.name for gate in block.gates if not gate.ok)
            self._event("invalid_block", f"{self._named(data, slot.candidate_id)}: {rate}, not valid: {red}", gates=red)
            if gate is not None and not gate.ok:
                raise LaunchFailed(pointless(gate, level))
        return invalid_block(gates, level, attempt + 1)

    def _progress(self, progress: Any) -> None:
        self.alert()
        self.observer.block_progress(progress)

    def _ask_answers(self, launch: int, server: RunningServer, record: LaunchRecord, slot: Slot) -> None:
        """What the output-quality gate still needs of this server; a server that does not tell loses no block."""
        if self.probe is None:
            return
        data = self.store.data()
        want = wanted(data, slot)
        if not (want.answers or want.likelihoods):
            return
        self.observer.working(slot, "answers")
        try:
            if want.answers:
                facts = self.probe.answers(record).to_dict()
                self.store.put_quality(slot.candidate_id, ANSWERS, launch, facts)
            for candidate in want.likelihoods:
                self.check()
                answers = Answers.from_dict(self.store.data().quality[candidate, ANSWERS])
                self.store.put_quality(candidate, JUDGED, launch, self.probe.judged(record, answers).to_dict())
        except NoAnswer as error:
            if failure := server.failure():
                raise LaunchFailed(failure) from error
            self._event("quality", f"the answers of {self._named(data, slot.candidate_id)} are not known: {error}")

    def _check_answers(self, data: StudyData) -> None:
        """The user's check, once for each candidate whose answers are known."""
        command = data.space.quality.check_command
        baseline = data.quality.get((data.baseline.id, ANSWERS))
        if command is None or baseline is None:
            return
        for candidate in sorted({c for c, kind in data.quality if kind == ANSWERS} - {data.baseline.id}):
            if (candidate, VETO) in data.quality:
                continue
            told = {
                "settings": dict(data.settings_of(candidate)),
                "baseline": baseline["texts"],
                "candidate": data.quality[candidate, ANSWERS]["texts"],
            }
            why = check(command, told)
            self.store.put_quality(candidate, VETO, data.launches[-1].id, {"why": why or ""})
            if why:
                self._event("quality", f"the check objects to {self._named(data, candidate)}: {why}")

    def _keep(self, entry: Entry) -> int:
        """Writes a block to the record, then to the database; returns its id.

        Raises:
            StudyStopped: we were asleep, and another tuner has the study now; the block is of no use to it.
            EnvironmentBroken: the record cannot be written. The database has the block all the same, or the message
                says that it has not.
        """
        try:
            self.check()
        except StudyStopped:
            raise
        except Exception as error:
            # The database does not even answer: the record is all that can be kept.
            try:
                self.journal.append(entry)
            except OSError as unwritable:
                raise self._lost(entry, unwritable, error) from error
            raise
        try:
            self.journal.append(entry)
        except OSError as error:
            try:
                self.store.put_block(entry.launch, entry.slot, entry.block)
            except Exception as unkept:
                if storage_problem(unkept) is None:
                    raise
                raise self._lost(entry, error, unkept) from unkept
            raise EnvironmentBroken(
                f"{self.journal.path} cannot be written: {error.strerror}. Nothing measured is lost; run the same "
                "again once it can"
            ) from error
        return self.store.put_block(entry.launch, entry.slot, entry.block)

    def _lost(self, entry: Entry, record: OSError, database: Exception) -> EnvironmentBroken:
        """A block that is kept nowhere."""
        candidate = entry.slot.candidate_id
        named = self._names.get(candidate, candidate)
        why = str(getattr(database, "orig", None) or database)
        return EnvironmentBroken(
            f"the last block, of {named} at concurrency {entry.block.concurrency}, is lost: neither "
            f"{self.journal.path} ({record.strerror}) nor the database ({why}) could be written. Every block before "
            "it is kept; run the same again with room on the disk, and this one is measured again"
        )

    def _take_over(self, data: StudyData) -> None:
        """Keeps the blocks that are in the record and not in the database: a kill, or a lock, came in between."""
        known = {(launch.id, launch.slot) for launch in data.launches}
        known |= {(each.launch_id, each.slot) for each in data.reconfigurations}
        alone = not self.siblings()  # what another one at work here has written is its own to keep
        taken: set[int] = set()
        for entry in self.journal.everything() if alone else self.journal.entries():
            if (entry.launch, entry.slot.whole) not in known:
                continue  # the database is an older copy: what the block was measured against is not in it
            if entry.attempt < self.store.attempts(entry.slot, entry.block.concurrency):
                continue
            try:
                self.store.put_block(entry.launch, entry.slot, entry.block)
            except AlreadyMeasured:
                continue
            taken.add(entry.launch)
            self._event(
                "taken_over",
                f"{self._named(data, entry.slot.candidate_id)}: a block at {entry.block.concurrency} that was measured "
                "before the last run ended is taken over",
            )
        now = self.store.data() if taken else data
        for launch in now.launches:
            if launch.id in taken and launch.state == "interrupted":
                self._close(now, launch)  # it may have given all that it was for, and then it counts

    def _end(self, slot: Slot, launch: int, server: RunningServer | None, *, interrupted: bool = False) -> None:
        """Ends the server and whatever carries the launch's marker, and closes the launch."""
        self.observer.working(slot, "stop")
        report = server.stop() if server is not None else None
        left = self.world.reap({"study": self.journal.study, "launch": str(launch)})
        if interrupted:
            now = self.store.data()
            stored = next(stored for stored in now.launches if stored.id == launch)
            if stored.ended_at is None:  # a tuner that has taken the study over has closed it already
                self._close(now, stored)
        else:
            mode = "not started" if report is None else "killed" if report.escalated else "ended in order"
            self.store.end_launch(launch, report.exit_status if report else None, mode)
        if left:
            self._event("leftovers", f"launch {launch} left {len(left)} processes behind; they were ended", pids=left)
        if report is not None and report.unclean:
            self._event("unclean_stop", f"launch {launch} has ended, but {'; '.join(report.unclean)}")
            self._unsettled = report
        if unclaimed := getattr(report, "segments_unclaimed", ()):  # only a real machine's report has them
            self._event(
                "unclaimed_segments",
                f"shared memory {', '.join(unclaimed)} came up during launch {launch}, and nobody holds it. "
                "It may be another program's, so it was left in /dev/shm; remove it if no program of yours keeps it",
            )

    def _settle(self) -> None:
        """Before a launch: what an earlier one left must be gone, or the next would fail for no fault of its own.

        Raises:
            EnvironmentBroken: it is still there.
        """
        report, self._unsettled = self._unsettled, None
        if report is None:
            return
        if left := self.world.settle(report):
            self._broken(f"what the last server held is not back: {'; '.join(left)}")
        self._event("settled", "what the last server held is back")

    def _broken(self, message: str) -> NoReturn:
        self._ended("stopped", message)
        raise EnvironmentBroken(f"{message}. Nothing measured is lost; run the same again once that is mended")

    def _ended(self, state: StudyState, reason: str) -> None:
        """This worker ends; the study with it, unless others go on."""
        if self.others():
            self.store.event(f"worker_{state}", f"{self.place}: {reason}")
        else:
            self.store.set_state(state, reason)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _stop(self, data: StudyData, step: Stop) -> None:
        failure = step.failure
        said = f"{failure.kind} ({failure.phase}): {failure.message}"
        log = next((launch.log_path for launch in reversed(data.launches) if launch.slot == step.slot), "")
        see = f" See {log}." if log else ""
        alike = [Slot(candidate, "screen", 0) for candidate in step.alike]
        self.store.stop(said, step.slot, *alike, alone=not self.others())
        kept = "Everything measured so far is kept; run the same again once it is mended."
        if step.kind == "baseline_failed":
            raise StudyStopped(f"the baseline cannot be measured, so nothing can be compared: {said}.{see} {kept}")
        if step.kind == "interruptions":
            raise StudyStopped(
                f"{self._named(data, step.slot.candidate_id)}: {said}. If nobody ended it, it may be what ends the "
                f"tuner (memory, a limit on time, a watchdog); look there, or take it out of the space.{see} {kept}"
            )
        if step.kind == "same_failure":
            if self.crashes is not None:
                self.crashes.forget(data.uid)
            raise StudyStopped(
                f"{len(step.alike)} different candidates in a row failed alike: {said}. {self._in_common(data, step)}"
                f"{see} {kept} The last of them is then tried again."
            )
        raise EnvironmentBroken(f"the machine, not a candidate, is at fault: {said}.{see} {kept}")

    def _in_common(self, data: StudyData, step: Stop) -> str:
        """Advice: what the failed candidates share and the baseline does not have is the first suspect."""
        settings = [data.candidates[candidate].settings for candidate in step.alike]
        baseline = data.baseline.settings
        shared = [
            f"{name}={value}"
            for name, value in settings[0].items()
            if baseline.get(name) != value and all(other.get(name) == value for other in settings)
        ]
        if shared:
            return f"All have {', '.join(shared)}, unlike the baseline: if that cannot work here, take it out."
        return "They share no setting that the baseline lacks: look at the engine and the machine first."

    def _finish(self, data: StudyData, reason: str) -> StudyData:
        self.store.put_pairs(data.pairs)
        self._check_answers(data)
        data = self.store.data()
        for candidate, found in quality_verdicts(data).items():
            self.store.put_quality(candidate, "verdict", data.launches[-1].id, found.to_dict())
        for candidate, levels in compared(data).items():
            facts = {str(level): [asdict(gate) for gate in gates] for level, gates in levels.items()}
            self.store.put_quality(candidate, COMPARED, data.launches[-1].id, facts)
        self.store.finish(verdicts_of(recommendation(data)), reason)
        self._say("done", f"the search has ended: {reason}")
        data = self.store.data()
        self.observer.state(data)
        return data

    # -- telling ----------------------------------------------------------------------------------------------------

    def _working(self, data: StudyData, slot: Slot, launch: int) -> None:
        self.observer.working(slot, "start")
        count = f"launch {launches_used(data) + 1} of {data.budget.launches}"
        self._say("launch", f"{count}: {self._named(data, slot.candidate_id)} ({slot.role})", launch=launch)

    def _report_failure(self, data: StudyData, slot: Slot, failure: Failure, hot: bool = False) -> None:
        message = f"{self._named(data, slot.candidate_id)}: {failure.kind} ({failure.phase}): {failure.message}"
        if hot:
            message += "; that was on a running server whose settings were changed, so it is held against nobody"
        self._say("failure", message, kind=failure.kind, blame=failure.blame)

    def _named(self, data: StudyData, candidate_id: str) -> str:
        """A candidate in words, which are remembered for when the database cannot be asked."""
        if candidate_id not in self._names:
            baseline = candidate_id == data.baseline.id
            self._names[candidate_id] = "the baseline" if baseline else described(data.candidates[candidate_id])
        return self._names[candidate_id]

    def _say(self, kind: str, message: str, /, **facts: Any) -> None:
        """Tells the observer what the records show anyway."""
        self.observer.event(Event(kind, plain(message, SHOWN), facts))

    def _event(self, kind: str, message: str, /, **facts: Any) -> None:
        """Tells it, and keeps it: no other record shows it."""
        self.store.event(kind, plain(message, SHOWN))
        self._say(kind, message, **facts)


def _nothing() -> None:
    """For what was done when it was decided."""


def _needs(step: Step, launch: int) -> bool:
    """Whether a step leaves the server of a launch up."""
    return isinstance(step, (Begin, Tell, TakeOver)) or (isinstance(step, Measure) and step.on == launch)


def _is_finite(block: Block) -> bool:
    """Whether every figure is a number: what is not would poison all that is fitted to it."""
    return finite(block.to_dict()) == block.to_dict()


def _nothing_measured(level: int) -> Failure:
    return Failure("bench_parse_error", "bench", f"the measurement at concurrency {level} gave no usable figures")


def block_seed(study_seed: int, slot: Slot, level: int) -> int:
    """Of the requests of a block: the same for both blocks of a pair, and for all candidates of the search."""
    repetition = slot.repetition if slot.role == "confirm" else 0
    digest = hashlib.sha256(f"{study_seed}/{slot.role}/{repetition}/{level}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _tried(data: StudyData) -> list[str]:
    """The candidates of the trials, by number; "" for those that are due again."""
    again = due_again(data)
    return ["" if trial.candidate_id in again else trial.candidate_id for trial in data.trials]
