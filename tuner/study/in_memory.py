"""A whole study on simulated blocks without a database: the planner, the pairs and the judge are the real ones.

For learning how often a study errs, which takes thousands of them. Candidates are drawn at random where a real study
asks Optuna's sampler, which takes longer than all else together.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tuner.engines.simulated.blocks import BlockSource
from tuner.records import Candidate, LaunchRecord, StoredBlock
from tuner.space import Space
from tuner.study.controller import HOST
from tuner.study.data import Budget, Confirmation, StoredLaunch, StoredTrial, StudyData
from tuner.study.planner import POLICIES, Begin, Confirm, Done, Measure, Policy, Tell, next_step
from tuner.study.score import score


def simulate(space: Space, source: BlockSource, seed: int, *, policy: Policy | None = None) -> StudyData:
    """Runs a study to its end, from seed and source alone; every launch works."""
    policy = policy or POLICIES[space.profile]
    universe = {i: each.candidate for i, each in (space.listed() or {}).items() if i != space.baseline.id}
    return _Study(space, source, seed, policy, universe).run()


class _Study:
    def __init__(
        self, space: Space, source: BlockSource, seed: int, policy: Policy, universe: Mapping[str, Candidate]
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

    def run(self) -> StudyData:
        while True:
            data = self.data()
            match next_step(data, self.policy, exhausted=not self.left):
                case Begin(number=number):
                    self.begin(number)
                case Measure() as step:
                    self.measure(step)
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
        )

    def begin(self, number: int) -> None:
        chosen = self.space.baseline.id if number == 0 else self.left.pop(self.random.randrange(len(self.left)))
        kind = "baseline" if number == 0 else "measured"
        self.trials.append(StoredTrial(number, chosen, kind, True, {}, None, {}))  # type: ignore[arg-type]

    def tell(self, data: StudyData, number: int) -> None:
        trial = self.trials[number]
        result = score(data, trial.candidate_id)
        self.trials[number] = StoredTrial(
            number, trial.candidate_id, trial.kind, False, {}, result.value, result.constraints
        )

    def measure(self, step: Measure) -> None:
        candidate = self.candidates[step.slot.candidate_id]
        began = self.source.clock.now
        self.source.launch()
        ready = self.source.clock.now
        launch = len(self.launches) + 1
        for level in step.levels:
            block = self.source.block(candidate.settings, level, step.slot.role)
            number = len(self.blocks) + 1
            self.blocks[number] = StoredBlock(
                number, candidate.id, launch, level, step.slot.role, step.slot.repetition, number, block
            )
        record = LaunchRecord("simulated", "1", "", (), {}, HOST, 0, {}, {}, "", simulated=True)
        self.launches.append(
            StoredLaunch(
                launch,
                step.slot,
                "done",
                "",
                "",
                record,
                None,
                began,
                ready,
                self.source.clock.now,
                None,
                0,
                None,
                None,
            )
        )
