"""A device that is none: its tensors are on the CPU, but nobody may look at them, and who waits for them is counted.

A tensor here says that it is elsewhere ("meta", which torch knows without any hardware). As on a GPU, an operation on
tensors of two places fails, and what needs a value on the host waits: those are counted, whatever they are called.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from engine.device import Work
from engine.graphs import Bucket
from engine.ops.reference import ReferenceOps

PLACE = torch.device("meta")
aten = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}


class There(Tensor):
    """A tensor of the device; `held` are its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PLACE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device, though nothing is played")


def here(value: Any) -> Any:
    """The values of every tensor in it, also inside dataclasses."""

    def held(one: Any) -> Any:
        if isinstance(one, There):
            return one.held
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            return type(one)(**{f.name: here(getattr(one, f.name)) for f in dataclasses.fields(one)})
        return one

    return tree_map(held, value)


class Played(TorchDispatchMode):
    """While it is entered, the device exists. `waits`: where the host waited for it, by the lines that did."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            pinned = args[0].clone()
            self._pinned.add(pinned.data_ptr())
            self._kept = [*self._kept[-200:], pinned]
            return pinned
        if func not in _WAITS and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        found: list[Tensor] = []
        tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, (args, kwargs))
        there = [isinstance(one, There) for one in found]
        given = kwargs.get("device")
        result_there = torch.device(given) == PLACE if given is not None else any(there)
        copies = func in (aten._to_copy.default, aten.copy_.default)
        if copies:
            self._copied(func, args, kwargs, result_there)
        elif any(there):
            mixed = [one for one, elsewhere in zip(found, there, strict=True) if not elsewhere and one.dim()]
            assert not mixed, f"{func}: tensors of the host among those of the device"
            indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
            if func in _WAITS or any(one is not None and one.dtype == torch.bool for one in indices):
                self._waited(str(func))
        held = {**here(kwargs), "device": torch.device("cpu")} if given is not None else here(kwargs)
        if held.get("pin_memory"):
            held["pin_memory"] = False
        out = func(*here(args), **held)
        if func._schema.is_mutable:
            return args[0]
        if func in _WAITS and not isinstance(out, Tensor):
            return out
        return tree_map(lambda one: There(one) if isinstance(one, Tensor) and result_there else one, out)

    def _copied(self, func: Any, args: Any, kwargs: Any, to_there: bool) -> None:
        target, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
        ends_there = isinstance(target, There) if target is not None else to_there
        starts_there = isinstance(source, There)
        if starts_there == ends_there:
            return
        asked = kwargs.get("non_blocking") or (target is not None and len(args) > 2 and args[2])
        pinned = source.data_ptr() in self._pinned if not starts_there else False
        if not (asked and pinned):
            self._waited(f"{func}, {'to' if ends_there else 'from'} the device")

    def _waited(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/engine/" in f.filename and "tests" not in f.filename]
        self.waits.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)


class PlayedOps:
    """The reference's operations, on tensors of the device alone."""

    name = "played"

    def __init__(self, ops: Any = None) -> None:
        self._ops = ops or ReferenceOps()

    def fuse(self, stack: Any) -> None:
        return None

    def linear(self, *args: Any, **options: Any) -> Callable[[Tensor], Tensor]:
        with off():
            made = self._ops.linear(*here(args), **here(options))
        return self._wrapped(made)

    def describe(self, weights: str) -> dict[str, str]:
        return self._ops.describe(weights)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(getattr(self._ops, name))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            given: list[Any] = []
            for one in (*args, *options.values()):
                fields = vars(one).values() if dataclasses.is_dataclass(one) else [one]
                given += [part for part in fields if isinstance(part, Tensor)]
            there = [isinstance(part, There) for part in given]
            assert all(there) or not any(there), f"{call}: tensors of the host among those of the device"
            with off():
                out = call(*here(args), **here(options))
                return tree_map(lambda one: There(one) if isinstance(one, Tensor) and any(there) else one, out)

        return run


@contextmanager
def off() -> Iterator[None]:
    """Without the mode."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class PlayedDevice:
    """See `engine.device.Device`. `log`: what was sent to the host on purpose, and waited for, in order."""

    device = PLACE

    def __init__(
        self, mode: Played, fail_at: tuple[str, int] | None = None, in_warm_up: bool = False, ops: Any = None
    ) -> None:
        self._mode, self._ops = mode, ops
        self._fails = (fail_at, in_warm_up)
        self.log: list[tuple[str, int]] = []

    @property
    def fetches(self) -> int:
        return sum(what == "waited" for what, _ in self.log)

    def ops(self, exchange: Any) -> Any:
        return PlayedOps(self._ops)

    def later(self, values: Tensor) -> Callable[[], np.ndarray]:
        assert isinstance(values, There)
        with off():
            arrived = values.held.clone().numpy()
        number = sum(what == "sent" for what, _ in self.log)
        self.log.append(("sent", number))

        def wait() -> np.ndarray:
            self.log.append(("waited", number))
            return arrived

        return wait

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def capturer(self, work: Work) -> PlayedCapturer:
        return PlayedCapturer(work, *self._fails)

    def memory(self) -> tuple[int, int]:
        return 2**34, 2**34


class PlayedCollective:
    """Another one, for ranks whose tensors are on such a device."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def all_reduce(self, x: Tensor) -> Tensor:
        with off():
            self._real.all_reduce(here(x))
        return x

    def all_gather(self, x: Tensor, widths: Any) -> Tensor:
        with off():
            out = self._real.all_gather(here(x), widths)
            return There(out) if isinstance(x, There) else out

    def broadcast(self, x: Tensor) -> Tensor:
        with off():
            self._real.broadcast(here(x))
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class PlayedCapturer:
    """Captures what a GPU would: a call that reads and writes the same memory each time. Fails where it is told to."""

    def __init__(self, work: Work, fail_at: tuple[str, int] | None = None, in_warm_up: bool = False) -> None:
        self._work, self._fail_at, self._in_warm_up = work, fail_at, in_warm_up
        self.held = 0

    def warm_up(self, phase: str, bucket: Bucket) -> None:
        if (phase, bucket.requests) == self._fail_at and self._in_warm_up:
            raise MemoryError("out of memory")
        self._work.work(phase, bucket)()

    def capture(self, phase: str, bucket: Bucket) -> PlayedGraph:
        if (phase, bucket.requests) == self._fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.held += 1
        return PlayedGraph(self._work.work(phase, bucket))

    def discard(self) -> None:
        self.held = 0
        self._work.forget()

    def free_bytes(self) -> int:
        return (1000 - self.held) * 2**20


class PlayedGraph:
    """Replays by running again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call
