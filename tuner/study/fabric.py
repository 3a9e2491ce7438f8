"""How the GPUs of this machine are joined, for the engines that refuse by it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tuner.engines.allreduce import Fabric, fabric
from tuner.space import Space
from tuner.space.devices import VISIBLE
from tuner.space.space import SIMULATED


def fabric_here(space: Space, devices: Sequence[str] = ()) -> Fabric | None:
    """How the GPUs of a space's servers are joined; None where it says nothing of all-reduce, or nothing is known."""
    from tuner.launch import gpu

    named = {*space.args, *space.baseline.settings, *(parameter.name for parameter in space.parameters)}
    if space.kind == SIMULATED or "allreduce" not in named:
        return None
    return fabric(gpu.topology(), gpu.peers(), gpu.capabilities(), used_devices(space, devices))


def used_devices(space: Space, devices: Sequence[str] = ()) -> tuple[str, ...]:
    """The GPUs that servers use: a worker's, else the space's, its container's, or those that CUDA is told to show."""
    if chosen := tuple(devices) or space.devices:
        return chosen
    if space.container is not None:
        inside = space.container.gpus
        return tuple(map(str, inside)) if isinstance(inside, list) else ()
    shown = space.env.get(VISIBLE, os.environ.get(VISIBLE)) or ""
    return tuple(word for word in (word.strip() for word in shown.split(",")) if word)
