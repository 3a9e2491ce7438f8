"""Where workers fit: pure functions of what a cluster has and of what a launch takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import EnvironmentBroken, UsageError
from tuner.space import Space

ON_GPUS = ("sglang", "vllm")
"""Engines that run on GPUs unless they are told otherwise."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, and what it has in all, whoever uses it now."""

    id: str
    host: str
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Needs:
    """What one worker takes: GPUs and cores of one launch. None for `cpus`: an equal share of the node's.

    `at_most` bounds the number of workers.
    """

    gpus: int = 0
    cpus: int | None = None
    at_most: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("gpus", self.gpus, 0), ("cpus", self.cpus, 1), ("at-most", self.at_most, 1)):
            if value is not None and value < least:
                raise UsageError(f"--{name} {value}: must be at least {least}")


@dataclass(frozen=True)
class Room:
    """Room for one worker on a node: the `number`-th there, with so many GPUs and cores."""

    node: str
    host: str
    number: int
    gpus: int
    cpus: int

    @property
    def name(self) -> str:
        """How it is called before its GPUs are known."""
        return f"{self.host} #{self.number + 1}" if self.gpus else self.host


def rooms(nodes: Sequence[Node], needs: Needs) -> tuple[Room, ...]:
    """Every room that the nodes have, one node after the other in turn, so that few workers spread over many hosts.

    Without GPUs a worker has its host to itself, for what it measures there needs all of it.
    """
    found: list[Room] = []
    hosts: set[str] = set()
    for node in sorted(nodes, key=lambda node: (node.host, node.id)):
        if needs.gpus:
            count = node.gpus // needs.gpus
            if needs.cpus:
                count = min(count, node.cpus // needs.cpus)
        else:
            count = int(node.host not in hosts and node.cpus >= (needs.cpus or 1))
        hosts.add(node.host)
        for number in range(count):
            cpus = needs.cpus or (max(1, node.cpus // count) if node.cpus else 0)
            found.append(Room(node.id, node.host, number, needs.gpus, cpus))
    found.sort(key=lambda room: (room.number, room.host, room.node))
    return tuple(found[: needs.at_most])


def require_room(nodes: Sequence[Node], needs: Needs) -> tuple[Room, ...]:
    """As `rooms`, of which there must be one.

    Raises:
        EnvironmentBroken: no node has what one launch takes.
    """
    found = rooms(nodes, needs)
    if not found:
        wanted = f"{needs.gpus} GPU{'s' * (needs.gpus != 1)}" if needs.gpus else "cores"
        wanted += f" and {needs.cpus} cores" if needs.cpus and needs.gpus else ""
        wanted = f"{needs.cpus} cores" if needs.cpus and not needs.gpus else wanted
        has = "; ".join(f"{node.host}: {node.gpus} GPUs, {node.cpus} cores" for node in nodes) or "none"
        raise EnvironmentBroken(
            f"no node of the Ray cluster has {wanted}, which one launch takes (nodes: {has}). Nothing was started; add "
            "such a node, or say what a launch takes with --gpus and --cpus"
        )
    return found


def gpus_of_launch(space: Space) -> int:
    """How many GPUs the largest launch of a space takes, as far as the space says: its devices, or ranks on GPUs."""
    fixed: dict[str, Any] = {**space.args, **space.baseline.settings}
    values: dict[str, set[Any]] = {name: {value} for name, value in fixed.items() if name in ("tp", "device")}
    for parameter in space.parameters:
        if parameter.name in ("tp", "device"):
            ends = {parameter.high} if parameter.high is not None else set()
            values.setdefault(parameter.name, set()).update(parameter.choices or (), ends)
    on_gpus = "gpu" in values.get("device", {"gpu"} if space.kind in ON_GPUS else set())
    ranks = _largest(values.get("tp", {1})) if on_gpus else 0
    return max(ranks, len(space.devices))


def _largest(values: set[Any]) -> int:
    return max((value for value in values if isinstance(value, int) and not isinstance(value, bool)), default=1)


def passed_on(names: Sequence[str], environment: Mapping[str, str], storage: str | None) -> dict[str, str]:
    """What every worker is given of the environment here: the study's database, and the secrets that it asks for.

    Args:
        names: variables that the space names; those that are not set are left out.
        environment: of this process.
        storage: the database as an option gave it.
    """
    files = ("FILE", "DIR", "CERT", "KEY", "CRL")
    found = {name: value for name, value in environment.items() if name.startswith("PG") and not name.endswith(files)}
    found |= {name: environment[name] for name in (*names, "HF_TOKEN") if environment.get(name)}
    return {**found, "TUNER_STORAGE": storage} if storage else found
