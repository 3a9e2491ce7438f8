"""What may be tried: the space file, its conditions and rules, and the candidates that they make up.

The modules are loaded with the first name that is asked for: who only reads figures needs no schema.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.space.check import EngineFacts, KnownSetting, Outside
    from tuner.space.load import find_space, load_space, parse_space, shipped
    from tuner.space.problems import Problem, SpaceProblems, nearest, unknown
    from tuner.space.space import Listed, Parameter, Space, Workload, differences

_WHERE = {
    "check": ("EngineFacts", "KnownSetting", "Outside"),
    "load": ("find_space", "load_space", "parse_space", "shipped"),
    "problems": ("Problem", "SpaceProblems", "nearest", "unknown"),
    "space": ("Listed", "Parameter", "Space", "Workload", "differences"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
    globals()[name] = found
    return found


__all__ = [
    "EngineFacts",
    "KnownSetting",
    "Listed",
    "Outside",
    "Parameter",
    "Problem",
    "Space",
    "SpaceProblems",
    "Workload",
    "differences",
    "find_space",
    "load_space",
    "nearest",
    "parse_space",
    "shipped",
    "unknown",
]
