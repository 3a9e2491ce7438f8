"""NCCL over memory that is registered with all ranks (since NCCL 2.27): kernels of low latency for small sums."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import Nccl, NcclCollective
from engine.collectives.symm_mem import MOST_BYTES, without_peers

_SINCE = (2, 27, 0)


class NcclSymm:
    """See this module."""

    name = "nccl_symm"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = Nccl().unavailable(place) or without_peers(place)
        if missing is not None:
            return missing
        version = torch.cuda.nccl.version()
        if version < _SINCE:
            return f"it needs NCCL {'.'.join(map(str, _SINCE))}, this is {'.'.join(map(str, version))}"
        return None

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return NcclSymmCollective(self.name, meeting, rank, place, timeout_s)


class NcclSymmCollective(NcclCollective):
    """One rank's end."""

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        super().__init__(name, meeting, rank, place, timeout_s)
        symmetric.set_backend("NCCL")
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=self._device)
        self._handle = symmetric.rendezvous(self._buffer, self._group)

    def _sum(self, x: Tensor) -> None:
        if x.nbytes > MOST_BYTES:
            super()._sum(x)
            return
        staged = self._buffer[: x.nbytes].view(x.dtype)
        staged.copy_(x.view(-1))
        super()._sum(staged)
        x.view(-1).copy_(staged)


BACKEND = NcclSymm()
