"""From settings to a working engine core, or an exception: there is nothing in between."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import MOST_DRAFT_TOKENS, EngineConfig, schedule_text
from engine.cuda import device_of
from engine.device import Device
from engine.errors import InvalidConfig, NothingNamed, RanksDisagree
from engine.graphs import GraphSet
from engine.ipc.messages import Abort, Ask, Submit, TokenUpdate
from engine.memory.pool import KVPool, Pages
from engine.memory.prefix import PrefixCache
from engine.model.llama import Llama
from engine.model.source import ModelSource, resolve
from engine.model.weights import open_weights
from engine.ops.base import Ops
from engine.ops.grouped import KINDS
from engine.ops.native import NativeOps, NativeUnavailable, fast_bfloat16
from engine.ops.reference import ReferenceOps
from engine.ranks import Alone, Crew, Step
from engine.scheduler.core import Scheduler
from engine.scheduler.lane import InlineLane, Lane, QueueLane, ThreadLane
from engine.spec.base import Drafter, Surroundings, make_drafter, registered
from engine.spec.device_round import DeviceRound
from engine.spec.eagle3 import find_head
from engine.spec.gate import SpecGate
from engine.spec.phases import Phases
from engine.spec.round import SpecRound

log = logging.getLogger(__name__)

_TOKENS_PER_REQUEST = 1024  # of cache, when the pool's size is not given


@dataclass
class Core:
    """Everything that serves, built. `info` reads from these objects what is in effect."""

    config: EngineConfig
    source: ModelSource
    model: Llama
    pool: KVPool
    pages: Pages
    prefix: PrefixCache
    round: SpecRound
    scheduler: Scheduler
    context_length: int
    paths: dict[str, dict[str, str]]
    surroundings: Surroundings
    crew: Crew
    ranks: list[dict[str, Any]]
    graphs: GraphSet
    device: Device | None
    epoch: int = 0
    window: dict[str, float] = field(default_factory=dict)

    def lane(self, spec_version: str) -> Lane:
        """Where rounds run under this version of scheduling."""
        return _lane(spec_version, self.device)

    @property
    def drafter(self) -> Drafter:
        """The one in use."""
        return self.round.drafter

    @property
    def gate(self) -> SpecGate:
        """The one in use."""
        return self.scheduler.gate

    def submit(self, message: Submit) -> TokenUpdate | None:
        """Queue a request, on every rank; see `Scheduler.submit`."""
        self.crew.tell(message)
        return self.scheduler.submit(message)

    def abort(self, message: Abort) -> None:
        """Forget a request, on every rank; see `Scheduler.abort`."""
        self.crew.tell(message)
        self.scheduler.abort(message.rid)

    def step(self) -> tuple[TokenUpdate, ...]:
        """Run one round, on every rank; see `Scheduler.step`."""
        self.crew.tell(Step())
        return self.scheduler.step()

    def flush(self, message: Ask) -> int:
        """Forget cached prefixes, on every rank; how many pages nobody was using."""
        self.crew.tell(message)
        return self.prefix.flush()

    def info(self) -> dict[str, Any]:
        """The model process's half of `/server_info`."""
        requested, effective = self.config.public(), self.effective()
        derived = "changed by /reconfigure" if self.epoch else "derived"
        differences = [
            {"setting": name, "requested": requested[name], "effective": value, "reason": _REASONS.get(name, derived)}
            for name, value in effective.items()
            if requested[name] != value
        ]
        config = self.model.config
        return {
            "model": {
                "name": self.source.name,
                "format": self.source.kind,
                "architecture": config.architecture,
                "vocab": config.vocab,
                "layers": config.layers,
                "hidden": config.hidden,
                "q_heads": config.q_heads,
                "kv_heads": config.kv_heads,
                "context_length": self.context_length,
            },
            "requested": requested,
            "effective": effective,
            "differences": differences,
            "paths": self.paths | self.graphs.paths() | self.scheduler.alarm.path(),
            "drafters": _available(self.surroundings),
            "epoch": self.epoch,
            "window": self._window(),
            "parallel": self._parallel(),
            "memory": {
                "resident_bytes": _resident_bytes(),
                "kv_pool_bytes": self.pool.nbytes,
                "kv_pages": self.pages.total,
                "kv_pages_free": self.pages.free,
                "kv_pages_cached": self.pages.cached,
                "kv_pages_used": self.pages.used,
            },
        }

    def counters(self) -> dict[str, float]:
        """Totals and gauges, by Prometheus name."""
        stats, scheduler = self.round.stats, self.scheduler
        counters: dict[str, float] = {
            "engine_generated_tokens_total": stats.generated,
            "engine_prompt_tokens_total": stats.prompt,
            "engine_rounds_total": stats.rounds,
            "engine_rows_total": stats.rows,
            "engine_requests_started_total": scheduler.started,
            "engine_requests_finished_total": scheduler.finished,
            "engine_queue_seconds_total": scheduler.queued_s,
            "engine_preemptions_total": scheduler.preemptions,
            "engine_spec_verify_steps_total": stats.verify_steps,
            "engine_spec_drafted_tokens_total": stats.drafted,
            "engine_spec_accepted_tokens_total": stats.accepted,
            "engine_spec_verified_rows_total": stats.verify_steps + stats.drafted,
            "engine_spec_wasted_rows_total": stats.drafted - stats.accepted,
            "engine_spec_gate_transitions_total": self.gate.transitions,
            "engine_spec_gate_steps": self.gate.current or 0,
            "engine_draft_seconds_total": stats.draft_s,
            "engine_forward_seconds_total": stats.forward_s,
            "engine_extend_seconds_total": stats.extend_s,
            "engine_other_seconds_total": stats.other_s,
            "engine_lane_idle_seconds_total": self.scheduler.lane_idle_s,
            "engine_running_requests": scheduler.running,
            "engine_waiting_requests": scheduler.waiting,
            "engine_kv_pages_free": self.pages.free,
            "engine_kv_pages_cached": self.pages.cached,
            "engine_kv_pages_used": self.pages.used,
            "engine_kv_pages": self.pages.total,
            "engine_kv_cache_usage_ratio": self.pages.used / self.pages.total,
            "engine_prefix_cache_queried_tokens_total": self.prefix.queried_tokens,
            "engine_prefix_cache_hit_tokens_total": self.prefix.hit_tokens,
            "engine_prefix_cache_evicted_pages_total": self.prefix.evicted_pages,
        }
        counters["engine_graph_replays_total"] = self.graphs.hits
        for phase, state in self.graphs.states.items():
            counters[f'engine_graphs_active{{phase="{phase}"}}'] = float(state.state == "active")
            counters[f'engine_graph_misses_total{{phase="{phase}"}}'] = self.graphs.misses[phase]
        name = self.crew.choice.name if self.crew.choice else ""
        for operation, count in self.model.group.counts().items():
            labels = f'{{backend="{name}",op="{operation}"}}'
            counters[f"engine_collective_calls_total{labels}"] = count.calls
            counters[f"engine_collective_bytes_total{labels}"] = count.bytes
            counters[f"engine_collective_seconds_total{labels}"] = count.seconds
            counters[f"engine_collective_slowest_seconds{labels}"] = count.slowest_s
        for depth in range(max((*stats.accepted_at, self.gate.config.num_steps)) + 1 if stats.verify_steps else 0):
            counters[f'engine_spec_rounds_by_accepted_total{{accepted="{depth}"}}'] = stats.accepted_at[depth]
        return counters

    def reset_window(self) -> None:
        """Begin a new window: what `/server_info` shows under "window" counts from here."""
        self.window = {name: value for name, value in self.counters().items() if "_total" in name}

    def _window(self) -> dict[str, float]:
        counters = self.counters()
        return {name: value - self.window.get(name, 0) for name, value in counters.items() if "_total" in name}

    def _parallel(self) -> dict[str, Any]:
        """The ranks, and how they exchange what they computed."""
        choice = self.crew.choice
        told: dict[str, Any] = {"tp": self.model.group.ranks, "ranks": self.ranks}
        if choice is not None:
            told |= {
                "allreduce": choice.name,
                "reason": choice.reason,
                "verified": choice.verified,
                "unavailable": dict(choice.refused),
            }
        return told

    def effective(self) -> dict[str, Any]:
        """Settings as the running objects have them."""
        spec, shape = self.gate.config, self.gate.config.shape
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": self.model.kind,
            "context_length": self.context_length,
            "kv_tokens": self.pages.total * self.pages.page_size,
            "page_size": self.pool.page_size,
            "max_running_requests": self.config.max_running_requests,
            "max_waiting_requests": self.config.max_waiting_requests,
            "prefill_tokens": self.config.prefill_tokens,
            "threads": torch.get_num_threads(),
            "device": self.model.device.type,
            "cuda_graphs": self.graphs.policy if self.graphs.possible else "off",
            "tp": self.model.group.ranks,
            "allreduce": self.crew.choice.name if self.crew.choice else "none",
            "collective_timeout_s": self.config.collective_timeout_s,
            "prefix_cache": "on" if self.prefix.enabled else "off",
            "seed": self.config.seed,
            "speculation": self.drafter.name,
            "num_steps": shape.num_steps,
            "topk": shape.topk,
            "num_draft_tokens": shape.num_draft_tokens,
            "disable_batch_threshold": spec.disable_batch_threshold or "never",
            "steps_by_batch": schedule_text(spec.steps_by_batch),
            "policy": spec.policy,
            "acceptance": "rejection" if self.round.rejection else "target",
            "spec_version": "v2" if self.scheduler.overlapping else "v1",
            "draft_head": spec.draft_head,
            "draft_model": spec.draft_model,
            "hybrid": ",".join(spec.hybrid),
            "hybrid_steps": spec.hybrid_steps,
            "ngram_min": spec.ngram_min,
            "ngram_max": spec.ngram_max,
        }


