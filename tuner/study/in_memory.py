"""A whole study on simulated blocks without a database: the planner, the pairs and the judge are the real ones.

For learning how often a study errs, which takes thousands of them. Candidates are drawn at random where a real study
asks Optuna's sampler, which takes longer than all else together.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from tuner.engines.simulated.blocks import BlockSource
from tuner.records import Candidate, LaunchRecord, StoredBlock
from tuner.space import Space
from tuner.study.ahead import SCOPE
from tuner.study.controller import HOST
from tuner.study.data import (
    Budget,
    Confirmation,
    Reconfiguration,
    Slot,
    StoredEvent,
    StoredLaunch,
    StoredTrial,
    StudyData,
)
from tuner.study.hot import reachable, scope_to_try
from tuner.study.planner import Begin, Confirm, Done, Launch, Measure, Tell, next_step, share_of_window, to_measure
from tuner.study.policy import POLICIES, Policy
from tuner.study.score import score


def simulate(
    space: Space,
    source: BlockSource,
    seed: int,
    *,
    policy: Policy | None = None,
    hot: frozenset[str] = frozenset(),
) -> StudyData:
    """Runs a study to its end, from seed and source alone; every launch, and every change of `hot` settings, works."""
    policy = policy or POLICIES[space.profile]
    universe = {i: each.candidate for i, each in (space.listed() or {}).items() if i != space.baseline.id}
    return _Study(space, source, seed, policy, universe, hot).run()


class _Study:
    def __init__(
        self,
        space: Space,
        source: BlockSource,
        seed: int,
        policy: Policy,
        universe: Mapping[str, Candidate],
        hot: frozenset[str],
    ) -> None:
        self.space = space
        self.source = source
        self.seed = seed
        self.policy = policy
        self.left = sorted(universe)
        self.random = random.Random(seed)
        self.candidates = {space.baseline.id: space.baseline, **universe}
        self.trials: list[StoredTrial] = []
        self.launches: list[StoredLaunch] = []
        self.blocks: dict[int, StoredBlock] = {}
        self.confirmations: list[Confirmation] = []
        self.hot = hot
        self.changes: list[Reconfiguration] = []
        self.up: tuple[int, Slot] | None = None
        there = scope_to_try(universe.values(), hot, space.baseline)
        self.scope = StoredEvent(1, 0.0, SCOPE, there.sentence, there.facts)

    def run(self) -> StudyData:
        while True:
            data = self.data()
            serving = self.up[0] if self.up else None
            step = next_step(
                data,
                self.policy,
                exhausted=not self.left,
                hot=self.hot,
                serving=serving,
                exhausted_here=bool(self.hot and self.launches) and not self.here(data, self.launches[-1].id),
            )
            if serving is not None and not (isinstance(step, (Begin, Tell)) or getattr(step, "on", None) == serving):
                self.end()
                continue
            match step:
                case Begin() as step:
                    self.begin(data, step)
                case Launch(slot=slot):
                    self.launch(slot)
                case Measure() as step:
                    self.measure(data, step)
                case Tell(number=number):
                    self.tell(data, number)
                case Confirm(confirmation=confirmation):
                    self.confirmations.append(confirmation)
                case Done():
                    return data
                case step:
                    raise RuntimeError(f"a simulated launch failed: {step}")

    def data(self) -> StudyData:
        return StudyData(
            name="simulated",
            uid="",
            created_at=0.0,
            state="running",
            reason="",
            seed=self.seed,
            space=self.space,
            fingerprint={},
            budget=Budget(**self.space.budget.model_dump()),
            candidates=self.candidates,
            trials=tuple(self.trials),
            launches=tuple(self.launches),
            blocks=dict(self.blocks),
            confirmations=tuple(self.confirmations),
            events=(self.scope,),
            reconfigurations=tuple(self.changes),
        )

    def here(self, data: StudyData, serving: int) -> list[str]:
        """What is left in the reach of the server that is up."""
        launched = data.settings_of(data.launch[serving].slot.candidate_id)
        return [c for c in self.left if reachable(self.hot, launched, self.candidates[c].settings)]

    def begin(self, data: StudyData, step: Begin) -> None:
        number = step.number
        left = (self.here(data, step.within) if step.within is not None else []) or self.left
        chosen = self.space.baseline.id if number == 0 else left[self.random.randrange(len(left))]
        if number:
            self.left.remove(chosen)
        kind = "baseline" if number == 0 else "measured"
        self.trials.append(StoredTrial(number, chosen, kind, True, {}, None, {}))  # type: ignore[arg-type]

    def tell(self, data: StudyData, number: int) -> None:
        trial = self.trials[number]
        result = score(data, trial.candidate_id)
        why = to_measure(data, self.policy, trial.slot)[2] if number else ""
        self.trials[number] = StoredTrial(
            number, trial.candidate_id, trial.kind, False, {}, result.value, result.constraints, why
        )

    def launch(self, slot: Slot) -> None:
        began = self.source.clock.now
        self.source.launch()
        record = LaunchRecord("simulated", "1", "", (), {}, HOST, 0, {}, {}, "", simulated=True)
        number = len(self.launches) + 1
        launched = StoredLaunch(
            id=number,
            slot=slot,
            state="running",
            marker="",
            log_path="",
            record=record,
            pid=None,
            started_at=began,
            ready_at=self.source.clock.now,
            ended_at=None,
            effective=None,
            exit_status=None,
            stop_mode=None,
            failure=None,
        )
        self.launches.append(launched)
        self.up = number, slot

    def end(self) -> None:
        self.launches[-1] = replace(self.launches[-1], state="done", ended_at=self.source.clock.now, exit_status=0)
        self.up = None

    def measure(self, data: StudyData, step: Measure) -> None:
        if step.on is None:
            self.launch(step.slot)
        assert self.up is not None
        number, in_force = self.up
        if step.slot != in_force:
            at, count = self.source.clock.now, len(self.changes) + 1
            self.changes.append(Reconfiguration(count, number, step.slot, at, {}, "in_effect", None, None))
            self.up = number, step.slot
        candidate = self.candidates[step.slot.candidate_id]
        slot = step.slot.look if step.look else step.slot
        for level in step.levels:
            share = share_of_window(data, self.policy, step.slot, level, look=step.look)
            block = self.source.block(candidate.settings, level, slot.role, share)
            order = len(self.blocks) + 1
            self.blocks[order] = StoredBlock(
                order, candidate.id, number, level, slot.role, slot.repetition, order, block
            )
        if step.on is None:
            self.end()
