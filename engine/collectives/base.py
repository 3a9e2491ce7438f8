"""What every backend has in common, and which one is taken."""

from __future__ import annotations

import ctypes
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import ALLREDUCE
from engine.errors import CollectiveError, CollectiveTimeout, InvalidConfig, RankLost, RanksDisagree
from engine.ops.base import Hook

MODULES = tuple(name for name in ALLREDUCE if name != "auto")
"""Files of this folder, each with a `BACKEND`, in the order in which "auto" prefers them."""

DTYPES = (torch.float32, torch.bfloat16)
"""By their number in calls from compiled kernels (`ReduceHook` in ops/layers.hpp)."""


@dataclass(frozen=True)
class Place:
    """Where the ranks are to run: how many, all of this machine, on "cpu" or "cuda"."""

    ranks: int
    device: str = "cpu"


@dataclass
class Count:
    """Of one kind of operation: calls, bytes of the results, seconds in all, and of the slowest call."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0


class Collective(Protocol):
    """One rank's end of an open backend. Every rank calls the same operations in the same order, from one thread.

    All raise CollectiveTimeout, RankLost or RanksDisagree, and are of no use after that.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up over all ranks, in place; the same bits on every rank. x is contiguous, of one of `DTYPES`."""
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [T, widths[rank]] of every rank side by side, [T, sum(widths)]."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place, on every rank; the shape is the same everywhere."""
        ...

    def hook(self) -> Hook:
        """For kernels that run whole layers. After it has failed, `failure` says why."""
        ...

    def failure(self) -> CollectiveError:
        """Why the last call of the hook failed."""
        ...

    def lose(self, rank: int) -> None:
        """From any thread: that rank has died, so nobody need wait for it."""
        ...

    def counts(self) -> Mapping[str, Count]:
        """By operation."""
        ...

    def close(self) -> None:
        """Let go of memory and connections."""
        ...


class Backend(Protocol):
    """A way to exchange. `verified`: whether it has really run on hardware of its kind (docs/hardware.md)."""

    name: str
    verified: bool

    def unavailable(self, place: Place) -> str | None:
        """Why it cannot run there; None when it can. Opens nothing."""
        ...

    def meeting(self, place: Place) -> Any:
        """On rank 0, before the other ranks exist: what all need to meet. It reaches them as an argument of a spawned
        process; `forget` is called when all have opened it."""
        ...

    def open(self, meeting: Any, rank: int, place: Place, timeout_s: float) -> Collective:
        """On each rank. Ranks may arrive here at different times."""
        ...


@dataclass(frozen=True)
class Choice:
    """Which backend is taken and why; `refused`: why others are not, by name."""

    name: str
    reason: str
    verified: bool
    refused: Mapping[str, str] = field(default_factory=dict)


def backend(name: str) -> Backend:
    """The backend of this name. Raises KeyError."""
    if name not in MODULES:
        raise KeyError(name)
    found: Backend = importlib.import_module(f"engine.collectives.{name}").BACKEND
    return found


def choose(wanted: str, place: Place, backends: Sequence[str] = MODULES) -> Choice:
    """The backend for these ranks: the one that is asked for, or with "auto" the first verified one that can run.

    Raises:
        InvalidConfig: it cannot run here, or none can; with the reasons.
    """
    refused = {name: why for name in backends if (why := backend(name).unavailable(place)) is not None}
    able = [name for name in backends if name not in refused]
    if wanted != "auto":
        if wanted in refused:
            instead = ", ".join(able) or "none"
            raise InvalidConfig(f"allreduce: '{wanted}' cannot run here: {refused[wanted]}; what can: {instead}")
        return Choice(wanted, "asked for", backend(wanted).verified, refused)
    for name in [name for name in able if backend(name).verified] + able:
        preferred = backends[: backends.index(name)]
        because = "; ".join(
            f"not {other}: {refused.get(other, 'it has never run on real hardware')}" for other in preferred
        )
        reason = f"auto: the first that can run here{f' ({because})' if because else ''}"
        return Choice(name, reason, backend(name).verified, refused)
    raise InvalidConfig("allreduce: nothing can run here: " + "; ".join(f"{n}: {w}" for n, w in refused.items()))


