"""FlashInfer's all-reduce kernels, where it is installed; they could also fuse a norm, and here add up alone."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import NcclCollective
from engine.collectives.symm_mem import without_peers

_MOST_BYTES = {2: 64 * 2**20, 4: 2 * 2**20, 8: 2**19}
"""By ranks; larger sums are left to NCCL."""
_SINCE = (9, 0)


def without_flashinfer(place: Place, needed: str) -> str | None:
    """Why FlashInfer's `needed` cannot be used there; None when it can."""
    missing = without_peers(place)
    if missing is not None:
        return missing
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install flashinfer-python)"
    if not hasattr(importlib.import_module("flashinfer.comm"), needed):
        return f"this FlashInfer has no {needed}; it needs a newer one"
    return None


class FlashinferFusion:
    """See this module."""

    name = "flashinfer_fusion"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = without_flashinfer(place, "allreduce_fusion")
        if missing is not None:
            return missing
        if place.ranks not in _MOST_BYTES:
            return f"it joins {', '.join(map(str, _MOST_BYTES))} GPUs, not {place.ranks}"
        if torch.cuda.get_device_capability(0) < _SINCE:
            return "it needs compute capability 9.0 or later"
        return None

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return FlashinferCollective(self.name, meeting, rank, place, timeout_s)


class FlashinferCollective(NcclCollective):
    """One rank's end. Workspaces are made at the first sum of a width and type, which all ranks reach together."""

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        super().__init__(name, meeting, rank, place, timeout_s)
        self._comm: Any = importlib.import_module("flashinfer.comm")
        self._workspaces: dict[tuple[int, torch.dtype], Any] = {}

    def _sum(self, x: Tensor) -> None:
        most = _MOST_BYTES[self._ranks]
        if x.ndim != 2 or x.nbytes > most:
            super()._sum(x)
            return
        width = x.shape[1]
        if (width, x.dtype) not in self._workspaces:
            self._workspaces[width, x.dtype] = self._comm.create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=self._ranks,
                rank=self._rank,
                max_token_num=most // (width * x.itemsize),
                hidden_dim=width,
                dtype=x.dtype,
            )
        pattern = self._comm.AllReduceFusionPattern.kAllReduce
        x.copy_(self._comm.allreduce_fusion(input=x, workspace=self._workspaces[width, x.dtype], pattern=pattern))

    def close(self) -> None:
        """See `Collective.close`."""
        for workspace in self._workspaces.values():
            workspace.destroy()
        super().close()


BACKEND = FlashinferFusion()
