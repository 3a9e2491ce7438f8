"""One shot by our own Triton kernel over symmetric memory, for GPUs that are joined by PCIe alone.

As `shm` on a CPU: two slots in turn, one barrier a sum, everybody adds all parts in the order of the ranks, so that all
get the same bits.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import NcclCollective
from engine.collectives.symm_mem import shared_buffer, without_peers

SLOT_BYTES = 512 * 2**10
"""Larger sums are left to NCCL."""


class Custom:
    """See this module."""

    name = "custom"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = without_peers(place)
        if missing is None and importlib.util.find_spec("triton") is None:
            return "it is written in Triton, which is not installed"
        return missing

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return CustomCollective(self.name, meeting, rank, place, timeout_s)


class CustomCollective(NcclCollective):
    """One rank's end."""

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        from engine.ops.triton.sums import add_parts

        super().__init__(name, meeting, rank, place, timeout_s)
        self._add = add_parts
        self._buffer, self._handle = shared_buffer(self._group, 2 * SLOT_BYTES, self._device)
        bases = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=self._device)
        self._parts = (bases, bases + SLOT_BYTES)
        self._turn = 0

    def _sum(self, x: Tensor) -> None:
        if x.nbytes > SLOT_BYTES:
            super()._sum(x)
            return
        # A slot is written again two sums later: after the barrier of the next one, which everybody enters when it has
        # read this one.
        self._turn ^= 1
        first = self._turn * SLOT_BYTES
        self._buffer[first : first + x.nbytes].view(x.dtype).copy_(x.view(-1))
        self._handle.barrier()
        self._add(self._parts[self._turn], self._ranks, x.view(-1))


BACKEND = Custom()
