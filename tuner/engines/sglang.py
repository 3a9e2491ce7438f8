"""SGLang, started as `sglang serve`. It derives what it is not told, and differently for each drafter: all is told."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tuner.engines.base import Mismatch, Resolution
from tuner.engines.flags import Flag
from tuner.engines.installed import Program
from tuner.engines.neutral import SPECULATIVE, subset
from tuner.engines.served import ServedEngine, Told, command_of, local, owned
from tuner.engines.sglang_resolution import resolution
from tuner.engines.speculation import depths, draft_tokens
from tuner.engines.versions import numbers
from tuner.records import LaunchRecord

FLAGS: Mapping[str, Flag] = {
    "dtype": Flag("--dtype"),
    "quantization": Flag("--quantization"),
    "kv_cache_dtype": Flag("--kv-cache-dtype"),
    "context_length": Flag("--context-length"),
    "kv_tokens": Flag("--max-total-tokens"),
    "page_size": Flag("--page-size"),
    "max_running_requests": Flag("--max-running-requests"),
    "prefill_tokens": Flag("--chunked-prefill-size"),
    "memory_fraction": Flag("--mem-fraction-static"),
    "attention_backend": Flag("--attention-backend"),
    "device": Flag("--device"),
    "tp": Flag("--tp-size"),
    "prefix_cache": Flag("--enable-radix-cache", "--disable-radix-cache", {"on": True, "off": False}),
    "cuda_graphs": Flag("--enable-decode-cuda-graph", "--disable-decode-cuda-graph"),
    "cuda_graph_max_batch": Flag("--cuda-graph-max-bs-decode"),
    "mixed_chunk": Flag("--enable-mixed-chunk"),
    "spec_version": Flag("--enable-overlap-schedule", "--disable-overlap-schedule", {"v2": True, "v1": False}),
    "seed": Flag("--random-seed"),
}
"""Setting → how SGLang is told. Its switches are one-sided: of a pair only the side that it has is ever written."""

_ONE_SIDED = {"--enable-radix-cache", "--enable-decode-cuda-graph", "--enable-overlap-schedule"}
"""The sides that SGLang has no flag for, because they are its default."""

SPEC_FLAGS: Mapping[str, Flag] = {
    "num_steps": Flag("--speculative-num-steps"),
    "topk": Flag("--speculative-eagle-topk"),
    "num_draft_tokens": Flag("--speculative-num-draft-tokens"),
    "draft_head": Flag("--speculative-draft-model-path"),
    "draft_model": Flag("--speculative-draft-model-path"),
    "draft_attention_backend": Flag("--speculative-draft-attention-backend"),
}
ALGORITHM = "--speculative-algorithm"
_ALGORITHMS = {"ngram": "NGRAM", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "mtp": "NEXTN"}
_NAMES = {"NGRAM": "ngram", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NEXTN": "mtp", "EAGLE": "mtp"}
_HEADS = {"eagle3": "draft_head", "draft_model": "draft_model"}
_ADAPTIVE = ("eagle3", "mtp")
_BUILT_IN_DEPTHS = (0, 1, 3, 5, 7)
"""Depths of the adaptive table that SGLang brings along (srt/speculative/adaptive_spec_params.py)."""

_PATHS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "custom": ((), {}),
    "flashinfer_fusion": (("--flashinfer-allreduce-fusion-backend", "auto"), {}),
    "flashinfer_pcie_ipc": ((), {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}),
    "symm_mem": (("--enable-torch-symm-mem",), {}),
    "nccl_symm": (("--enable-symm-mem",), {}),
    "mscclpp": (("--enable-mscclpp",), {}),
    "nvls": (("--enable-nccl-nvls",), {}),
    "nccl": ((), {}),
    "nccl_ring": ((), {"NCCL_ALGO": "allreduce:ring"}),
    "nccl_tree": ((), {"NCCL_ALGO": "allreduce:tree"}),
}
"""One path of the all-reduce: flags and variables that switch it on; every other path is then switched off by name."""

_PATH_SWITCHES = {
    "flashinfer_fusion": "flashinfer_allreduce_fusion_backend",
    "symm_mem": "enable_torch_symm_mem",
    "nccl_symm": "enable_symm_mem",
    "mscclpp": "enable_mscclpp",
    "nvls": "enable_nccl_nvls",
}
"""What its own account of itself calls the switch of a path."""

_GIVES_UP = {
    "custom": "log_custom",
    "symm_mem": "log_symm_mem",
    "mscclpp": "log_mscclpp",
    "flashinfer_fusion": "log_fusion",
}
"""Paths of which a line of the log says that the sums go another way (srt/distributed, srt/layers)."""

_NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"
_OVERLAP_BY_FLAG = (0, 5, 23)
"""From here on SGLANG_ENABLE_SPEC_V2 is known to be gone; to some release before it switched overlap on."""

NEEDED = {
    "attention_backend": "SGLang would choose it by topk, so that trees and chains would differ in it unseen",
    "page_size": "SGLang would choose it by the attention kernels",
}


class SglangEngine(ServedEngine):
    """`sglang serve` of an installed SGLang, or of the one that `engine.args.program` names."""

    kind = "sglang"
    settings = subset(
        [*(name for name in SPECULATIVE if name not in ("ngram_min", "ngram_max")), *FLAGS, "allreduce"],
        allreduce=("auto", *_PATHS),
    )
    chains = ("draft_model", "mtp")
    owned: ClassVar[Mapping[str, str]] = {
        **owned(
            {name: [n for n in flag.names if n not in _ONE_SIDED] for name, flag in {**FLAGS, **SPEC_FLAGS}.items()},
            (
                *("--host", "--port", "--model-path", "--model", "--served-model-name", "--enable-metrics"),
                *("--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile"),
            ),
        ),
        "--tensor-parallel-size": "engine.args.tp",
        "--tp": "engine.args.tp",
        "--speculative-draft-model": "engine.args.draft_head or draft_model",
        ALGORITHM: "engine.args.speculation",
        "--speculative-use-rejection-sampling": "engine.args.acceptance",
        "--speculative-adaptive": "engine.args.policy",
        "--speculative-adaptive-config": "engine.args.steps_by_batch",
        "--speculative-ngram-min-bfs-breadth": "engine.args.topk",
        "--speculative-ngram-max-bfs-breadth": "engine.args.topk",
        "--disable-custom-all-reduce": "engine.args.allreduce",
        _NO_FUSION: "engine.args.allreduce",
        **{flags[0]: "engine.args.allreduce" for flags, _ in _PATHS.values() if flags},
    }
    spelled: ClassVar[Mapping[str, str]] = {
        **{n: " / ".join(x for x in f.names if x not in _ONE_SIDED) for n, f in {**FLAGS, **SPEC_FLAGS}.items()},
        "speculation": ALGORITHM,
        "topk": "--speculative-eagle-topk; ngram: --speculative-ngram-max-bfs-breadth besides",
        "policy": "--speculative-adaptive",
        "steps_by_batch": "--speculative-adaptive-config (one depth per size)",
        "disable_batch_threshold": "--speculative-adaptive-config (depth 0 above it)",
        "acceptance": "--speculative-use-rejection-sampling",
        "allreduce": "--enable-* and --disable-* flags, SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
    }
    info_path = "/server_info"
    flush_path = "/flush_cache"
    # A crash in a trial must end at once: the dumps of a production server hold its port for a minute.
    trial_env: ClassVar[Mapping[str, str]] = {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    also_read: ClassVar[Mapping[str, str]] = {
        "log_adaptive": r"speculative_adaptive disabled",
        "log_pcie_ipc": r"FlashInfer PCIe-IPC (?:all-reduce|workspace|allreduce failed)|PCIE_IPC_ALLREDUCE is set but",
        # The newer kernels (CustomAllReduceV2) may be disabled and these still serve.
        "log_custom": r"Custom ?[Aa]llreduce is disabled|Setup Custom allreduce failed",
        "log_symm_mem": r"TorchSymmMemCommunicator: .*not (?:supported|available)",
        "log_mscclpp": r"PyMscclpp (?:is (?:unavailable|disabled)|did not produce)",
        "log_fusion": r"Failed to initialize FlashInfer workspace|(?i:FlashInfer allreduce fusion disabled)"
        r"|Skipping allreduce fusion|allreduce_fusion API is not available|FlashInfer comm not available",
        "log_synchronous": r"Non-overlap \(synchronous\) spec v2 is used",
        "log_reduced": r"max_running_requests was reduced",
    }

    def program(self, args: Mapping[str, Any]) -> Program:
        """See `ServedEngine.program`."""
        advice = "Install it (pip install sglang), best in an environment of its own"
        return Program("sglang", command_of(args, "sglang", "serve"), ("--help",), "sglang", advice, ("version",))

    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `ServedEngine.completed`."""
        cpu = values.get("device") == "cpu"
        complete: dict[str, Any] = {"speculation": "none", "device": "gpu", "tp": 1, "prefix_cache": "on"}
        complete |= {"max_running_requests": 128, "prefill_tokens": 8192, "memory_fraction": 0.85, "cuda_graphs": True}
        complete["spec_version"] = "v1" if cpu else "v2"
        complete |= values
        if complete["speculation"] != "none":
            complete.setdefault("topk", 1)
            complete.setdefault("num_draft_tokens", draft_tokens(complete["num_steps"], complete["topk"]))
            complete.setdefault("acceptance", "target")
            complete.setdefault("draft_attention_backend", complete.get("attention_backend"))
        if complete["speculation"] == "ngram":
            complete.pop("draft_attention_backend")
        return complete

    def own_problems(self, values: Mapping[str, Any]) -> list[str]:
        """See `ServedEngine.own_problems`."""
        drafter = values["speculation"]
        found = [f"{name}: is needed: {why}" for name, why in NEEDED.items() if name not in values]
        for name in ("attention_backend", "draft_attention_backend"):
            if (word := values.get(name)) is not None and word != str(word).lower():
                found.append(f"{name}: SGLang writes its kernels in small letters, such as flashinfer, not '{word}'")
        head = _HEADS.get(drafter)
        if head and head not in values:
            found.append(f"{head}: is needed with speculation {drafter}: a folder or a hub id")
        for kind, name in _HEADS.items():
            if drafter not in ("none", kind) and name in values:
                found.append(f"{name}: has no meaning with speculation {drafter}")
        table = depths(values) if drafter != "none" else None
        adaptive = values.get("policy") == "adaptive"
        name = "policy" if adaptive else "steps_by_batch" if "steps_by_batch" in values else "disable_batch_threshold"
        if table or adaptive:
            if drafter not in _ADAPTIVE:
                found.append(f"{name}: SGLang changes depths for {' and '.join(_ADAPTIVE)} only, not for {drafter}")
            if values["topk"] > 1:
                found.append(f"{name}: SGLang changes depths of chains only (topk 1)")
            offered = {depth for _, depth in table} if table else set(_BUILT_IN_DEPTHS)
            if values["num_steps"] not in offered:
                listed = ", ".join(map(str, sorted(offered)))
                found.append(f"num_steps: must be one of the depths of {name} ({listed}), where it begins")
        if table and adaptive:
            found.append("policy: SGLang has one table of depths; leave out steps_by_batch and disable_batch_threshold")
        if values.get("allreduce", "auto") != "auto" and values["tp"] == 1:
            found.append("allreduce: has no meaning with one GPU (tp 1); valid: auto")
        return found

    def told(self, values: Mapping[str, Any]) -> Told:
        """See `ServedEngine.told`."""
        told = Told(argv=["--enable-metrics"])
        for name, flag in FLAGS.items():
            if name in values:
                value = {"gpu": "cuda"}.get(values[name], values[name]) if name == "device" else values[name]
                told.argv += [said for said in flag.write(value) if said not in _ONE_SIDED]
        if values["speculation"] != "none":
            self._speculation(values, told)
        path = values.get("allreduce", "auto")
        if path != "auto":
            flags, env = _PATHS[path]
            told.argv += flags
            told.env |= {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "0", **env}
            told.argv += [] if path == "flashinfer_fusion" else [_NO_FUSION]
            told.argv += [] if path == "custom" else ["--disable-custom-all-reduce"]
        return told

    def _speculation(self, values: Mapping[str, Any], told: Told) -> None:
        told.argv += [ALGORITHM, _ALGORITHMS[values["speculation"]]]
        for name, flag in SPEC_FLAGS.items():
            if name in values:
                told.argv += flag.write(local(values[name]) if name in _HEADS.values() else values[name])
        if values["speculation"] == "ngram":
            told.argv += ["--speculative-ngram-min-bfs-breadth", "1"]
            told.argv += ["--speculative-ngram-max-bfs-breadth", str(values["topk"])]
        if values["acceptance"] == "rejection":
            told.argv.append("--speculative-use-rejection-sampling")
        table = depths(values)
        if table or values.get("policy") == "adaptive":
            told.argv.append("--speculative-adaptive")
        if table:
            path, text = adaptive_file(table)
            told.files[path] = text
            told.argv += ["--speculative-adaptive-config", path]

    def record(self, **given: Any) -> LaunchRecord:
        """See `Engine.record`. Releases that overlapped speculation by a variable are told by it."""
        record = super().record(**given)
        old = numbers(record.engine_version)
        if not old or old >= _OVERLAP_BY_FLAG or record.expected["speculation"] == "none":
            return record
        overlap = "1" if record.expected["spec_version"] == "v2" else "0"
        return replace(record, env={"SGLANG_ENABLE_SPEC_V2": overlap, **record.env})

    def address(self, model: str, served: str, host: str, port: int) -> list[str]:
        """See `ServedEngine.address`."""
        return ["--model-path", model, "--served-model-name", served, "--host", host, "--port", str(port)]

    def resolved(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> Resolution:
        """See `Installed.resolved`: asked of the installed SGLang."""
        return resolution(self.program(args), records, self.mismatches)

    def effective(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """From /server_info: the first internal state over the top level, which is from before the start."""
        both = self._both(info)
        told = {name: both[key] for name, key in _STATE.items() if both.get(key) is not None}
        if isinstance(most := both.get("effective_max_running_requests_per_dp"), int):
            told["max_running_requests"] = most
        for name, key, words in _SWITCHES:
            if isinstance(both.get(key), bool):
                told[name] = words[both[key]]
        if "speculative_algorithm" not in both:
            return told
        algorithm = both["speculative_algorithm"]
        told["speculation"] = _NAMES.get(str(algorithm), algorithm) if algorithm else "none"
        if algorithm:
            numbers = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
            if not both.get("speculative_adaptive"):  # an adaptive one is somewhere in its table
                told |= dict(zip(("num_steps", "topk", "num_draft_tokens"), map(both.get, numbers), strict=True))
                told |= {"policy": "fixed", "steps_by_batch": None, "disable_batch_threshold": None}
            rejects = bool(both.get("speculative_use_rejection_sampling"))
            told["acceptance"] = "rejection" if rejects else "target"
        return told

    @staticmethod
    def _both(info: Mapping[str, Any]) -> dict[str, Any]:
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
        return {**info, **state}

    def fell_back(self, record: LaunchRecord, info: Mapping[str, Any]) -> list[Mismatch]:
        """The all-reduce paths that SGLang leaves with no more than a line of its log."""
        asked = str(record.expected.get("allreduce", "auto"))
        if asked == "flashinfer_pcie_ipc" and "log_pcie_ipc" in info:
            said = [str(line) for line in info["log_pcie_ipc"] or ()]
            # It is enabled first, and has its workspace with the first sum that it could serve.
            broken = [line for line in said if "failed" in line]
            if not any("workspace built" in line for line in said):
                broken += [line for line in said if "stay on NCCL" in line]
            if broken or not any("enabled" in line for line in said):
                why = [*broken, *said, "the log does not name it"][0]
                return [Mismatch("allreduce", asked, "nccl", why)]
        if lines := info.get(_GIVES_UP.get(asked, "")):
            return [Mismatch("allreduce", asked, "nccl", lines[0])]
        switch = _PATH_SWITCHES.get(asked, "")
        both = self._both(info)
        if switch in both and not both[switch]:
            return [Mismatch("allreduce", asked, "auto", f"{switch} is {both[switch]}")]
        return []


_STATE = {
    "page_size": "page_size",
    "memory_fraction": "mem_fraction_static",
    "prefill_tokens": "chunked_prefill_size",
    "attention_backend": "attention_backend",
    "kv_tokens": "max_total_tokens",
    "context_length": "context_length",
    "tp": "tp_size",
    "seed": "random_seed",
    "draft_attention_backend": "speculative_draft_attention_backend",
}
_SWITCHES = (
    ("prefix_cache", "disable_radix_cache", ("on", "off")),
    ("cuda_graphs", "disable_decode_cuda_graph", (True, False)),
    ("spec_version", "disable_overlap_schedule", ("v2", "v1")),
    ("mixed_chunk", "enable_mixed_chunk", (False, True)),
)
"""Setting, what SGLang calls it, and what its false and true mean."""


def adaptive_file(table: list[tuple[int, int]]) -> tuple[str, str]:
    """Where SGLang finds a table of depths, and the table: named by what it holds, so that it never changes."""
    text = json.dumps({str(size): {"candidate_steps": [depth]} for size, depth in table}, indent=1)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-tuner" / "sglang"
    return str(root / f"steps-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"), text
