"""`engine.device.Device` on an NVIDIA GPU: all that is asked of torch's CUDA directly.

None of it has run on a GPU (docs/hardware.md).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.device import Device, Exchange, Work
from engine.errors import InvalidConfig
from engine.graphs import Bucket, Capturer, Graph

if TYPE_CHECKING:
    from engine.ops.base import DeviceOps


def device_of(name: str, rank: int) -> Device | None:
    """The device of this rank: the GPU of its number; None: the CPU.

    Raises:
        InvalidConfig: there is no such GPU.
    """
    if name == "cpu":
        return None
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise InvalidConfig(f"device: 'cuda' cannot be used: torch sees no NVIDIA GPU (it is built for {built})")
    count = torch.cuda.device_count()
    if rank >= count:
        raise InvalidConfig(f"tp: rank {rank} needs a GPU of its own, and there are {count}")
    torch.cuda.set_device(rank)
    return Cuda(torch.device("cuda", rank))


class Cuda:
    """See `engine.device.Device`. Rounds are queued on the current stream, copies to the host on one of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)

    def ops(self, exchange: Exchange) -> DeviceOps:
        """See `Device.ops`."""
        from engine.ops.triton.ops import TritonOps
        from engine.ops.triton.tuned import Tuned

        return TritonOps(Tuned(describe(self.device), measure, exchange=exchange))

    def later(self, values: Tensor) -> Callable[[], np.ndarray]:
        """See `Device.later`."""
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            arrived.copy_(values, non_blocking=True)
            done.record(self._copies)
        values.record_stream(self._copies)  # its memory is not given to others before it has been copied

        def wait() -> np.ndarray:
            done.synchronize()
            return arrived.numpy()

        return wait

    def mark(self) -> torch.cuda.Event:
        """See `Device.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See `Device.seconds`."""
        return float(first.elapsed_time(second)) / 1e3

    def capturer(self, work: Work) -> Capturer:
        """See `Device.capturer`."""
        return CudaCapturer(work)

    def memory(self) -> tuple[int, int]:
        """See `Device.memory`."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)


def describe(device: torch.device) -> str:
    """What tells a device from others that kernels are tuned for."""
    facts = torch.cuda.get_device_properties(device)
    return (
        f"{facts.name}, {facts.multi_processor_count} processors, CUDA {torch.version.cuda}, torch {torch.__version__}"
    )


def measure(call: Callable[[], object]) -> float:
    """Seconds that a call takes on the current device, the least of some."""
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)


class CudaCapturer:
    """`engine.graphs.Capturer` on a GPU; all graphs share one pool of memory."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._pool: Any = None

    def warm_up(self, phase: str, bucket: Bucket) -> None:
        """See `Capturer.warm_up`."""
        call = self._work.work(phase, bucket)
        for _ in range(2):
            call()
        torch.cuda.synchronize()

    def capture(self, phase: str, bucket: Bucket) -> Graph:
        """See `Capturer.capture`."""
        call, graph = self._work.work(phase, bucket), torch.cuda.CUDAGraph()
        problem: Exception | None = None
        try:
            # NCCL's watchdog, a thread of its own, may ask for events meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    call()
                except Exception as error:
                    problem = error
                    raise
        except Exception:
            if problem is not None:
                raise problem from None  # the end of a broken capture fails as well, and says less
            raise
        self._pool = self._pool or graph.pool()
        return graph

    def discard(self) -> None:
        """See `Capturer.discard`."""
        self._pool = None
        self._work.forget()
        gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """See `Capturer.free_bytes`."""
        return int(torch.cuda.mem_get_info()[0])
