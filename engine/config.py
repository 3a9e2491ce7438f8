"""All settings of one engine, frozen before anything is built. `problems()` reports everything wrong at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class DraftLimits:
    """What a drafter can do at most; settings beyond it are refused by name."""

    max_depth: int
    max_topk: int


MOST_STEPS = 8
MOST_TOPK = 8
DRAFTERS = {
    "none": DraftLimits(max_depth=0, max_topk=1),
    "ngram": DraftLimits(max_depth=MOST_STEPS, max_topk=1),
    "eagle3": DraftLimits(max_depth=MOST_STEPS, max_topk=MOST_TOPK),
    "draft_model": DraftLimits(max_depth=MOST_STEPS, max_topk=1),
    "hybrid": DraftLimits(max_depth=MOST_STEPS, max_topk=MOST_TOPK),
}
SPECULATION = tuple(DRAFTERS)
MOST_DRAFT_TOKENS = 64
POLICIES = ("fixed", "adaptive")
ACCEPTANCE = ("target", "rejection")
DEFAULT_STEPS = 3
_MOST = {
    "page_size": 1024,
    "max_running_requests": 4096,
    "max_waiting_requests": 10**6,
    "prefill_tokens": 65536,
    "context_length": 2**24,
    "kv_tokens": 2**40,
    "threads": 1024,
    "tp": 64,
}
DTYPES = ("auto", "bfloat16", "float32")
WEIGHTS = ("auto", "bf16", "int8", "int4")
DEVICES = ("cpu", "cuda")
GRAPHS = ("required", "preferred", "off")
ALLREDUCE = (
    "auto",
    "shm",
    "gloo",
    "nccl",
    "custom",
    "symm_mem",
    "nccl_symm",
    "flashinfer_fusion",
    "flashinfer_pcie_ipc",
    "mscclpp",
)
"""Each but "auto" is a file of `engine/collectives/`, in the order in which "auto" prefers them."""


@dataclass(frozen=True)
class DraftShape:
    """How to draft in one round: depth, branches a node, rows to verify a request (root included), and the depth of a
    hybrid's second drafter where that is less."""

    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    second_steps: int = MOST_STEPS

    @property
    def slots(self) -> int:
        """Cache slots that a request needs behind its committed tokens: for drafting or for verifying."""
        return max(self.num_draft_tokens, 1 + self.topk * max(0, self.num_steps - 1))

    def limited(self, num_steps: int) -> DraftShape:
        """The same, at most this deep."""
        steps = min(num_steps, self.num_steps)
        if not steps:
            return DraftShape()
        tokens = min(self.num_draft_tokens, tree_capacity(steps, self.topk))
        return DraftShape(steps, self.topk, tokens, self.second_steps)


def tree_capacity(num_steps: int, topk: int) -> int:
    """Nodes of the largest tree, root included: topk after the first step, topk squared after each further one."""
    return 1 + topk + max(0, num_steps - 1) * topk * topk if topk > 1 else 1 + num_steps


def schedule_text(table: tuple[tuple[int, int], ...] | None) -> str | None:
    """`SpecConfig.steps_by_batch` as it is written on a command line: 1:0,8:3,64:0."""
    return None if table is None else ",".join(f"{size}:{steps}" for size, steps in table)


def parse_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """The inverse of `schedule_text`. Raises ValueError."""
    pairs = [part.partition(":") for part in text.split(",")]
    return tuple((int(size), int(steps)) for size, _, steps in pairs)


