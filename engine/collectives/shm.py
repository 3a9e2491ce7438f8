"""Through memory that all ranks share, by the compiled kernels of ops/shared.hpp: microseconds a call.

The segment is an anonymous file that only its processes know (memfd): it has no name in any file system, is not bound
by the size of /dev/shm, and is gone with the last process that has it, however that ends. What /proc/PID/maps calls it
holds a random number, so that a person can tell which processes belong together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import DTYPES, Collective, Count, Place, place_of
from engine.errors import CollectiveError, CollectiveTimeout, RankLost, RanksDisagree
from engine.ops.base import Hook
from engine.ops.native import NativeUnavailable, library

SLOT_BYTES = 4 * 2**20
"""Of data that a rank shows at a time, twice; only touched pages take memory."""
_SPINS = 200
"""Looks at a peer before the core is offered to others: some microseconds. A server's machine always has other work
(its frontend, its clients); beside some, 2000 looks made a decode step's sum take several times as long."""
_OPERATIONS = ("all_reduce", "all_gather", "broadcast")
_LOST, _DISAGREE = 2, 3  # see Failure in ops/shared.hpp; what is left is a timeout
MOST_RANKS = 64


class Segment:
    """The shared memory by its file descriptor. Can be an argument of a spawned process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(f"spec-tuner-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "fd": reduction.DupFd(self.fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size, self.fd = state["size"], state["fd"].detach()

    def map(self) -> mmap.mmap:
        """The memory itself."""
        return mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Forget the descriptor; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Shm:
    """See this module."""

    name = "shm"
    verified = True

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        if place.device != "cpu":
            return f"it adds up in main memory, and the model is on {place.device}"
        if platform.system() != "Linux":
            return f"its segments need Linux, this is {platform.system()}"
        if place.ranks > MOST_RANKS:
            return f"it joins at most {MOST_RANKS} ranks"
        try:
            library()
        except NativeUnavailable as error:
            return f"it needs the compiled kernels: {' '.join(str(error).split())}"
        return None

    def meeting(self, place: Place) -> Segment:
        """See `Backend.meeting`."""
        return Segment(library().st_shared_bytes(place.ranks, SLOT_BYTES))

    def open(self, meeting: Segment, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        crowded = place.ranks > len(os.sched_getaffinity(0))
        return ShmCollective(meeting.map(), rank, place.ranks, timeout_s, 0 if crowded else _SPINS)


class ShmCollective:
    """One rank's end."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout_s: float, spins: int) -> None:
        """`spins`: 0 where there are more ranks than cores, so that nobody keeps a core from whom he waits for."""
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._lib = library()
        self._memory = memory
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._group: int = self._lib.st_shared_open(self._start, rank, ranks, SLOT_BYTES, int(timeout_s * 1e9), spins)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        self._check(self._lib.st_shared_all_reduce(self._group, x.data_ptr(), x.numel(), DTYPES.index(x.dtype)))
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `Collective.all_gather`."""
        x = x.contiguous()
        at = [0]
        for width in widths:
            at.append(at[-1] + width * x.itemsize)
        widest = max(widths) * x.itemsize
        if widest > SLOT_BYTES:
            raise CollectiveError(f"a row of {widest} bytes does not fit into shared memory of {SLOT_BYTES}")
        out = torch.empty(x.shape[0], sum(widths), dtype=x.dtype)
        offsets = (ctypes.c_int64 * len(at))(*at)
        self._check(self._lib.st_shared_all_gather(self._group, x.data_ptr(), x.shape[0], offsets, out.data_ptr()))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Collective.broadcast`."""
        self._check(self._lib.st_shared_broadcast(self._group, x.data_ptr(), x.nbytes, 0))
        return x

    def hook(self) -> Hook:
        """See `Collective.hook`: kernels add up without a call of Python."""
        address = ctypes.cast(self._lib.st_shared_all_reduce, ctypes.c_void_p).value
        assert address is not None
        return Hook(address, self._group)

    def failure(self) -> CollectiveError:
        """See `Collective.failure`."""
        return self._explained()

    def lose(self, rank: int) -> None:
        """See `Collective.lose`."""
        self._lib.st_shared_lose(self._group, rank)

    def counts(self) -> Mapping[str, Count]:
        """See `Collective.counts`."""
        found = {}
        for index, operation in enumerate(_OPERATIONS):
            told = (ctypes.c_int64 * 4)()
            self._lib.st_shared_totals(self._group, index, told)
            calls, nbytes, nanoseconds, slowest = told
            if calls:
                found[operation] = Count(calls, nbytes, nanoseconds / 1e9, slowest / 1e9)
        return found

    def close(self) -> None:
        """See `Collective.close`. The memory goes with the process: a kernel may still look at it."""

    def _check(self, status: int) -> None:
        if status:
            raise self._explained()

    def _explained(self) -> CollectiveError:
        told = (ctypes.c_int64 * 8)()
        self._lib.st_shared_explain(self._group, told)
        number, peer, peer_number, operation, nbytes, peer_operation, peer_bytes, status = told
        where = place_of(self._rank, self._ranks, _OPERATIONS[operation], number, nbytes, "shm")
        if status == _LOST:
            return RankLost(f"{where}: rank {peer} has ended")
        if status == _DISAGREE:
            return RanksDisagree(
                f"{where}: rank {peer} is at {_OPERATIONS[peer_operation]} of {peer_bytes} bytes there: the ranks have "
                "gone apart"
            )
        return CollectiveTimeout(
            f"{where}: rank {peer} did not arrive within {self._timeout_s:g} s; it has done {peer_number}"
        )


BACKEND = Shm()
