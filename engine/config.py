"""All settings of one engine, frozen before anything is built. `problems()` reports everything wrong at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SPECULATION = ("none", "ngram")
_MOST = {
    "page_size": 1024,
    "max_running_requests": 4096,
    "max_waiting_requests": 10**6,
    "prefill_tokens": 65536,
    "context_length": 2**24,
    "kv_tokens": 2**40,
    "threads": 1024,
}
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding.

    Args:
        speculation: the drafter, one of `SPECULATION`.
        num_steps: draft depth per round, 1 to 8; 0 only with "none".
        topk: branches per node; 1 is a chain.
        num_draft_tokens: rows verified per request and round, root included; a chain of `num_steps` has num_steps + 1.
        disable_batch_threshold: speculate at up to this many running requests, not at one more; None: always.
        spec_version: "v1" synchronous or "v2" overlap scheduling.
        ngram_min, ngram_max: lengths of the suffix looked up by the `ngram` drafter, longest first.
    """

    speculation: str = "none"
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    disable_batch_threshold: int | None = None
    spec_version: str = "v1"
    ngram_min: int = 2
    ngram_max: int = 4

    def problems(self) -> list[str]:
        """Each sentence names the setting, what is wrong with it and what would be valid."""
        found = []
        if self.speculation not in SPECULATION:
            found.append(f"speculation: '{self.speculation}' is unknown; valid: {', '.join(SPECULATION)}")
        if self.speculation == "none":
            if self.num_steps or self.num_draft_tokens != 1:
                found.append("num_steps: must be 0 (and num_draft_tokens 1) when speculation is 'none'")
        else:
            if not 1 <= self.num_steps <= 8:
                found.append(f"num_steps: {self.num_steps} is outside 1 to 8")
            if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
                found.append(
                    f"num_draft_tokens: a chain (topk 1) of {self.num_steps} steps has {self.num_steps + 1}, "
                    f"not {self.num_draft_tokens}"
                )
        if self.topk != 1:
            found.append(f"topk: {self.topk} is not valid; the drafter '{self.speculation}' only chains (topk 1)")
        if self.disable_batch_threshold is not None and self.disable_batch_threshold < 1:
            found.append(f"disable_batch_threshold: {self.disable_batch_threshold} is below 1; omit it for never")
        if self.spec_version != "v1":
            found.append(f"spec_version: '{self.spec_version}' is not available; valid: v1")
        if not 1 <= self.ngram_min <= self.ngram_max:
            found.append(f"ngram_min: {self.ngram_min} must be at least 1 and at most ngram_max ({self.ngram_max})")
        return found


@dataclass(frozen=True)
class EngineConfig:
    """One engine.

    Args:
        model: known name, .gguf file, Hugging Face folder or hub id (`engine.model.source` resolves it).
        dtype: of weights and activations; "auto" is bfloat16 where the machine has fast instructions for it.
        context_length: longest prompt + output, in tokens; None: what the model was trained for.
        kv_tokens: size of the KV pool in tokens; None: 1024 per running request, at least one full context, at most
            half of the free memory.
        page_size: tokens per KV page.
        max_running_requests: requests decoded together; more wait.
        max_waiting_requests: beyond the running ones; further ones are refused with status 429.
        prefill_tokens: prompt tokens run per step, at most.
        threads: OpenMP threads of the model process; None: all cores it may use.
        prefix_cache: keep the pages of finished requests for others that begin alike, while there is room.
        seed: of the engine, from which requests without a seed get theirs.
    """

    model: str = "smollm2-135m"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = field(default=None, repr=False)
    dtype: str = "auto"
    context_length: int | None = None
    kv_tokens: int | None = None
    page_size: int = 16
    max_running_requests: int = 64
    max_waiting_requests: int = 20_000
    prefill_tokens: int = 512
    threads: int | None = None
    prefix_cache: bool = True
    seed: int = 0
    log_level: str = "info"
    log_format: str = "text"
    spec: SpecConfig = field(default_factory=SpecConfig)

    def problems(self) -> list[str]:
        """Everything wrong with these settings, in the form of `SpecConfig.problems`; empty when valid."""
        found = self.spec.problems()
        if self.dtype not in DTYPES:
            found.append(f"dtype: '{self.dtype}' is unknown; valid: {', '.join(DTYPES)}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                found.append(f"{name}: {value} is outside 1 to {most}")
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
        return flat
