"""Where an artefact comes from: what a person needs to trust it, and a program to check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tuner.records import LaunchRecord, short_hash


@dataclass(frozen=True)
class Figure:
    """What was measured at one level. Rates in output tokens per second, means over `blocks` valid blocks."""

    concurrency: int
    tokens_per_s: float
    baseline_tokens_per_s: float | None
    blocks: int
    role: str


@dataclass(frozen=True)
class Provenance:
    """The study, launch and figures behind an artefact.

    Args:
        study: its name.
        launch: the launch's number in the study.
        candidate: the candidate's id.
        decision: what the study says of it, in one sentence.
        record_hash: `record_hash` of the launch record.
        engine, engine_version: what was measured.
        measured_at: when the launch began, ISO 8601 in UTC.
        machine: the hardware it was measured on.
        figures: by level.
    """

    study: str
    launch: int
    candidate: str
    decision: str
    record_hash: str
    engine: str
    engine_version: str
    measured_at: str
    machine: Mapping[str, Any]
    figures: tuple[Figure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        return {**asdict(self), "figures": [asdict(figure) for figure in self.figures]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """The provenance that `to_dict` wrote."""
        return cls(**{**data, "figures": tuple(Figure(**figure) for figure in data["figures"])})


def record_hash(record: LaunchRecord) -> str:
    """The identity of a launch record."""
    return short_hash(record.to_dict())