def default_draft_tokens(num_steps: int, topk: int) -> int:
    """Rows to verify when nothing is said: a whole chain, or the part of a tree that is worth its rows."""
    return min(tree_capacity(num_steps, topk), max(16, num_steps + 1)) if topk > 1 else num_steps + 1


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding.

    Args:
        speculation: the drafter, one of `SPECULATION`.
        num_steps: draft depth per round, 1 to 8; 0 only with "none".
        topk: branches per node; 1 is a chain.
        num_draft_tokens: rows verified per request and round, root included; a chain of `num_steps` has num_steps + 1.
        disable_batch_threshold: speculate at up to this many running requests, not at one more; None: always.
        steps_by_batch: (running requests, draft depth) in rising order: from that many on, that deep; None: always
            `num_steps`. `disable_batch_threshold` T is short for ((1, num_steps), (T + 1, 0)).
        policy: "fixed" follows these settings; "adaptive" goes below them where measured acceptance says so.
        acceptance: of drafts at a temperature above 0. "target": a draft is the drafter's best guess, and stands when
            the target samples it; a seeded request yields the same text as without speculation. "rejection": chains
            are sampled from the drafter and kept with the ratio of the probabilities; the distribution is the same and
            more is kept where text is uncertain, but the text of a seed depends on the drafter.
        spec_version: "v1" synchronous or "v2" overlap scheduling.
        ngram_min, ngram_max: lengths of the suffix looked up by the `ngram` drafter, longest first.
        draft_head: safetensors file of the `eagle3` drafter; None: the one that ships for the model.
        draft_model: of the `draft_model` drafter: a known name, folder or .gguf file.
        hybrid: the two drafters that `hybrid` composes, the second for where the first finds nothing.
        hybrid_steps: draft depth of that second one, 1 to 8; None: as deep as the first. What is looked up costs
            nothing and is often right for long; a head's guesses cost a step each, and seldom stand four deep.
    """

    speculation: str = "none"
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    disable_batch_threshold: int | None = None
    steps_by_batch: tuple[tuple[int, int], ...] | None = None
    policy: str = "fixed"
    acceptance: str = "target"
    spec_version: str = "v1"
    ngram_min: int = 2
    ngram_max: int = 4
    draft_head: str | None = None
    draft_model: str | None = None
    hybrid: tuple[str, str] = ("ngram", "eagle3")
    hybrid_steps: int | None = None

    @property
    def shape(self) -> DraftShape:
        """Of a round that speculates."""
        return DraftShape(self.num_steps, self.topk, self.num_draft_tokens, self.hybrid_steps or MOST_STEPS)

    def problems(self) -> list[str]:
        """Each sentence names the setting, what is wrong with it and what would be valid."""
        found = []
        if self.speculation not in DRAFTERS:
            found.append(f"speculation: '{self.speculation}' is unknown; valid: {', '.join(DRAFTERS)}")
        elif self.speculation == "none":
            if self.num_steps or self.num_draft_tokens != 1:
                found.append("num_steps: must be 0 (and num_draft_tokens 1) when speculation is 'none'")
            if self.topk != 1:
                found.append(f"topk: {self.topk} is not valid; without speculation it is 1")
        else:
            found += self._shape_problems(DRAFTERS[self.speculation])
        found += self._schedule_problems()
        if self.policy not in POLICIES:
            found.append(f"policy: '{self.policy}' is unknown; valid: {', '.join(POLICIES)}")
        if self.acceptance not in ACCEPTANCE:
            found.append(f"acceptance: '{self.acceptance}' is unknown; valid: {', '.join(ACCEPTANCE)}")
        elif self.acceptance == "rejection" and self.topk > 1:
            found.append(f"acceptance: 'rejection' is for chains (topk 1), not topk {self.topk}; valid: target")
        if self.spec_version not in ("v1", "v2"):
            found.append(f"spec_version: '{self.spec_version}' is unknown; valid: v1, v2")
        if not 1 <= self.ngram_min <= self.ngram_max:
            found.append(f"ngram_min: {self.ngram_min} must be at least 1 and at most ngram_max ({self.ngram_max})")
        parts = [name for name in DRAFTERS if name not in ("none", "hybrid")]
        if len(set(self.hybrid)) != 2 or not set(self.hybrid) <= set(parts):
            found.append(f"hybrid: '{','.join(self.hybrid)}' is not valid; two different ones of {', '.join(parts)}")
        elif self.speculation == "hybrid" and self.topk > 1 and "draft_model" in self.hybrid:
            found.append(f"topk: {self.topk} is not valid; the drafter 'draft_model' only chains (topk 1)")
        if self.hybrid_steps is not None and not 1 <= self.hybrid_steps <= MOST_STEPS:
            found.append(f"hybrid_steps: {self.hybrid_steps} is outside 1 to {MOST_STEPS}")
        return found

    def merged(self, changes: Mapping[str, Any]) -> SpecConfig:
        """These settings with some changed; what follows from others is derived again unless it is given.

        Without speculation there is no depth; a first depth is `DEFAULT_STEPS`; a chain verifies its depth and the
        root. Of `disable_batch_threshold` and `steps_by_batch` the one that is given replaces the other.
        """
        new: dict[str, Any] = dict(changes)
        speculation = new.get("speculation", self.speculation)
        if speculation == "none":
            for name, off in (("num_steps", 0), ("topk", 1), ("num_draft_tokens", 1), ("steps_by_batch", None)):
                new.setdefault(name, off)
        steps = new.setdefault("num_steps", self.num_steps or DEFAULT_STEPS)
        topk = new.get("topk", self.topk)
        if "num_draft_tokens" not in new and speculation != "none":
            same = (steps, topk) == (self.num_steps, self.topk) and self.speculation != "none"
            new["num_draft_tokens"] = self.num_draft_tokens if same else default_draft_tokens(steps, topk)
        if new.get("disable_batch_threshold") is not None:
            new.setdefault("steps_by_batch", None)
        elif new.get("steps_by_batch") is not None:
            new.setdefault("disable_batch_threshold", None)
        return replace(self, **new)

    def _shape_problems(self, limits: DraftLimits) -> list[str]:
        found = []
        if not 1 <= self.num_steps <= limits.max_depth:
            found.append(f"num_steps: {self.num_steps} is outside 1 to {limits.max_depth}")
        if not 1 <= self.topk <= limits.max_topk:
            chains = f"the drafter '{self.speculation}' only chains (topk 1)"
            why = chains if limits.max_topk == 1 else f"valid: 1 to {limits.max_topk}"
            return [*found, f"topk: {self.topk} is not valid; {why}"]
        most = min(MOST_DRAFT_TOKENS, tree_capacity(self.num_steps, self.topk))
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            found.append(
                f"num_draft_tokens: a chain (topk 1) of {self.num_steps} steps has {self.num_steps + 1}, "
                f"not {self.num_draft_tokens}"
            )
        elif self.topk > 1 and not 2 <= self.num_draft_tokens <= most:
            found.append(
                f"num_draft_tokens: {self.num_draft_tokens} is not valid; a tree of {self.num_steps} steps and topk "
                f"{self.topk} holds 2 to {most} (root included)"
            )
        return found

    def _schedule_problems(self) -> list[str]:
        found = []
        if self.disable_batch_threshold is not None and self.disable_batch_threshold < 1:
            found.append(f"disable_batch_threshold: {self.disable_batch_threshold} is below 1; omit it for never")
        table = self.steps_by_batch
        if table is None:
            return found
        if self.disable_batch_threshold is not None:
            found.append("steps_by_batch: cannot be combined with disable_batch_threshold, which is a short form of it")
        sizes = [size for size, _ in table]
        if not table or sizes[0] != 1 or sizes != sorted(set(sizes)):
            found.append("steps_by_batch: the numbers of requests must begin with 1 and rise, as in 1:0,8:3,64:0")
        if any(not 0 <= steps <= self.num_steps for _, steps in table):
            found.append(f"steps_by_batch: a depth is outside 0 to num_steps ({self.num_steps})")
        return found


@dataclass(frozen=True)
class EngineConfig:
    """One engine.

    Args:
        model: known name, .gguf file, Hugging Face folder or hub id (`engine.model.source` resolves it).
        dtype: of activations, and of weights unless `weights` says otherwise; "auto" is bfloat16 where it is fast.
        weights: how the linear layers' weights are kept; "auto": in `dtype`. With int4 the output layer is int8.
        context_length: longest prompt + output, in tokens; None: what the model was trained for.
        kv_tokens: size of the KV pool in tokens; None: 1024 per running request, at least one full context, at most
            half of the free memory.
        page_size: tokens per KV page.
        max_running_requests: requests decoded together; more wait.
        max_waiting_requests: beyond the running ones; further ones are refused with status 429.
        prefill_tokens: prompt tokens run per step, at most.
        threads: of each rank's process; None: all cores it may use, divided by `tp`.
        device: what computes, one of `DEVICES`; with "cuda" rank r has GPU r. Has never run on a GPU.
        cuda_graphs: of decode and verify steps, one of `GRAPHS`: the server does not start without them, goes
            on without them and says so, or makes none.
        tp: ranks that share each layer, one process each; the model's KV heads at most.
        allreduce: how the ranks exchange what they computed, one of `ALLREDUCE`; "auto": the fastest that can run.
        collective_timeout_s: a rank that is not heard of for so long in such an exchange takes the server down.
        prefix_cache: keep the pages of finished requests for others that begin alike, while there is room.
        drain_s: after SIGTERM, requests in flight have this long to finish.
        seed: of the engine, from which requests without a seed get theirs.
    """

    model: str = "smollm2-135m"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = field(default=None, repr=False)
    dtype: str = "auto"
    weights: str = "auto"
    context_length: int | None = None
    kv_tokens: int | None = None
    page_size: int = 16
    max_running_requests: int = 64
    max_waiting_requests: int = 20_000
    prefill_tokens: int = 512
    threads: int | None = None
    device: str = "cpu"
    cuda_graphs: str = "preferred"
    tp: int = 1
    allreduce: str = "auto"
    collective_timeout_s: float = 30.0
    prefix_cache: bool = True
    seed: int = 0
    drain_s: float = 5.0
    log_level: str = "info"
    log_format: str = "text"
    spec: SpecConfig = field(default_factory=SpecConfig)

    def problems(self) -> list[str]:
        """Everything wrong with these settings, in the form of `SpecConfig.problems`; empty when valid."""
        found = self.spec.problems()
        if self.dtype not in DTYPES:
            found.append(f"dtype: '{self.dtype}' is unknown; valid: {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            found.append(f"weights: '{self.weights}' is unknown; valid: {', '.join(WEIGHTS)}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                found.append(f"{name}: {value} is outside 1 to {most}")
        if self.device not in DEVICES:
            found.append(f"device: '{self.device}' is unknown; valid: {', '.join(DEVICES)}")
        elif self.device == "cuda" and self.weights not in ("auto", "bf16"):
            found.append(f"weights: '{self.weights}' is for CPUs; valid with device 'cuda': auto, bf16")
        if self.cuda_graphs not in GRAPHS:
            found.append(f"cuda_graphs: '{self.cuda_graphs}' is unknown; valid: {', '.join(GRAPHS)}")
        elif self.cuda_graphs == "required" and self.device == "cpu":
            found.append("cuda_graphs: 'required' needs a GPU (device 'cuda'); valid with device 'cpu': preferred, off")
        if self.allreduce not in ALLREDUCE:
            found.append(f"allreduce: '{self.allreduce}' is unknown; valid: {', '.join(ALLREDUCE)}")
        elif self.allreduce != "auto" and self.tp == 1:
            found.append(f"allreduce: '{self.allreduce}' has no meaning with one rank (tp 1); valid: auto")
        if not 0.1 <= self.collective_timeout_s <= 3600:
            found.append(f"collective_timeout_s: {self.collective_timeout_s:g} is outside 0.1 to 3600")
        if not 0 <= self.drain_s <= 3600:
            found.append(f"drain_s: {self.drain_s:g} is outside 0 to 3600")
        if not 0 <= self.port <= 65535:
            found.append(f"port: {self.port} is outside 0 to 65535")
        return found

    def public(self) -> dict[str, Any]:
        """Settings as requested, flat, without the API key: for `/server_info` and logs."""
        flat = asdict(self)
        flat.update(flat.pop("spec"))
        flat["prefix_cache"] = "on" if self.prefix_cache else "off"
        flat["api_key"] = "set" if self.api_key else None
        flat["disable_batch_threshold"] = self.spec.disable_batch_threshold or "never"
        flat["steps_by_batch"] = schedule_text(self.spec.steps_by_batch)
        flat["hybrid"] = ",".join(self.spec.hybrid)
        return flat
