"""What a study tells while it runs. The controller speaks to an `Observer` and does not know who listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.study.data import Slot, StudyData


@dataclass(frozen=True)
class Event:
    """Something happened. `message` is a sentence for a person, `facts` are for machines."""

    kind: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    """Who wants to know."""

    def event(self, event: Event) -> None:
        """Something happened."""

    def state(self, data: StudyData) -> None:
        """The study's records as they now are; before each step."""

    def working(self, slot: Slot, phase: str, concurrency: int | None = None) -> None:
        """A launch is in a phase: start, ready, smoke, reconfigure, block, answers, stop."""

    def block_progress(self, progress: Any) -> None:
        """A block under way, a few times a second; `progress` is the load client's."""


class Silent:
    """Nobody wants to know."""

    def event(self, event: Event) -> None:
        """Ignored."""

    def state(self, data: StudyData) -> None:
        """Ignored."""

    def working(self, slot: Slot, phase: str, concurrency: int | None = None) -> None:
        """Ignored."""

    def block_progress(self, progress: Any) -> None:
        """Ignored."""