class Group:
    """The ranks of one model as its layers see them: this one's number, how many there are, and what joins them."""

    def __init__(self, rank: int = 0, ranks: int = 1, collective: Collective | None = None) -> None:
        """Without a collective there is one rank, which has everything."""
        self.rank, self.ranks = rank, ranks
        self._collective = collective

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        return x if self._collective is None else self._collective.all_reduce(x)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `Collective.all_gather`."""
        return x if self._collective is None else self._collective.all_gather(x, widths)

    def agree(self, mine: np.ndarray, about: np.ndarray) -> np.ndarray:
        """Rank 0's values, int64 [n]. `about`, int64 [m], must be the same on every rank, or they have gone apart.

        Raises:
            RanksDisagree: it is not.
        """
        if self._collective is None:
            return mine
        told = torch.from_numpy(np.concatenate((about, mine)))
        self._collective.broadcast(told)
        values = told.numpy()
        if not np.array_equal(values[: len(about)], about):
            raise RanksDisagree(
                f"rank {self.rank} has other draft tokens than rank 0: they do not compute the same any more"
            )
        return values[len(about) :]

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place, without waiting where the exchange is a device's."""
        return x if self._collective is None else self._collective.broadcast(x)

    def hook(self) -> Hook | None:
        """See `Collective.hook`; None where there is nothing to add up."""
        return None if self._collective is None else self._collective.hook()

    def failure(self) -> CollectiveError:
        """See `Collective.failure`."""
        assert self._collective is not None
        return self._collective.failure()

    def counts(self) -> Mapping[str, Count]:
        """See `Collective.counts`."""
        return {} if self._collective is None else self._collective.counts()


_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)


class PythonCollective(ABC):
    """What backends that are called from Python share: counting, numbering, errors, and the hook.

    A subclass has `_sum`, `_gather` and `_send`, which raise RuntimeError as torch does.
    """

    def __init__(self, name: str, rank: int, ranks: int, timeout_s: float) -> None:
        self._name, self._rank, self._ranks, self._timeout_s = name, rank, ranks, timeout_s
        self._number = 0
        self._counts: dict[str, Count] = {}
        self._failure: CollectiveError | None = None
        self._callback = _HOOK(self._called)

    @abstractmethod
    def _sum(self, x: Tensor) -> None:
        """Of every rank's x, in place."""

    @abstractmethod
    def _gather(self, x: Tensor, parts: list[Tensor]) -> None:
        """Every rank's x to `parts`."""

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Rank 0's x to all."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        self._run("all_reduce", x.nbytes, lambda: self._sum(x))
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `Collective.all_gather`."""
        widest = max(widths)
        mine = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = [torch.empty_like(mine) for _ in widths]
        self._run("all_gather", x.shape[0] * sum(widths) * x.itemsize, lambda: self._gather(mine.contiguous(), parts))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Collective.broadcast`."""
        self._run("broadcast", x.nbytes, lambda: self._send(x))
        return x

    def hook(self) -> Hook:
        """See `Collective.hook`."""
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        return Hook(address, 0)

    def failure(self) -> CollectiveError:
        """See `Collective.failure`."""
        assert self._failure is not None
        return self._failure

    def lose(self, rank: int) -> None:
        """See `Collective.lose`. A connection to a process that has died breaks by itself."""
        return

    def counts(self) -> Mapping[str, Count]:
        """See `Collective.counts`."""
        return self._counts

    def _called(self, group: int | None, data: int, count: int, kind: int) -> int:
        """By compiled kernels, on data that is theirs."""
        try:
            with torch.inference_mode():
                dtype = DTYPES[kind]
                raw = (ctypes.c_byte * (count * dtype.itemsize)).from_address(data)
                self.all_reduce(torch.frombuffer(raw, dtype=dtype))
        except CollectiveError:
            return 1
        return 0

    def _run(self, operation: str, nbytes: int, work: Callable[[], None]) -> None:
        self._number += 1
        began = time.perf_counter()
        try:
            work()
        except RuntimeError as error:
            self._failure = self._explain(operation, nbytes, time.perf_counter() - began, error)
            raise self._failure from error
        took = time.perf_counter() - began
        count = self._counts.setdefault(operation, Count())
        count.calls += 1
        count.bytes += nbytes
        count.seconds += took
        count.slowest_s = max(count.slowest_s, took)

    def _explain(self, operation: str, nbytes: int, waited_s: float, error: RuntimeError) -> CollectiveError:
        where = place_of(self._rank, self._ranks, operation, self._number, nbytes, self._name)
        if waited_s >= 0.9 * self._timeout_s:
            return CollectiveTimeout(f"{where}: another rank did not arrive within {self._timeout_s:g} s")
        return RankLost(f"{where}: the connection to another rank broke ({' '.join(str(error).split())[:200]})")


def place_of(rank: int, ranks: int, operation: str, number: int, nbytes: int, name: str) -> str:
    """Which operation of which rank, for messages."""
    return f"rank {rank} of {ranks}, operation {number} ({operation} of {nbytes} bytes by {name})"
