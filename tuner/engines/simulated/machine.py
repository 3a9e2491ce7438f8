"""The physics: how long a decode step takes on a machine, and what speculation makes of it. Pure functions.

A step reads weights (of a mixture of experts only those that its rows reach), sums activations over the GPUs twice a
layer, and, with speculation, runs the drafter first. The terms add up; what a server overlaps is left out of them.
Times are seconds, sizes bytes, rates bytes or tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ACTIVATION_BYTES = 2
"""Per element of what is summed over the GPUs."""


@dataclass(frozen=True)
class AllReduce:
    """A backend's cost of one sum over the GPUs: a latency, and the bandwidth that the ring's bytes see."""

    latency_s: float
    bytes_per_s: float

    def time(self, size: float, gpus: int) -> float:
        """Seconds for `size` bytes on each of `gpus`; nothing on one. A ring moves 2 (n - 1) / n of the bytes."""
        if gpus == 1:
            return 0.0
        return self.latency_s + size * 2 * (gpus - 1) / gpus / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """GPUs and what joins them. `memory_bytes_per_s` is what kernels reach, of one GPU.

    `sync_s_per_row` is host work for each verified row where it is not overlapped with the GPU (spec_version v1).
    `allreduce` holds the curve of each backend; the first is the default.
    """

    gpus: int
    memory_bytes: float
    memory_bytes_per_s: float
    allreduce: Mapping[str, AllReduce]
    sync_s_per_row: float


@dataclass(frozen=True)
class Drafter:
    """`accept[d]` is the chance that the best guess at depth d + 1 is right, given that all before were.

    A pass costs `launch_s`, two sums over the GPUs, and reading `weight_bytes`; a drafter without a pass (prompt
    lookup) has `passes` False.
    """

    accept: tuple[float, ...]
    launch_s: float
    weight_bytes: float
    passes: bool = True


@dataclass(frozen=True)
class Model:
    """A model as its weights lie in memory. `experts` 0: dense. A token reaches `active_experts` of them in a layer."""

    layers: int
    hidden: int
    dense_bytes: float
    expert_bytes: float = 0.0
    experts: int = 0
    active_experts: int = 0
    kv_bytes_per_token: float = 0.0
    row_bytes: float = 2.5e6
    drafters: Mapping[str, Drafter] = field(default_factory=dict)

    def read_bytes(self, rows: int) -> float:
        """Weights that a step of so many rows reads: an expert once, however many rows want it."""
        if not self.experts:
            return self.dense_bytes
        reached = 1 - (1 - self.active_experts / self.experts) ** rows
        return self.dense_bytes + self.expert_bytes * reached


@dataclass(frozen=True)
class Fault:
    """Settings that end a launch. All of `when` must hold: setting → its values."""

    when: Mapping[str, tuple[Any, ...]]
    kind: str
    message: str

    def hits(self, settings: Mapping[str, Any]) -> bool:
        """Whether these settings meet it."""
        return all(settings.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True)
class Profile:
    """A machine, the model on it, and where it crashes. `source` says where its figures come from."""

    name: str
    machine: Machine
    model: Model
    source: str
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Work:
    """A usual request: tokens in, tokens out."""

    prompt_tokens: int = 300
    output_tokens: int = 200


@dataclass(frozen=True)
class Plan:
    """What settings come to while `running` requests decode: depth 0 is no speculation."""

    drafter: Drafter | None
    depth: int
    topk: int
    rows: int
    overlap: bool
    gpus: int
    allreduce: AllReduce


@dataclass(frozen=True)
class Prediction:
    """What a level comes to: output tokens per second of all requests together, and what they are made of."""

    tokens_per_s: float
    step_s: float
    accept_length: float
    prefill_s: float
    memory_bytes: float


def plan(profile: Profile, settings: Mapping[str, Any], running: int) -> Plan:
    """What the settings mean at this number of running requests."""
    machine = profile.machine
    backend = str(settings.get("allreduce", next(iter(machine.allreduce))))
    gpus = int(settings.get("tp", machine.gpus))
    curve = machine.allreduce[backend]
    drafter = profile.model.drafters.get(str(settings.get("speculation", "none")))
    depth = depth_at(settings, running) if drafter is not None else 0
    if drafter is None or depth == 0:
        return Plan(None, 0, 1, 1, True, gpus, curve)
    topk = int(settings.get("topk", 1))
    rows = depth + 1 if topk == 1 else int(settings.get("num_draft_tokens", default_rows(depth, topk)))
    return Plan(drafter, depth, topk, rows, settings.get("spec_version", "v1") == "v2", gpus, curve)


def default_rows(depth: int, topk: int) -> int:
    """Rows verified per request where the settings do not say: the whole tree, up to 16."""
    return min(1 + topk + (depth - 1) * topk * topk, max(16, depth + 1)) if topk > 1 else depth + 1


def depth_at(settings: Mapping[str, Any], running: int) -> int:
    """Draft depth at this number of running requests: a schedule, a threshold, or always `num_steps`."""
    steps = int(settings.get("num_steps", 3))
    schedule = settings.get("steps_by_batch")
    if schedule:
        pairs = (part.split(":") for part in str(schedule).split(","))
        table = sorted((int(size), int(depth)) for size, depth in pairs)
        return next((depth for size, depth in reversed(table) if running >= size), steps)
    threshold = settings.get("disable_batch_threshold", "never")
    return 0 if isinstance(threshold, int) and running > threshold else steps


def accept_chances(chosen: Plan) -> tuple[float, ...]:
    """The chance at each depth that one of the drafted nodes is right.

    A tree spreads its rows over its depths: `width` guesses a depth. The chance that none of them is right falls with
    the square root of the width, for the later guesses of a head are worse.
    """
    if chosen.drafter is None:
        return ()
    width = min(chosen.topk, (chosen.rows - 1) / chosen.depth)
    known = chosen.drafter.accept
    return tuple(1 - (1 - known[min(d, len(known) - 1)]) ** math.sqrt(width) for d in range(chosen.depth))


def accept_length(chosen: Plan) -> float:
    """Mean tokens per verify step, the target's own included."""
    reached, length = 1.0, 1.0
    for chance in accept_chances(chosen):
        reached *= chance
        length += reached
    return length


