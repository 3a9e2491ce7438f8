"""No speculation: every tree is its root."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import DRAFTERS
from engine.spec.base import (
    Asked,
    Check,
    DraftTree,
    NothingResident,
    Resident,
    Seen,
    Surroundings,
    only_roots,
    register,
)


@register("none")
class NullDrafter:
    """Makes plain decoding a round like any other."""

    name = "none"
    limits = DRAFTERS["none"]
    observes = False
    features: tuple[int, ...] = ()
    lookahead = 0
    alarm_floor = 0.0
    check: Check | None = None
    identity = ""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings
        self.resident: Resident | None = NothingResident()

    def add(self, rid: int, row: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""

    def propose(self, asked: Asked) -> DraftTree:
        """See `Drafter.propose`."""
        return only_roots(asked.roots)

    def observe(self, seen: Seen) -> None:
        """See `Drafter.observe`."""

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""
