"""No speculation: every tree is its root."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpecConfig
from engine.spec.base import DraftLimits, DraftTree, register, roots_and_chains


@register("none")
class NullDrafter:
    """Makes plain decoding a round like any other."""

    name = "none"
    limits = DraftLimits(max_depth=0, max_topk=1)

    def __init__(self, config: SpecConfig) -> None:
        del config

    def add(self, rid: int, tokens: Sequence[int]) -> None:
        """See `Drafter.add`."""

    def extend(self, rid: int, tokens: Sequence[int]) -> None:
        """See `Drafter.extend`."""

    def propose(self, rids: Sequence[int], roots: Sequence[int], num_steps: Sequence[int]) -> DraftTree:
        """See `Drafter.propose`."""
        return roots_and_chains(roots, [()] * len(roots))

    def release(self, rid: int) -> None:
        """See `Drafter.release`."""
