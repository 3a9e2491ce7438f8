"""MSCCL++'s packet all-reduce, where it is installed: flags travel with the data, so that a small sum needs no barrier.

Of its algorithms the one in which each rank adds up its own share and sends the result to all, so that all get the same
bits. Written from its documentation (microsoft.github.io/mscclpp, guide to torch).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place
from engine.collectives.gloo import Meeting
from engine.collectives.nccl import NcclCollective
from engine.collectives.symm_mem import without_peers
from engine.errors import CollectiveError

_ALGORITHM = "default_allreduce_packet"
_MOST_BYTES = 2**20
"""Larger sums are left to NCCL."""
_SCRATCH_BYTES = 64 * 2**20
_ARGUMENTS = {"scratch_buffer", "scratch_buffer_size", "rank"}


class Mscclpp:
    """See this module."""

    name = "mscclpp"
    verified = False

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        missing = without_peers(place)
        if missing is not None:
            return missing
        if importlib.util.find_spec("mscclpp") is None:
            return "MSCCL++ is not installed (its Python package is built from source, see microsoft.github.io/mscclpp)"
        try:
            builder = importlib.import_module("mscclpp.ext").AlgorithmCollectionBuilder
        except (ImportError, AttributeError) as error:
            return f"this MSCCL++ has no collection of algorithms for Python ({error}); it needs a newer one"
        wanted = set(inspect.signature(builder.build_default_algorithms).parameters) - {"self"}
        if wanted != _ARGUMENTS:
            return (
                f"this MSCCL++ builds its algorithms from {', '.join(sorted(wanted))}; known are those that need less"
            )
        return None

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        return MscclppCollective(self.name, meeting, rank, place, timeout_s)


class MscclppCollective(NcclCollective):
    """One rank's end.

    Its kernels wait for their peers without end; rank 0's watch over processes, and the timeout of the next exchange of
    chosen tokens (NCCL's), notice a peer that does not come.
    """

    def __init__(self, name: str, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> None:
        from torch import distributed

        super().__init__(name, meeting, rank, place, timeout_s)
        self._module: Any = importlib.import_module("mscclpp")
        self._type_of: Any = importlib.import_module("mscclpp.utils").torch_dtype_to_mscclpp_dtype
        # Its ranks find each other by a number that is broadcast on the host, which NCCL's group cannot do.
        self._comm = self._module.CommGroup(torch_group=distributed.new_group(backend="gloo"))
        scratch = self._module.RawGpuBuffer(_SCRATCH_BYTES).to_dlpack(data_type=str(torch.float16))
        self._scratch = torch.from_dlpack(scratch)
        builder = importlib.import_module("mscclpp.ext").AlgorithmCollectionBuilder()
        made = builder.build_default_algorithms(
            scratch_buffer=self._scratch.data_ptr(), scratch_buffer_size=self._scratch.nbytes, rank=rank
        )
        found = [one for one in made if one.collective == "allreduce" and one.name == _ALGORITHM]
        if not found:
            raise CollectiveError(f"this MSCCL++ has no {_ALGORITHM}; it has {', '.join(one.name for one in made)}")
        self._algorithm = found[0]

    def _sum(self, x: Tensor) -> None:
        if x.nbytes > _MOST_BYTES or x.nbytes % (16 * self._ranks):
            super()._sum(x)
            return
        status = self._algorithm.execute(
            comm=self._comm.communicator,
            input_buffer=x.data_ptr(),
            output_buffer=x.data_ptr(),
            input_size=x.nbytes,
            output_size=x.nbytes,
            dtype=self._type_of(x.dtype),
            op=self._module.ReduceOp.SUM,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
        )
        if status:
            raise CollectiveError(f"rank {self._rank}: MSCCL++ refuses a sum of {x.nbytes} bytes with status {status}")

    def close(self) -> None:
        """See `Collective.close`."""
        del self._algorithm, self._scratch, self._comm
        super().close()


BACKEND = Mscclpp()
