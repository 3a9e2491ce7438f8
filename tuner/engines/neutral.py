"""The settings that mean the same on every engine. docs/engines.md holds the table of how each is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tuner.engines.base import SettingSpec
from tuner.records import Setting

ALLREDUCE = (
    *("auto", "nccl", "nccl_ring", "nccl_tree", "custom", "flashinfer_fusion", "flashinfer_pcie_ipc"),
    *("symm_mem", "nccl_symm", "mscclpp", "nvls"),
)

NEUTRAL: Mapping[str, SettingSpec] = {
    "speculation": SettingSpec("str", "the drafter", choices=("none", "ngram", "eagle3", "draft_model", "mtp")),
    "num_steps": SettingSpec("int", "draft depth per round", low=1, high=64),
    "topk": SettingSpec("int", "branches per node; 1 is a chain", low=1, high=10),
    "num_draft_tokens": SettingSpec("int", "rows verified per request and round, root included", low=2, high=128),
    "spec_version": SettingSpec("str", "v1: synchronous, v2: overlap scheduling", choices=("v1", "v2")),
    "disable_batch_threshold": SettingSpec(
        "int", "speculate at up to this many running requests", low=1, words=("never",)
    ),
    "steps_by_batch": SettingSpec("str", "draft depth by running requests, as in 1:0,8:3,64:0"),
    "policy": SettingSpec(
        "str", "adaptive: the engine changes the depth by what is accepted", choices=("fixed", "adaptive")
    ),
    "acceptance": SettingSpec(
        "str",
        "of drafts at a temperature above 0: drafted greedily, or sampled",
        choices=("target", "rejection"),
    ),
    "draft_head": SettingSpec("str", "folder, file or hub id of the head of eagle3"),
    "draft_model": SettingSpec("str", "folder, file or hub id of the model of draft_model"),
    "ngram_min": SettingSpec("int", "shortest suffix looked up by ngram", low=1),
    "ngram_max": SettingSpec("int", "longest suffix looked up by ngram", low=1),
    "draft_attention_backend": SettingSpec("str", "attention kernels of the drafter, in the engine's own word"),
    "device": SettingSpec("str", "what computes", choices=("gpu", "cpu")),
    "tp": SettingSpec("int", "tensor parallel size", low=1, high=64),
    "allreduce": SettingSpec("str", "how tensor-parallel ranks add up", choices=ALLREDUCE),
    "attention_backend": SettingSpec("str", "attention kernels, in the engine's own word"),
    "dtype": SettingSpec("str", "of weights and activations", choices=("auto", "bfloat16", "float16", "float32")),
    "quantization": SettingSpec("str", "of the weights, in the engine's own word"),
    "kv_cache_dtype": SettingSpec("str", "of the KV cache, in the engine's own word"),
    "context_length": SettingSpec("int", "longest prompt + output of a request, in tokens", low=1),
    "kv_tokens": SettingSpec("int", "size of the KV pool, in tokens", low=1),
    "page_size": SettingSpec("int", "tokens per KV page", low=1),
    "max_running_requests": SettingSpec("int", "requests decoded together; more wait", low=1),
    "prefill_tokens": SettingSpec("int", "prompt tokens run per step, at most", low=1),
    "memory_fraction": SettingSpec("float", "share of GPU memory for weights and KV pool", low=0.05, high=0.99),
    "prefix_cache": SettingSpec("str", "requests that begin alike share what was computed", choices=("on", "off")),
    "cuda_graphs": SettingSpec("bool", "decode steps are captured (vLLM: and compiled) at the start"),
    "cuda_graph_max_batch": SettingSpec("int", "largest running batch that is captured", low=1),
    "mixed_chunk": SettingSpec("bool", "prefill and decode share a step"),
    "threads": SettingSpec("int", "threads that compute", low=1),
    "gpu_layers": SettingSpec("int", "layers kept on the GPU", low=0, words=("all",)),
    "flash_attention": SettingSpec("str", "fused attention kernels", choices=("on", "off")),
    "seed": SettingSpec("int", "from which requests without a seed get theirs", low=0),
}

SPECULATIVE = (
    *("speculation", "num_steps", "topk", "num_draft_tokens", "spec_version", "disable_batch_threshold"),
    *("steps_by_batch", "policy", "acceptance", "draft_head", "draft_model", "ngram_min", "ngram_max"),
    "draft_attention_backend",
)
"""Settings that say nothing without speculation, and `speculation` itself."""


def subset(names: Iterable[str], **choices: tuple[Setting, ...]) -> dict[str, SettingSpec]:
    """The settings that an engine has, with its own choices where they are fewer."""
    found = {name: NEUTRAL[name] for name in names}
    return {**found, **{name: replace(found[name], choices=valid) for name, valid in choices.items()}}
