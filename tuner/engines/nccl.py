"""NCCL's own settings, `env.NCCL_*` of a space: what each may be, and where the sums of a decode step come by them.

Values are those of NVIDIA's documentation (docs/userguide/source/env.rst, up to 2.32).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.engines.allreduce import LEVELS
from tuner.records import Setting

PREFIX = "NCCL_"
PATH = "allreduce"
"""The setting that says what adds up."""

CARRIES = ("nccl", "nccl_ring", "nccl_tree", "nccl_symm", "nvls")
"""Values of `allreduce` with which NCCL adds up what a decode step computed."""

_OWN = {
    "nccl_ring": ("NCCL_ALGO",),
    "nccl_tree": ("NCCL_ALGO",),
    "nccl_symm": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
    "nvls": ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
}
"""What a path sets itself, whatever else is said."""

_PROTOCOLS = "LL128|LL|Simple"
_OTHERS = "Tree|CollnetDirect|CollnetChain|NVLSTree|NVLS|PAT"
_ALGORITHMS = f"Ring|{_OTHERS}"


def _by_function(every: str, words: str) -> str:
    """The pattern of a list for every function, lists by function, or both: ring;allreduce:tree."""
    one = rf"[a-z]+:\^?(?:{words})(?:,(?:{words}))*"
    return rf"(?i:(?:{every})(?:;{one})*|{one}(?:;{one})*)"


_SWITCH = ("[01]", "0 or 1")
_CTAS = ("[1-9]|[1-5][0-9]|6[0-4]", "a whole number from 1 to 64")

_VALID: Mapping[str, tuple[str, str]] = {
    "NCCL_P2P_LEVEL": ("|".join(LEVELS), "LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_PROTO": (
        _by_function(rf"\^?(?:{_PROTOCOLS})(?:,(?:{_PROTOCOLS}))*", _PROTOCOLS),
        "LL, LL128, Simple, a list of them, or by function as in allreduce:LL",
    ),
    "NCCL_ALGO": (
        _by_function(
            rf"(?:(?:{_OTHERS}),)*Ring(?:,(?:{_ALGORITHMS}))*|\^(?:{_OTHERS})(?:,(?:{_OTHERS}))*", _ALGORITHMS
        ),
        "by function, as in allreduce:tree or allreduce:ring, or a list with ring (since NCCL 2.24 an algorithm for "
        "all of them fails those that lack it)",
    ),
    "NCCL_MIN_CTAS": _CTAS,
    "NCCL_MAX_CTAS": _CTAS,
    "NCCL_BUFFSIZE": ("[1-9][0-9]{3,9}", "bytes, best a power of 2 such as 4194304"),
    "NCCL_NTHREADS": ("64|128|256|512", "64, 128, 256 or 512 (NCCL makes one of these of any other)"),
    "NCCL_CUMEM_ENABLE": _SWITCH,
    "NCCL_CUMEM_HOST_ENABLE": _SWITCH,
    "NCCL_NVLS_ENABLE": ("[012]", "0, 1 or 2"),
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_SHM_DISABLE": _SWITCH,
    "NCCL_RUNTIME_CONNECT": _SWITCH,
    "NCCL_GRAPH_REGISTER": _SWITCH,
    "NCCL_GRAPH_MIXING_SUPPORT": _SWITCH,
    "NCCL_IGNORE_CPU_AFFINITY": _SWITCH,
    "NCCL_CTA_POLICY": ("DEFAULT|EFFICIENCY|ZERO|[012]", "DEFAULT, EFFICIENCY or ZERO (before NCCL 2.29 0, 1 or 2)"),
}
"""Variable → what its values match, and what they are. Variables that are not here take any value."""

_GONE = {
    "NCCL_LL_THRESHOLD": "NCCL has not read it since 2.5; search NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL has not read it since 2.5; search NCCL_ALGO",
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS has taken its place",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS has taken its place",
}


def value_problem(variable: str, value: Setting) -> str | None:
    """What NCCL would make nothing of, or something else than it says; None for any other variable or value."""
    if variable in _GONE:
        return _GONE[variable]
    pattern, valid = _VALID.get(variable, (".*", ""))
    return None if re.fullmatch(pattern, str(value)) else f"'{value}' is not valid; valid: {valid}"


def idle(variable: str, path: Setting | None) -> str | None:
    """Why a variable says nothing of a decode step where its sums go by this path; None where it does.

    Args:
        path: the value of `allreduce`; None or auto leave it to the engine.
    """
    only = "search it only where NCCL adds up: when: allreduce == 'nccl'"
    if path in (None, "auto"):
        return f"allreduce is left to the engine, which may not take NCCL; name the path (allreduce: nccl), or {only}"
    if path not in CARRIES:
        return f"with allreduce '{path}' the sums of a decode step do not go by NCCL; {only}"
    if variable in _OWN.get(str(path), ()):
        return f"allreduce '{path}' sets it itself; leave '{path}' out of where it is tried"
    return None


def contradictory(env: Mapping[str, str | None]) -> list[str]:
    """Settings of NCCL that deny each other, of which it would follow one: a sentence for each two."""
    least, most = (str(env.get(name) or "") for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"))
    if not (least.isdecimal() and most.isdecimal() and int(least) > int(most)):
        return []
    return [f"env.NCCL_MIN_CTAS: {least}: is more than NCCL_MAX_CTAS, {most}, and NCCL would follow one of them"]


def impossible(env: Mapping[str, str | None], facts: Mapping[str, Any]) -> list[str]:
    """Settings that NCCL could not do on these GPUs (`Fabric.facts`), or would do without: a sentence each."""
    found = []
    no_switch = facts.get("gpus.switched") is False or facts.get("gpus.capability", 9.0) < 9.0
    for variable, value in env.items():
        words = str(value or "").lower()
        why = None
        if variable == "NCCL_NVLS_ENABLE" and words in ("1", "2") and no_switch:
            why = "needs NVLink switches and compute capability 9.0; NCCL would do without it"
        elif variable == "NCCL_ALGO" and "nvls" in words and "^" not in words and no_switch:
            why = "needs NVLink switches and compute capability 9.0, and NCCL fails where an algorithm is not there"
        elif variable == "NCCL_PROTO" and "ll128" in words and "^" not in words and facts.get("gpus.linked") is False:
            why = "LL128 where it is not supported corrupts data (NVIDIA's documentation), and these GPUs are on PCIe"
        elif variable == "NCCL_P2P_LEVEL" and words == "nvl" and facts.get("gpus.any_link") is False:
            why = "NVLink joins none of these GPUs: it would be LOC"
        found += [f"env.{variable}: {value}: {why}"] if why else []
    return found


def same_levels(choices: Sequence[Setting], farthest: str | None) -> list[str]:
    """The choices of NCCL_P2P_LEVEL that are one, since no two GPUs are further apart; nothing where all differ."""
    if farthest is None:
        return []
    known = [str(choice) for choice in choices if choice in LEVELS]
    same = [choice for choice in known if LEVELS.index(choice) >= LEVELS.index(farthest)]
    return same if len(same) > 1 else []


def searched(names: Sequence[str]) -> list[str]:
    """The variables of NCCL among the names of settings, as a space writes them (env.NAME)."""
    return [name for name in names if name.startswith(f"env.{PREFIX}") and not name.startswith(f"env.{PREFIX}DEBUG")]