def _resident_bytes() -> int | None:
    """Memory that this process has in use; None where the kernel does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


_REASONS = {
    "dtype": "auto: bfloat16 where it is multiplied fast, else float32",
    "weights": "auto: in dtype",
    "context_length": "not given: what the model was trained for",
    "kv_tokens": "not given, or rounded up to whole pages",
    "threads": "not given: the cores this process may use, divided by tp",
    "cuda_graphs": "there is no GPU to capture on",
    "allreduce": "auto: with tp 1 there is nothing to exchange, else see parallel",
}


def build(config: EngineConfig, crew: Crew | None = None, device: Device | None = None) -> Core:
    """Load, allocate and wire one rank.

    Args:
        config: the settings.
        crew: all ranks (`engine.ranks.launch`), which build at the same time.
        device: other than the settings' own, for tests.

    Raises:
        InvalidConfig: settings that do not fit the model or the machine, all of them named.
        RanksDisagree: another rank has loaded something else. RankLost, RankFailed: it has ended.
        GraphCaptureError: graphs are required and one cannot be captured.
        ModelNotFound, ModelBroken, UnsupportedModel: see engine.errors.
    """
    problems = config.problems()
    if problems:
        raise InvalidConfig("; ".join(problems))
    crew = crew or Alone()
    group = crew.group
    if group.ranks != config.tp:
        raise InvalidConfig(f"tp: {config.tp} ranks are asked for, and {group.ranks} are here")
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // group.ranks))
    device = device or device_of(config.device, group.rank)
    dtype = _dtype(config.dtype, device)
    kind = _weights(config.weights, dtype)
    device_ops = None if device is None else device.ops(crew.exchange)
    ops, paths = _host_ops(dtype) if device_ops is None else (device_ops, _device_paths())
    paths |= {
        f"kernel.{operation}": {"state": "active", "detail": kernel} for operation, kernel in ops.describe(kind).items()
    }
    source = resolve(config.model)
    weights = open_weights(source, dtype, whole_numbers=kind in KINDS)
    trained = weights.config.max_context
    context_length = config.context_length or trained
    if context_length > trained:
        raise InvalidConfig(f"context_length: {context_length} is more than the model's {trained}")
    place = torch.device("cpu") if device is None else device.device
    model = Llama(weights, ops, dtype, context_length + 2 * MOST_DRAFT_TOKENS, kind, group, place)
    weights.close()
    page_size = config.page_size
    page_count = min(crew.exchange(-(-_kv_tokens(config, model, context_length, device) // page_size)))
    _check_memory(page_count * page_size, model, device)
    pool = model.new_pool(page_count + 1, page_size)  # the last page is nobody's (engine.spec.board)
    longest = context_length + 2 * MOST_DRAFT_TOKENS  # behind the last token, rounds in flight may still draft
    # With overlap a request's row is free only when the round after its last one has ended.
    pages = Pages(page_count, page_size, 2 * config.max_running_requests, longest)
    surroundings = Surroundings(config.spec, model, source.name, pages, pages.rows, longest, device_ops)
    drafter = make_drafter(config.spec.speculation, surroundings)
    prefix = PrefixCache(pages, lookahead=drafter.lookahead, enabled=config.prefix_cache)
    gate = SpecGate(config.spec)
    phases = None if device_ops is None else Phases(model, device_ops, pool, pages, context_length)
    round_ = (
        SpecRound(model, pool, pages, drafter)
        if device is None or device_ops is None or phases is None
        else DeviceRound(model, device_ops, pool, pages, drafter, phases, device)
    )
    round_.rejection = config.spec.acceptance == "rejection"
    scheduler = Scheduler(
        round_,
        pages,
        prefix,
        gate,
        max_running=config.max_running_requests,
        prefill_tokens=config.prefill_tokens,
        seed=config.seed,
    )
    scheduler.use_lane(_lane(config.spec.spec_version, device))
    ranks = crew.exchange(_about(model, ops, kind, pool, drafter))
    _same(ranks)
    capturer = None if device is None or phases is None else device.capturer(phases)
    graphs = GraphSet(config.cuda_graphs, capturer, crew.exchange)
    graphs.capture({} if phases is None else phases.wanted(drafter, gate.shapes(), config.max_running_requests))
    if phases is not None:
        phases.graphs = graphs
    if crew.choice is not None:
        detail = f"{crew.choice.name}, {crew.choice.reason}" + ("" if crew.choice.verified else "; never verified")
        paths["allreduce"] = {"state": "active", "detail": detail}
    return Core(
        config,
        source,
        model,
        pool,
        pages,
        prefix,
        round_,
        scheduler,
        context_length,
        paths,
        surroundings,
        crew,
        ranks,
        graphs,
        device,
    )


def _lane(spec_version: str, device: Device | None) -> Lane:
    if spec_version == "v1":
        return InlineLane()
    return ThreadLane() if device is None else QueueLane()


_ALIKE = {
    "model": "the model",
    "drafter": "the draft head or model",
    "dtype": "the data type",
    "kernels": "the kernels",
}
"""What every rank must have the same of, or their results would go apart."""


def _about(model: Llama, ops: Ops, kind: str, pool: KVPool, drafter: Drafter) -> dict[str, Any]:
    return {
        "rank": model.group.rank,
        "pid": os.getpid(),
        "model": model.identity,
        "drafter": drafter.identity,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": f"{ops.name}: {ops.describe(kind)['linear']}",
        "threads": torch.get_num_threads(),
        **model.summary(),
        "kv_pool_bytes": pool.nbytes,
        "resident_bytes": _resident_bytes(),
    }


def _same(ranks: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(ranks):
        for name, what in _ALIKE.items():
            if told[name] != ranks[0][name]:
                raise RanksDisagree(
                    f"rank {rank} disagrees with rank 0 about {what}: {told[name]} against {ranks[0][name]}; was a "
                    "file replaced while it was read? Start again"
                )


def _available(surroundings: Surroundings) -> dict[str, str]:
    """Drafters that `/reconfigure` can switch to: "loaded", "on demand", or why not."""
    states = {}
    for name in registered():
        parts = surroundings.config.hybrid if name == "hybrid" else (name,)
        missing = [problem for part in parts if (problem := _missing(part, surroundings))]
        states[name] = missing[0] if missing else "loaded" if name in surroundings.made else "on demand"
    return states


def _missing(name: str, surroundings: Surroundings) -> str | None:
    if name == "eagle3":
        try:
            find_head(surroundings)
        except NothingNamed as error:
            return str(error)
    if name == "draft_model" and not surroundings.config.draft_model:
        return "draft_model: none is named"
    return None


def _check_memory(kv_tokens: int, model: Llama, device: Device | None) -> None:
    needed = kv_tokens * model.kv_bytes_per_token
    if device is not None:
        memory = device.memory()[1]
    else:
        needed *= model.group.ranks  # which share the machine's
        try:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return
    if needed > memory:
        raise InvalidConfig(
            f"kv_tokens: {kv_tokens} need {needed / 2**30:.1f} GiB; this machine has {memory / 2**30:.1f} GiB"
        )


def _dtype(name: str, device: Device | None) -> torch.dtype:
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    if device is not None:
        return torch.bfloat16
    return torch.bfloat16 if fast_bfloat16() else torch.float32


def _weights(name: str, dtype: torch.dtype) -> str:
    return name if name != "auto" else "bf16" if dtype == torch.bfloat16 else "fp32"


def _host_ops(dtype: torch.dtype) -> tuple[Ops, dict[str, dict[str, str]]]:
    ops: Ops
    try:
        ops, state, reason = NativeOps(dtype), "active", ""
    except NativeUnavailable as error:
        ops, state, reason = ReferenceOps(), "fell_back", str(error)
    return ops, {"native_kernels": {"state": state, "detail": reason}}


def _device_paths() -> dict[str, dict[str, str]]:
    log.warning("the GPU path has never run on real hardware; see docs/hardware.md")
    return {"triton_kernels": {"state": "active", "detail": "never verified on real hardware"}}


def _kv_tokens(config: EngineConfig, model: Llama, context_length: int, device: Device | None) -> int:
    if config.kv_tokens is not None:
        return config.kv_tokens
    each = model.kv_bytes_per_token
    wanted = max(context_length, config.max_running_requests * _TOKENS_PER_REQUEST)
    if device is not None:
        free = device.memory()[0]
    else:
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // model.group.ranks
        except (ValueError, OSError):
            return wanted
    return min(wanted, max(free // 2 // each, config.page_size))
