"""How the GPUs of this machine are joined, for the engines that refuse by it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tuner.engines.allreduce import Fabric, fabric
from tuner.space import Space
from tuner.space.devices import VISIBLE
from tuner.space.space import SIMULATED


def fabric_here(space: Space, devices: Sequence[str] = ()) -> Fabric | None:
    """How the GPUs of a space's servers are joined; None where it searches no all-reduce, or nothing is known.

    `devices` are the worker's, else the space's, its container's, or those that CUDA is told to show.
    """
    from tuner.launch import gpu

    named = {*space.args, *space.baseline.settings, *(parameter.name for parameter in space.parameters)}
    if space.kind == SIMULATED or "allreduce" not in named:
        return None
    inside = space.container.gpus if space.container is not None else None
    shown = os.environ.get(VISIBLE, "")
    chosen = tuple(devices) or space.devices or tuple(map(str, inside or ()) if isinstance(inside, list) else ())
    if not chosen and shown and space.container is None:
        chosen = tuple(word.strip() for word in shown.split(","))
    return fabric(gpu.topology(), gpu.peers(), gpu.capabilities(), chosen)
