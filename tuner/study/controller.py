"""Carries out what the planner says, one step after the other, and keeps every fact the moment it is known."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.errors import EnvironmentBroken, LaunchFailed, StudyStopped
from tuner.records import Block, Candidate, Failure, LaunchRecord
from tuner.space import Listed
from tuner.study.data import LaunchState, Slot, StoredLaunch, StoredTrial, StudyData
from tuner.study.database import finite
from tuner.study.decide import recommendation, verdicts_of
from tuner.study.engine import StudyEngine, illegal, launch_record, not_in_effect
from tuner.study.planner import (
    Begin,
    Confirm,
    Done,
    Measure,
    Policy,
    Stop,
    Tell,
    launches_used,
    next_step,
    slot_state,
)
from tuner.study.progress import Event, Observer, Silent
from tuner.study.sampler import PATIENCE, draw_untried, propose
from tuner.study.score import FAILED, ILLEGAL, Score, score
from tuner.study.store import StudyStore
from tuner.study.world import RunningServer, World

HOST = "127.0.0.1"


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
        shield: delays interruptions while facts are kept and servers are ended.
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
        shield: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.store = store
        self.engine = engine
        self.world = world
        self.policy = policy
        self.folder = folder
        self.observer = observer or Silent()
        self.check = check
        self.shield = shield

    def run(self) -> StudyData:
        """Works until nothing is left to do; returns the finished study.

        Raises:
            StudyStopped: the baseline cannot be measured.
            EnvironmentBroken: the machine is at fault. Both can be run again.
        """
        data = self._recover()
        if isinstance(step := self._next(data), Done) and data.state == "done":
            return data
        self.store.set_state("running")
        while True:
            self.check()
            data = self.store.data()
            self.observer.state(data)
            step = self._next(data)
            match step:
                case Begin(number=number):
                    self._begin(data, number)
                case Measure(slot=slot, levels=levels):
                    self._launch(data, slot, levels)
                case Tell(number=number):
                    self._tell(data, data.trials[number])
                case Confirm(confirmation=confirmation):
                    self.store.put_confirmation(confirmation)
                    named = " and ".join(self._named(data, c) for c in confirmation.finalists)
                    self._say("confirmation", f"confirming {named} in {confirmation.pairs} pairs with the baseline")
                case Stop():
                    self._stop(data, step)
                case Done(reason=reason):
                    return self._finish(data, reason)

    def _next(self, data: StudyData) -> Begin | Measure | Tell | Confirm | Stop | Done:
        return next_step(data, self.policy, exhausted=self._exhausted(data))

    # -- taking up --------------------------------------------------------------------------------------------------

    def _recover(self) -> StudyData:
        """Ends what a dead tuner has left running, and closes its open launches."""
        data = self.store.data()
        if pids := self.world.reap({"study": data.uid}):
            self._event("reaped", f"ended {len(pids)} processes that an earlier run had left", pids=pids)
        for launch in data.launches:
            if launch.ended_at is None:
                self._close(data, launch)
        return self.store.data()

    def _close(self, data: StudyData, launch: StoredLaunch) -> None:
        state: LaunchState = launch.state
        if state != "failed":
            # With all blocks in, only the teardown was missing, and the launch counts like any other.
            state = "interrupted" if slot_state(data, self.policy, launch.slot).missing else "done"
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
        return {i: each for i, each in listed.items() if not illegal(space, self.engine, each.candidate)}

    def _exhausted(self, data: StudyData) -> bool:
        tried = {trial.candidate_id for trial in data.trials}
        return self._universe is not None and self._universe.keys() <= tried

    def _begin(self, data: StudyData, number: int) -> None:
        """Makes trial `number`. What needs no launch is told at once."""
        history = self.store.trials.history()
        if number == 0:
            # A baseline that the parameters do not make up has none: the sampler passes over it.
            self.store.put_candidate(data.baseline)
            self.store.trials.begin("baseline", data.baseline.id, None)
            return
        tried = {trial.candidate_id: trial for trial in reversed(data.trials)}  # each with its first trial
        proposal = propose(data.space, history, data.seed)
        if self._idle(data) >= PATIENCE and self._universe is not None:
            proposal = draw_untried(data.space, self._universe, tried, data.seed, number) or proposal
        candidate = proposal.candidate
        self.store.put_candidate(candidate)
        if candidate.id in tried:
            known = self._score(data, tried[candidate.id])
            why = f"the same as trial {tried[candidate.id].number}"
            self.store.trials.record("duplicate", candidate.id, proposal, known, why)
        elif why_not := illegal(data.space, self.engine, candidate):
            self.store.trials.record("illegal", candidate.id, proposal, ILLEGAL, why_not)
            self._say("illegal", f"trial {number}: {described(candidate)} is ruled out: {why_not}")
        else:
            self.store.trials.begin("measured", candidate.id, proposal)
            self._say("trial", f"trial {number}: {described(candidate)}", trial=number, candidate=candidate.id)

    def _idle(self, data: StudyData) -> int:
        """Trials since the last one that needed a launch."""
        numbers = [trial.number for trial in data.trials if trial.kind in ("baseline", "measured")]
        return len(data.trials) - 1 - numbers[-1]

    def _score(self, data: StudyData, trial: StoredTrial) -> Score:
        if trial.kind == "illegal":
            return ILLEGAL
        return score(data, trial.candidate_id)

    def _tell(self, data: StudyData, trial: StoredTrial) -> None:
        state = slot_state(data, self.policy, Slot(trial.candidate_id, "screen", 0))
        failure = state.failure or state.unusable
        result = FAILED if failure else self._score(data, trial)
        why = f"{failure.kind}: {failure.message}" if failure else ""
        self.store.put_pairs(data.pairs)
        self.store.trials.tell(trial.number, result, why)
        if trial.kind == "baseline":
            self._say("baseline", "the baseline is measured")
        elif failure:
            self._say("failed", f"trial {trial.number} has no score: {why}", trial=trial.number, kind=failure.kind)
        else:
            said = ", ".join(f"{change(ratio)} at {level}" for level, ratio in sorted(result.ratios.items()))
            self._say(
                "score",
                f"trial {trial.number}: {change(result.value)} over the baseline in the search ({said})",
                trial=trial.number,
                log_speedup=result.value,
            )

    # -- launches ---------------------------------------------------------------------------------------------------

    def _launch(self, data: StudyData, slot: Slot, levels: tuple[int, ...]) -> None:
        """One launch of a slot: its missing levels are measured, or the failure is kept."""
        launch = self.store.begin_launch(slot)
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
                self._bring_up(launch, server, record, slot)
                for level in levels:
                    if not self._block(data, launch, server, record, slot, level):
                        break  # without this level there is no result: the others would be measured for nothing
            except LaunchFailed as error:
                with self.shield():
                    self.store.launch_failed(launch, error.failure)
                self._report_failure(data, slot, error.failure)
        except BaseException:
            with self.shield():
                self._end(data, slot, launch, server, interrupted=True)
            raise
        with self.shield():
            self._end(data, slot, launch, server)

    def _record(self, data: StudyData, slot: Slot) -> LaunchRecord:
        candidate = data.candidates[slot.candidate_id]
        return launch_record(data.space, self.engine, candidate, host=HOST, port=self.world.free_port())

    def _bring_up(self, launch: int, server: RunningServer, record: LaunchRecord, slot: Slot) -> None:
        self.observer.working(slot, "ready")
        server.wait_ready()
        self.observer.working(slot, "smoke")
        server.smoke()
        info = server.server_info()
        self.store.launch_ready(launch, info)
        if info is not None and (failure := not_in_effect(self.engine.mismatches(record, info))):
            raise LaunchFailed(failure)

    def _block(
        self, data: StudyData, launch: int, server: RunningServer, record: LaunchRecord, slot: Slot, level: int
    ) -> bool:
        """Measures one level until it passes its gates, as often as the policy allows; every block is kept.

        Returns whether a block passed.
        """
        had = sum(b.concurrency == level for b in data.by_slot.get(slot, ()))
        for _attempt in range(max(1, self.policy.block_attempts - had)):
            self.observer.working(slot, "block", level)
            outcome = self.world.measure(
                server,
                record,
                concurrency=level,
                role=slot.role,
                seed=block_seed(data.seed, slot, level),
                on_progress=self.observer.block_progress,
            )
            block = outcome.block
            if block is None or not _is_finite(block):
                raise LaunchFailed(outcome.failure or _nothing_measured(level))
            with self.shield():
                number = self.store.put_block(launch, slot, block)
                self.world.keep_requests(outcome, self.folder / "requests" / f"block-{number}.jsonl.gz")
            rate = f"{block.tokens_per_s:.1f} tokens/s at {level}"
            if block.valid:
                self._say("block", f"{self._named(data, slot.candidate_id)}: {rate}", level=level)
                return True
            red = ", ".join(gate.name for gate in block.gates if not gate.ok)
            self._event("invalid_block", f"{self._named(data, slot.candidate_id)}: {rate}, not valid: {red}", gates=red)
        return False

    def _end(
        self, data: StudyData, slot: Slot, launch: int, server: RunningServer | None, *, interrupted: bool = False
    ) -> None:
        """Ends the server and whatever carries the launch's marker, and closes the launch."""
        self.observer.working(slot, "stop")
        report = server.stop() if server is not None else None
        left = self.world.reap({"study": data.uid, "launch": str(launch)})
        if interrupted:
            now = self.store.data()
            self._close(now, next(stored for stored in now.launches if stored.id == launch))
        else:
            mode = "not started" if report is None else "killed" if report.escalated else "ended in order"
            self.store.end_launch(launch, report.exit_status if report else None, mode)
        if left:
            self._event("leftovers", f"launch {launch} left {len(left)} processes behind; they were ended", pids=left)
        if report is not None and report.leftovers and not interrupted:
            message = f"processes {', '.join(map(str, report.leftovers))} of launch {launch} cannot be ended"
            self.store.set_state("stopped", message)
            raise EnvironmentBroken(f"{message}; they may hold memory or a device. Nothing measured is lost")

    # -- ends -------------------------------------------------------------------------------------------------------

    def _stop(self, data: StudyData, step: Stop) -> None:
        failure = step.failure
        said = f"{failure.kind} ({failure.phase}): {failure.message}"
        log = next((launch.log_path for launch in reversed(data.launches) if launch.slot == step.slot), "")
        see = f" See {log}." if log else ""
        self.store.stop(said, step.slot)
        kept = "Everything measured so far is kept; run the same again once it is mended."
        if step.kind == "baseline_failed":
            raise StudyStopped(f"the baseline cannot be measured, so nothing can be compared: {said}.{see} {kept}")
        raise EnvironmentBroken(f"the machine, not a candidate, is at fault: {said}.{see} {kept}")

    def _finish(self, data: StudyData, reason: str) -> StudyData:
        self.store.put_pairs(data.pairs)
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

    def _report_failure(self, data: StudyData, slot: Slot, failure: Failure) -> None:
        message = f"{self._named(data, slot.candidate_id)}: {failure.kind} ({failure.phase}): {failure.message}"
        self._say("failure", message, kind=failure.kind, blame=failure.blame)

    def _named(self, data: StudyData, candidate_id: str) -> str:
        if candidate_id == data.baseline.id:
            return "the baseline"
        return described(data.candidates[candidate_id])

    def _say(self, kind: str, message: str, /, **facts: Any) -> None:
        """Tells the observer what the records show anyway."""
        self.observer.event(Event(kind, message, facts))

    def _event(self, kind: str, message: str, /, **facts: Any) -> None:
        """Tells it, and keeps it: no other record shows it."""
        self.store.event(kind, message)
        self._say(kind, message, **facts)


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


def described(candidate: Candidate) -> str:
    """A candidate in one line."""
    return " ".join(f"{name}={value}" for name, value in candidate.settings.items()) or "no settings"


def change(log_ratio: float) -> str:
    """A log ratio as a signed percentage."""
    return f"{100 * (math.exp(log_ratio) - 1):+.1f} %".replace("-", "−")
