"""What a device with memory of its own offers beyond torch's tensors; the CPU needs none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.graphs import Bucket, Capturer
from engine.ops.base import DeviceOps

Exchange = Callable[[Any], Sequence[Any]]
"""Every rank's value, by rank; all ranks call it at the same point."""


class Work(Protocol):
    """What is to be captured."""

    def work(self, phase: str, bucket: Bucket) -> Callable[[], None]:
        """A call that reads and writes the same memory each time."""
        ...

    def forget(self) -> None:
        """Let go of that memory. None of the calls is made again."""
        ...


class Device(Protocol):
    """One rank's device. The only one there is is `engine.cuda.Cuda`; tests play others."""

    device: torch.device

    def ops(self, exchange: Exchange) -> DeviceOps:
        """Its kernels. What is chosen by measuring is chosen alike on all ranks."""
        ...

    def later(self, values: Tensor) -> Callable[[], np.ndarray]:
        """Begin to copy values to the host, behind what is queued now; what it gives waits for the copy.

        The only place at which a round waits for the device.
        """
        ...

    def mark(self) -> Any:
        """A point in what is queued now."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Between two marks that the device is known to have passed."""
        ...

    def capturer(self, work: Work) -> Capturer:
        """Of graphs of this work."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that nobody has, and all."""
        ...
