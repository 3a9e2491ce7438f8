"""How a machine's GPUs are joined, as `nvidia-smi` draws it, and which all-reduce paths that speaks against.

What an engine would refuse or replace there stands with its sources in `versions/` (`gpus.*` conditions), for the
bundled engine here. None of the paths has run on such machines (docs/hardware.md): one counts as in effect only when
the server says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.engines.versions import Rule

FACTS = ("gpus.linked", "gpus.any_link", "gpus.peers", "gpus.switched", "gpus.capability")
"""What rules may ask of the GPUs: whether NVLink joins every two, or any two, whether each reads the others' memory,
whether they have NVLink switches (multicast), and their compute capability. What is not known is left out, and no rule
holds by it."""

_LINK = re.compile(r"NV(\d+)")
_MOST_LINKS = 18
"""NVLinks of a Hopper or Blackwell GPU: more than these towards its peers together is a switch's doing."""


@dataclass(frozen=True)
class Fabric:
    """The GPUs that servers may use, in order.

    `joins[i][j]` is what nvidia-smi calls the way from one to another (NV18, PIX, PXB, PHB, NODE, SYS); `peers[i][j]`
    says whether one reads the other's memory, where that is told; `capabilities` are as in 9.0, None where not told.
    """

    joins: tuple[tuple[str, ...], ...]
    peers: tuple[tuple[bool, ...], ...] | None = None
    capabilities: tuple[float | None, ...] = ()

    def facts(self, tp: int) -> dict[str, Any]:
        """What is known of the first `tp` GPUs, by the names of `FACTS`; nothing where there are fewer."""
        if not 1 < tp <= len(self.joins):
            return {}
        links = [_LINK.fullmatch(self.joins[i][j]) for i, j in _pairs(tp)]
        found: dict[str, Any] = {"gpus.linked": all(links), "gpus.any_link": any(links)}
        if self.peers is not None:
            peers = self.peers
            found["gpus.peers"] = all(peers[i][j] for i, j in _pairs(tp))
        capabilities = set(self.capabilities[:tp])
        if len(capabilities) == 1 and (only := capabilities.pop()) is not None:
            found["gpus.capability"] = only
        if (switched := self._switched(tp)) is not None:
            found["gpus.switched"] = switched
        return found

    def _switched(self, tp: int) -> bool | None:
        """Without NVLink between two there is no switch; with more links than a GPU has there is; else unknown."""
        if not all(_LINK.fullmatch(self.joins[i][j]) for i, j in _pairs(tp)):
            return False
        links = [_LINK.fullmatch(way) for j, way in enumerate(self.joins[0]) if j != 0]
        return True if sum(int(link[1]) for link in links if link) > _MOST_LINKS else None

    def farthest(self, tp: int) -> str | None:
        """The longest way between two of the first GPUs, in NCCL's words; None where it cannot be told."""
        if not 1 < tp <= len(self.joins):
            return None
        ways = {"NVL" if _LINK.fullmatch(self.joins[i][j]) else self.joins[i][j] for i, j in _pairs(tp)}
        ways = {"PHB" if way == "NODE" else way for way in ways}
        return max(ways, key=LEVELS.index) if ways <= set(LEVELS) else None


LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""NCCL_P2P_LEVEL, the nearest first."""


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(count) if i != j]


def fabric(
    topology: Sequence[str],
    peers: Sequence[str] = (),
    capabilities: Mapping[int, float] | None = None,
    devices: Sequence[str] = (),
) -> Fabric | None:
    """The GPUs behind rows of `nvidia-smi topo -m` and `topo -p2p r`; None where they are fewer than two, or unknown.

    Args:
        topology, peers: rows of GPUs; headings and other lines are passed over.
        capabilities: by index.
        devices: those that servers may use, in order; all where none is named. Ids say nothing of a row.
    """
    ways, reads = _matrix(topology), _matrix(peers)
    chosen = [int(device) for device in devices if device.isdigit()] if devices else sorted(ways)
    if len(chosen) < max(2, len(devices)) or any(one not in ways for one in chosen):
        return None
    if any(one >= len(ways[other]) for one in chosen for other in chosen):
        return None
    joins = tuple(tuple(ways[one][other] for other in chosen) for one in chosen)
    told = all(one in reads and len(reads[one]) > max(chosen) for one in chosen)
    can = (
        tuple(tuple(one == other or reads[one][other] == "OK" for other in chosen) for one in chosen) if told else None
    )
    if can is not None and any(reads[one][other] == "U" for one in chosen for other in chosen):
        can = None
    return Fabric(joins, can, tuple((capabilities or {}).get(one) for one in chosen))


def _matrix(rows: Sequence[str]) -> dict[int, list[str]]:
    """GPU → its cells towards GPU 0, 1, …; a row has an X where it meets itself."""
    cells = [row for line in rows if "X" in (row := line.split()) and re.fullmatch(r"GPU\d+", row[0])]
    return {int(row[0].removeprefix("GPU")): row[1 : len(cells) + 1] for row in cells}


def doubt(path: str, facts: Mapping[str, Any]) -> str | None:
    """What makes a path unpromising on such GPUs, though no engine is known to refuse it; None when nothing does."""
    if path in ("flashinfer_pcie_ipc", "mscclpp", "nccl_symm") and facts.get("gpus.peers") is False:
        return f"{path}: these GPUs do not read each other's memory (nvidia-smi topo -p2p r), which it is made for"
    if path == "flashinfer_pcie_ipc" and facts.get("gpus.linked"):
        return f"{path} is made for PCIe, and NVLink joins these GPUs"
    if path in ("flashinfer_fusion", "mscclpp", "nccl_symm") and facts.get("gpus.linked") is False:
        return f"{path} is made for NVLink, and these GPUs are on PCIe"
    if path in ("symm_mem", "nvls") and "gpus.linked" in facts and "gpus.switched" not in facts:
        return f"{path} needs NVLink switches, and nvidia-smi does not tell whether these links come from one"
    return None


_PEERS = ("custom", "symm_mem", "nccl_symm", "mscclpp")
BUNDLED = (
    Rule(
        "allreduce",
        {"allreduce": [*_PEERS], "gpus.peers": [False]},
        "needs GPUs that read each other's memory, and these do not (nvidia-smi topo -p2p r)",
        "engine/collectives/symm_mem.py, without_peers",
    ),
    Rule(
        "allreduce",
        {"allreduce": ["flashinfer_fusion"], "gpus.capability": {"below": 9.0}},
        "flashinfer_fusion needs compute capability 9.0 or later",
        "engine/collectives/flashinfer_fusion.py",
    ),
)
"""What the bundled engine refuses by its GPUs."""
