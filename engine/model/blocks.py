"""Weights of a GGUF file as the whole numbers it holds, so that int8 and int4 serve exactly its values.

Q4_0 and Q4_1 are int4 here, Q8_0 is int8. Reading them takes seconds, so they are kept in the user's cache like the
bfloat16 conversion.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.cache import cache_dir
from engine.ops.grouped import GROUP, GroupedWeight

_VERSION = 1  # raise when the meaning of cached files changes


class Blocks:
    """Weights by Hugging Face name; those of other quantisations are absent."""

    def __init__(self, tensors: Callable[[str], Tensor], names: frozenset[str]) -> None:
        self._tensors, self._names = tensors, names

    def get(self, name: str) -> GroupedWeight | None:
        """The weight of this name, or None where the file holds it in another form."""
        if f"{name}|scale" not in self._names:
            return None
        numbers, scale = self._tensors(f"{name}|numbers"), self._tensors(f"{name}|scale")
        minimum = self._tensors(f"{name}|minimum") if f"{name}|minimum" in self._names else None
        return GroupedWeight("int8" if minimum is None else "int4", numbers, scale, minimum, numbers.shape[1])


def cached_blocks(path: Path, read: Callable[[], Mapping[str, GroupedWeight]]) -> Blocks:
    """The blocks of the GGUF file at `path`, which `read` reads when the cache does not have them."""
    stat = path.stat()
    identity = f"blocks {_VERSION}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    file = cache_dir() / "converted" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.blocks.safetensors"
    if not file.exists():
        tensors: dict[str, Tensor] = {}
        for name, weight in read().items():
            tensors |= {f"{name}|numbers": weight.numbers.contiguous(), f"{name}|scale": weight.scale.contiguous()}
            if weight.minimum is not None:
                tensors[f"{name}|minimum"] = weight.minimum.contiguous()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / "blocks.safetensors"
            save_file(tensors, made)
            made.replace(file)  # atomic: several engines may convert at once
    handle = safe_open(file, framework="pt")
    return Blocks(handle.get_tensor, frozenset(handle.keys()))


def grouped(kind: str, data: Tensor) -> GroupedWeight | None:
    """GGUF's raw rows, uint8 [out, bytes], as whole numbers; None where int8 and int4 here cannot hold them."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    if kind not in sizes:
        return None
    blocks = data.view(data.shape[0], -1, sizes[kind])
    columns = blocks.shape[1] * GROUP
    head = 4 if kind == "Q4_1" else 2
    halves = blocks[..., :head].contiguous().view(torch.float16)
    scale, rest = halves[..., 0].contiguous(), blocks[..., head:]
    if kind == "Q8_0":
        numbers = rest.contiguous().view(torch.int8)
        return None if (numbers == -128).any() else GroupedWeight("int8", numbers.flatten(1), scale, None, columns)
    numbers = torch.cat((rest & 15, rest >> 4), dim=-1)
    minimum = halves[..., 1].contiguous() if kind == "Q4_1" else scale * -8
    return GroupedWeight("int4", numbers.flatten(1), scale, minimum, columns) if minimum.isfinite().all() else None
