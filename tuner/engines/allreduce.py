"""Which all-reduce paths a machine's connections allow: none of this has run on such machines (`verified`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

verified = False
"""docs/hardware.md: read in the engines' sources, not run. A path counts as in effect only when the server says so."""

_FABRIC = ("symm_mem", "nvls")
_LINK = re.compile(r"NV\d+")


def linked(topology: Sequence[str]) -> bool | None:
    """Whether every pair of GPUs is joined by NVLink, by the rows of `nvidia-smi topo -m`; None without rows."""
    rows = [line.split() for line in topology if re.match(r"GPU\d+\s", line)]
    if len(rows) < 2:
        return None
    pairs = [cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"]
    return all(_LINK.fullmatch(cell) for cell in pairs)


def doubt(path: str, tp: int, topology: Sequence[str]) -> str | None:
    """Why a path will not come up on this machine; None when nothing is known against it."""
    joined = linked(topology)
    if joined is not False:
        return None
    if path == "custom" and tp > 2:
        return f"custom serves more than two GPUs only where all are joined by NVLink; these {tp} are not"
    if path in _FABRIC:
        return f"{path} needs NVLink switches; these GPUs are on PCIe"
    return None


def decode_bytes(requests: int, rows: int, hidden: int, element_bytes: int = 2) -> int:
    """Bytes that one decode step adds up: requests x verified rows x hidden size. Speculation multiplies it."""
    return requests * rows * hidden * element_bytes
