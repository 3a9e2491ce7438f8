"""By NVIDIA's NCCL, through torch: any size, any links, CUDA graphs; the one to fall back on where there are GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place, PythonCollective
from engine.collectives.gloo import Meeting, open_store


def without_gpus(place: Place) -> str | None:
    """Why nothing that adds up on GPUs can run there; None when something can."""
    if place.device != "cuda":
        return f"it adds up on NVIDIA GPUs, and the model is on {place.device}"
    if not torch.cuda.is_available():
        return "this torch sees no NVIDIA GPU"
    if torch.cuda.device_count() < place.ranks:
        return f"{place.ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}"
    return None


class Nccl:
    """See this module."""

    name = "nccl"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = without_gpus(place)
        if missing is None and not torch.distributed.is_nccl_available():
            return "this torch was built without NCCL"
        return missing

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`. The rank's GPU is the one of its number."""
        return NcclCollective(self.name, meeting, rank, place, timeout_s)


class NcclCollective(PythonCollective):
    """One rank's end. Calls return when they are queued on the current stream; NCCL's own watchdog ends what hangs.

    Backends that are faster for some sums are subclasses with a `_sum` of their own, which leaves the others to this
    one. All use torch's own process group, of which a process has one.
    """

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        from torch import distributed

        super().__init__(name, rank, place.ranks, timeout_s)
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        distributed.init_process_group(
            "nccl",
            store=open_store(meeting, rank, place.ranks),
            rank=rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device,
        )
        self._group: Any = distributed.group.WORLD

    def _sum(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def _gather(self, x: Tensor, parts: list[Tensor]) -> None:
        self._group.allgather([parts], [x]).wait()

    def _send(self, x: Tensor) -> None:
        here = x.to(self._device)
        self._group.broadcast([here]).wait()
        if here is not x:
            x.copy_(here)

    def close(self) -> None:
        """See `Collective.close`."""
        from torch import distributed

        distributed.destroy_process_group()


BACKEND = Nccl()
