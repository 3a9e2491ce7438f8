"""What first looks at candidates have brought: a pure function of records (`race.py` says what a look is)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.study.data import Slot, StoredTrial, StudyData

OUT = "out of the race"
"""How the reason of a candidate begins that ended early."""

ENOUGH = 6
"""Candidates that were looked at, before it is weighed whether looks save time."""


@dataclass(frozen=True)
class Look:
    """What counts of a block here: its level, whether it is valid, and the seconds it took."""

    concurrency: int
    valid: bool
    warmup_s: float
    window_s: float


@dataclass(frozen=True)
class LooksSaved:
    """What first looks have brought: candidates that were looked at, those that left the race, and seconds saved.

    Blocks that were not measured are a gain, the second warm-up of those that were a cost.
    """

    looked_at: int
    left: int
    saved_s: float

    @property
    def sentence(self) -> str:
        """For a person; "" where nobody was looked at."""
        if not self.looked_at:
            return ""
        saved = f"about {self.saved_s / 60:.1f} minutes saved" if self.saved_s > 0 else "no time saved"
        return f"{self.left} of {self.looked_at} candidates left the race after a short look: {saved}"


def looks_saved(data: StudyData) -> LooksSaved:
    """What first looks have brought so far."""
    whole = [b.block for b in data.blocks.values() if b.role == "screen" and b.candidate_id == data.baseline.id]
    usual_s = math.fsum(block.window_s for block in whole) / len(whole) if whole else 0.0
    measured = [trial for trial in data.measured if trial.slot.look in data.by_slot]
    slots = {slot for trial in measured for slot in (trial.slot.look, trial.slot)}
    seen = {
        slot: [Look(b.concurrency, b.block.valid, b.block.warmup_s, b.block.window_s) for b in data.by_slot[slot]]
        for slot in slots & data.by_slot.keys()
    }
    return saved(measured, seen, usual_s)


def saved(measured: Iterable[StoredTrial], seen: Mapping[Slot, Sequence[Look]], usual_s: float) -> LooksSaved:
    """The same of plain figures; `usual_s` is the mean window of the baseline in the search."""
    looked = left = 0
    gain = 0.0
    for trial in measured:
        looks = seen.get(trial.slot.look, ())
        if trial.running or not looks:
            continue
        looked += 1
        left += trial.why.startswith(OUT)
        again = {block.concurrency for block in seen.get(trial.slot, ())}
        for block in looks:
            if block.concurrency not in again and trial.constraints.get("launch", 1.0) <= 0:
                gain += max(0.0, usual_s - block.window_s)
            elif block.concurrency in again:
                gain -= block.warmup_s if block.valid else block.warmup_s + block.window_s
    return LooksSaved(looked, left, gain)
