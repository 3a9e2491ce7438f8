"""What is asked of torch's CUDA directly: which device, how long a call takes there, and capturing graphs.

None of it has run on a GPU (docs/hardware.md).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from engine.errors import InvalidConfig
from engine.graphs import Graph

Work = Callable[[str, int], Callable[[], None]]
"""By phase and bucket: a call that reads and writes the same memory each time."""


def device_of(name: str, rank: int) -> torch.device:
    """The device of this rank: the CPU, or the GPU of its number.

    Raises:
        InvalidConfig: there is no such GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise InvalidConfig(f"device: 'cuda' cannot be used: torch sees no NVIDIA GPU (it is built for {built})")
    count = torch.cuda.device_count()
    if rank >= count:
        raise InvalidConfig(f"tp: rank {rank} needs a GPU of its own, and there are {count}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


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

    def warm_up(self, phase: str, bucket: int) -> None:
        """See `Capturer.warm_up`."""
        call = self._work(phase, bucket)
        for _ in range(2):
            call()
        torch.cuda.synchronize()

    def capture(self, phase: str, bucket: int) -> Graph:
        """See `Capturer.capture`."""
        call, graph = self._work(phase, bucket), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        self._pool = self._pool or graph.pool()
        return graph

    def discard(self) -> None:
        """See `Capturer.discard`."""
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """See `Capturer.free_bytes`."""
        return int(torch.cuda.mem_get_info()[0])