def sums_s(profile: Profile, chosen: Plan, rows: int, layers: int) -> float:
    """Seconds that the sums over the GPUs of `layers` layers take, two a layer."""
    return 2 * layers * chosen.allreduce.time(rows * profile.model.hidden * ACTIVATION_BYTES, chosen.gpus)


def step_s(profile: Profile, chosen: Plan, running: int) -> float:
    """Seconds of one step of `running` requests, its drafting included."""
    machine, model = profile.machine, profile.model
    bandwidth = chosen.gpus * machine.memory_bytes_per_s
    rows = chosen.rows * running
    total = model.read_bytes(rows) / bandwidth + sums_s(profile, chosen, rows, model.layers)
    if chosen.drafter is None:
        return total
    if chosen.drafter.passes:
        draft = chosen.drafter.launch_s + chosen.drafter.weight_bytes / bandwidth
        total += chosen.depth * (draft + sums_s(profile, chosen, chosen.topk * running, 1))
    return total if chosen.overlap else total + machine.sync_s_per_row * rows


def prefill_s(profile: Profile, chosen: Plan, prompt_tokens: int) -> float:
    """Seconds that a prompt keeps the GPUs from decoding: its activations cross the links like any others."""
    size = prompt_tokens * profile.model.hidden * ACTIVATION_BYTES
    each = chosen.allreduce.time(size, chosen.gpus) - chosen.allreduce.time(0, chosen.gpus)
    return 2 * profile.model.layers * each


def memory_bytes(profile: Profile, chosen: Plan, running: int, work: Work) -> float:
    """What one GPU holds: its share of the weights, the requests' keys and values, room for the step's rows."""
    model = profile.model
    weights = model.dense_bytes + model.expert_bytes + (chosen.drafter.weight_bytes if chosen.drafter else 0.0)
    cache = running * (work.prompt_tokens + work.output_tokens) * model.kv_bytes_per_token
    return weights / chosen.gpus + cache + chosen.rows * running * model.row_bytes


def predict(profile: Profile, settings: Mapping[str, Any], concurrency: int, work: Work = Work()) -> Prediction:
    """Steady throughput at `concurrency`: a request costs the machine its prefill, and its share of the steps."""
    chosen = plan(profile, settings, concurrency)
    step, length = step_s(profile, chosen, concurrency), accept_length(chosen)
    prefill = prefill_s(profile, chosen, work.prompt_tokens)
    seconds = concurrency * prefill + work.output_tokens * step / length
    return Prediction(
        work.output_tokens * concurrency / seconds,
        step,
        length,
        prefill,
        memory_bytes(profile, chosen, concurrency, work),
    )


def fault_at_start(profile: Profile, settings: Mapping[str, Any]) -> Fault | None:
    """Why a launch with these settings does not come up; None when it does."""
    found = next((fault for fault in profile.faults if fault.hits(settings)), None)
    if found is not None:
        return found
    held = memory_bytes(profile, plan(profile, settings, 1), 1, Work())
    if held > profile.machine.memory_bytes:
        return Fault({}, "oom_startup", _out_of_memory(held, profile))
    return None


def fault_under_load(profile: Profile, settings: Mapping[str, Any], concurrency: int, work: Work) -> Fault | None:
    """Why a running server does not survive this level; None when it does."""
    held = memory_bytes(profile, plan(profile, settings, concurrency), concurrency, work)
    if held > profile.machine.memory_bytes:
        return Fault({}, "oom_under_load", _out_of_memory(held, profile))
    return None


def _out_of_memory(held: float, profile: Profile) -> str:
    return f"CUDA out of memory: {held / 1e9:.1f} GB needed, {profile.machine.memory_bytes / 1e9:.1f} GB per GPU"
