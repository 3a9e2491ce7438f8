"""The machines that can be simulated. What was fitted is fitted to published figures; the rest is from data sheets.

The five fitted numbers, all of the reference machine: latency and bandwidth of a sum over the GPUs, the chance that a
draft is right, the launch time of a draft pass, host time per verified row without overlap. `fit.py` finds them again,
and a test holds these constants to what it finds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tuner.engines.simulated.machine import AllReduce, Drafter, Fault, Machine, Model, Profile
from tuner.errors import UsageError

DEFAULT = "pcie_blackwell_8gpu"
DEPTHS = 8
ACCEPT_FALL = 0.97
"""Each depth is guessed a little worse than the one before."""


@dataclass(frozen=True)
class Fitted:
    """The free parameters."""

    allreduce_latency_s: float
    allreduce_bytes_per_s: float
    accept: float
    draft_launch_s: float
    sync_s_per_row: float


FITTED = Fitted(6.594e-5, 1.696e10, 0.7865, 5.709e-3, 7.651e-4)


def reference() -> dict[str, Any]:
    """The published figures that the reference machine is fitted to, with what is known of how they were taken."""
    text = (resources.files("tuner.engines.simulated") / "pcie_blackwell.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def chain(first: float, fall: float = ACCEPT_FALL) -> tuple[float, ...]:
    """Chances by depth."""
    return tuple(first * fall**depth for depth in range(DEPTHS))


def reference_profile(fitted: Fitted = FITTED) -> Profile:
    """8 RTX PRO 6000 (96 GB, 1.79 TB/s, of which 85 % is reached) on PCIe, a mixture of experts of 547 GB."""
    ring = AllReduce(fitted.allreduce_latency_s, fitted.allreduce_bytes_per_s)
    machine = Machine(
        gpus=8,
        memory_bytes=0.92 * 96e9,
        memory_bytes_per_s=0.85 * 1.792e12,
        # Only the ring is fitted. The others are assumptions that agree with their having been dropped there.
        allreduce={
            "nccl_ring": ring,
            "nccl_tree": AllReduce(0.9 * ring.latency_s, 0.6 * ring.bytes_per_s),
            "custom": AllReduce(1.2 * ring.latency_s, 0.5 * ring.bytes_per_s),
            "nccl": ring,
            "flashinfer_pcie_ipc": AllReduce(0.8 * ring.latency_s, 0.7 * ring.bytes_per_s),
        },
        sync_s_per_row=fitted.sync_s_per_row,
    )
    drafters = {
        "eagle3": Drafter(chain(fitted.accept), fitted.draft_launch_s, 1.5e9),
        "ngram": Drafter(chain(0.45, 0.8), 0.0, 0.0, passes=False),
    }
    model = Model(
        layers=61,
        hidden=7168,
        dense_bytes=17e9,
        expert_bytes=530e9,
        experts=384,
        active_experts=8,
        kv_bytes_per_token=70e3,
        drafters=drafters,
    )
    faults = (
        Fault({"spec_version": ("v2",), "topk": tuple(range(2, 9))}, "startup_crash", "spec_version v2 only chains"),
        Fault({"allreduce": ("custom",), "spec_version": ("v2",)}, "startup_crash", "graph capture failed: custom"),
    )
    return Profile("pcie_blackwell_8gpu", machine, model, "fitted to pcie_blackwell.json", faults)


def dense_70b() -> Profile:
    """The reference machine with a dense model of 70 billion parameters in bfloat16. Predicted, fitted to nothing."""
    profile = reference_profile()
    drafters = {
        "eagle3": replace(profile.model.drafters["eagle3"], weight_bytes=1.9e9),
        "ngram": profile.model.drafters["ngram"],
        "draft_model": Drafter(chain(0.7), 3 * FITTED.draft_launch_s, 2.5e9),
    }
    model = Model(layers=80, hidden=8192, dense_bytes=141e9, kv_bytes_per_token=41e3, drafters=drafters)
    said = "the machine of pcie_blackwell_8gpu; model by its sizes; checked against nothing"
    return Profile("pcie_blackwell_8gpu_70b", profile.machine, model, said, profile.faults)


PROFILES = {"pcie_blackwell_8gpu": reference_profile, "pcie_blackwell_8gpu_70b": dense_70b}


def profile_named(name: str) -> Profile:
    """The profile of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PROFILES:
        raise UsageError(f"simulation profile '{name}' is unknown; valid: {', '.join(PROFILES)}")
    return PROFILES[name]()
