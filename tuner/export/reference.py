"""What a server is held against later: the measured blocks, the answers, and the traffic of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tuner.secrets import without_secrets


@dataclass(frozen=True)
class Level:
    """The blocks of one level, one a launch: output tokens per second, and the relative SD of each by its seconds."""

    concurrency: int
    tokens_per_s: tuple[float, ...]
    within: tuple[float, ...]
    role: str


@dataclass(frozen=True)
class Reference:
    """How a launch was measured, and what came of it.

    Args:
        space: of the study, as a dictionary without secrets.
        levels: by concurrency.
        answers: to the output-quality gate's prompts, as `tuner.judge.quality.Answers` writes them; None: not asked.
        pair_sd: of a pair's log ratio by a calibration of the machine; None: not calibrated.
        fingerprint: what the study's figures depend on.
    """

    space: Mapping[str, Any]
    levels: tuple[Level, ...]
    answers: Mapping[str, Any] | None
    pair_sd: float | None
    fingerprint: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        return {
            "space": without_secrets(self.space),
            "levels": [asdict(level) for level in self.levels],
            "answers": self.answers,
            "pair_sd": self.pair_sd,
            "fingerprint": dict(self.fingerprint),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reference:
        """The reference that `to_dict` wrote.

        Raises:
            ValueError: a rate that is none.
        """
        levels = tuple(
            Level(one["concurrency"], tuple(one["tokens_per_s"]), tuple(one["within"]), one["role"])
            for one in data["levels"]
        )
        if not all(0 < rate < math.inf for level in levels for rate in level.tokens_per_s):
            raise ValueError("a figure of its reference is no rate")
        return cls(data["space"], levels, data["answers"], data["pair_sd"], data["fingerprint"])
