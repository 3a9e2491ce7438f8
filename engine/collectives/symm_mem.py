"""By torch's symmetric memory: GPUs read their peers' memory themselves, in one shot for small sums, two for larger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import NcclCollective, without_gpus

MOST_BYTES = 8 * 2**20
"""Larger sums are left to NCCL, whose rings use the links better."""
ONE_SHOT_BYTES = 256 * 2**10
"""Up to here everybody reads everything: one barrier instead of two."""
_ALIGNED = 16


def without_peers(place: Place) -> str | None:
    """Why GPUs cannot read each other's memory there; None when they can."""
    missing = without_gpus(place)
    if missing is not None:
        return missing
    for first in range(place.ranks):
        for second in range(place.ranks):
            if first != second and not torch.cuda.can_device_access_peer(first, second):
                return f"GPU {first} cannot read the memory of GPU {second} (see nvidia-smi topo -p2p r)"
    return None


class SymmMem:
    """See this module."""

    name = "symm_mem"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        return without_peers(place)

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return SymmMemCollective(self.name, meeting, rank, place, timeout_s)


def shared_buffer(group: Any, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Bytes that every GPU of the group maps, and the handle on the peers' ones. All ranks call it together."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer, symmetric.rendezvous(buffer, group)


class SymmMemCollective(NcclCollective):
    """One rank's end."""

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        super().__init__(name, meeting, rank, place, timeout_s)
        self._buffer, self._handle = shared_buffer(self._group, MOST_BYTES, self._device)

    def _sum(self, x: Tensor) -> None:
        if x.nbytes > MOST_BYTES or x.nbytes % _ALIGNED:
            super()._sum(x)
            return
        flat = x.view(-1)
        staged = self._buffer[: x.nbytes].view(x.dtype)
        staged.copy_(flat)
        if x.nbytes <= ONE_SHOT_BYTES:
            flat.copy_(torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", self._group.group_name))
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", self._group.group_name)
            flat.copy_(staged)


BACKEND = SymmMem()
