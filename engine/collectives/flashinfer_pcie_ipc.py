"""FlashInfer's all-reduce over CUDA IPC, made for GPUs that are joined by PCIe alone, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.flashinfer_fusion import without_flashinfer
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import NcclCollective

_MOST_BYTES = 2**20
_RANKS = (2, 4, 8)
_WORKSPACE = "PcieIpcAllReduceWorkspace"


class FlashinferPcieIpc:
    """See this module."""

    name = "flashinfer_pcie_ipc"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = without_flashinfer(place, _WORKSPACE)
        if missing is None and place.ranks not in _RANKS:
            return f"it joins {', '.join(map(str, _RANKS))} GPUs, not {place.ranks}"
        return missing

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return PcieIpcCollective(self.name, meeting, rank, place, timeout_s)


class PcieIpcCollective(NcclCollective):
    """One rank's end. A workspace is made at the first sum of a type, which all ranks reach together.

    Its kernels wait for their peers without end; rank 0's watch over processes, and the timeout of the next exchange of
    chosen tokens (NCCL's), notice a peer that does not come.
    """

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        super().__init__(name, meeting, rank, place, timeout_s)
        self._kind: Any = getattr(importlib.import_module("flashinfer.comm"), _WORKSPACE)
        self._workspaces: dict[torch.dtype, Any] = {}

    def _sum(self, x: Tensor) -> None:
        if x.dtype not in self._workspaces:
            most = _MOST_BYTES // x.itemsize
            self._workspaces[x.dtype] = self._kind(group=self._group, max_numel=most, dtype=x.dtype)
        workspace = self._workspaces[x.dtype]
        if x.nbytes > _MOST_BYTES or not workspace.supports(x):
            super()._sum(x)
            return
        x.copy_(workspace.all_reduce(x))

    def close(self) -> None:
        """See `Collective.close`."""
        for workspace in self._workspaces.values():
            workspace.destroy()
        super().close()


BACKEND = FlashinferPcieIpc()
