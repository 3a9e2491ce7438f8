"""llama.cpp's llama-server. Failed speculation is only a warning there, so that it is read back from every slot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tuner.engines import installed
from tuner.engines.base import Resolution
from tuner.engines.drafts import broken
from tuner.engines.flags import Flag
from tuner.engines.installed import Program
from tuner.engines.neutral import SPECULATIVE, subset
from tuner.engines.served import HUB_ID, ServedEngine, Told, command_of, owned
from tuner.errors import EnvironmentBroken
from tuner.records import LaunchRecord

FLAGS: Mapping[str, Flag] = {
    "max_running_requests": Flag("--parallel"),
    "prefill_tokens": Flag("--batch-size"),
    "threads": Flag("--threads"),
    "gpu_layers": Flag("--n-gpu-layers"),
    "kv_cache_dtype": Flag("--cache-type-k"),
    "flash_attention": Flag("--flash-attn"),
    "seed": Flag("--seed"),
}
"""Setting → how llama-server is told. Its context is that of all slots together, and said apart."""

_TYPES = {"ngram": "ngram-simple", "eagle3": "draft-eagle3", "draft_model": "draft-simple", "mtp": "draft-mtp"}
_HEADS = {"eagle3": "draft_head", "draft_model": "draft_model"}
_LEFT_OUT = (
    *("policy", "acceptance", "spec_version", "disable_batch_threshold", "steps_by_batch"),
    "draft_attention_backend",
)
_DRAFT = ("--spec-draft-model", "--model-draft", "-md", "--spec-draft-hf", "--hf-repo-draft", "-hfd", "-hfrd")
_SAID_BY = {
    "max_running_requests": ("--parallel", "-np"),
    "prefill_tokens": ("--batch-size", "-b"),
    "threads": ("--threads", "-t", "--threads-batch", "-tb"),
    "gpu_layers": ("--n-gpu-layers", "--gpu-layers", "-ngl"),
    "kv_cache_dtype": ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
    "flash_attention": ("--flash-attn", "-fa"),
    "seed": ("--seed", "-s"),
    "context_length": ("--ctx-size", "-c"),
    "speculation": ("--spec-type", "--spec-default"),
    "draft_head or draft_model": _DRAFT,
    "num_steps": ("--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min", "--spec-ngram-simple-size-m"),
    "ngram_max": ("--spec-ngram-simple-size-n", "--spec-ngram-simple-min-hits"),
}
_TUNERS = (
    *("--host", "--port", "--model", "-m", "--hf-repo", "-hf", "-hfr", "--alias", "-a", "--metrics", "--slots"),
    *("--no-slots", "--fit", "-fit", "--cache-prompt", "--no-cache-prompt", "--cache-ram", "-cram", "--api-key"),
    *("--kv-unified", "--no-kv-unified", "-kvu", "-no-kvu"),
    *("--api-key-file", "--api-prefix", "--ssl-key-file", "--ssl-cert-file"),
)


class LlamaServerEngine(ServedEngine):
    """`llama-server` in PATH, or the one that `engine.args.program` names."""

    kind = "llama_server"
    settings = subset(
        [*(name for name in SPECULATIVE if name not in _LEFT_OUT), *FLAGS, "context_length", "prefix_cache"],
        topk=(1,),
        prefix_cache=("off",),
    )
    chains = ("ngram", "eagle3", "draft_model", "mtp")
    owned: ClassVar[Mapping[str, str]] = owned(_SAID_BY, _TUNERS)
    spelled: ClassVar[Mapping[str, str]] = {
        **{name: " / ".join(flag.names) for name, flag in FLAGS.items()},
        "speculation": "--spec-type",
        "num_steps": "--spec-draft-n-max; ngram: --spec-ngram-simple-size-m",
        "topk": "1 only",
        "num_draft_tokens": "depth + 1, no flag",
        "draft_head": "--spec-draft-model",
        "draft_model": "--spec-draft-model",
        "ngram_min": "one length, as ngram_max",
        "ngram_max": "--spec-ngram-simple-size-n",
        "context_length": "--ctx-size (times the running requests)",
        "prefix_cache": "off only: it cannot be emptied between blocks",
    }
    info_path = "/props"
    also_read: ClassVar[Mapping[str, str]] = {
        "slots": "/slots",
        "log_speculation": r"failed to initialize speculative|speculative decoding (?:is )?not supported",
    }

    def program(self, args: Mapping[str, Any]) -> Program:
        """See `ServedEngine.program`."""
        advice = "Build it from llama.cpp, or install a package of it"
        return Program("llama_server", command_of(args, "llama-server"), ("--help",), None, advice)

    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `ServedEngine.completed`."""
        complete: dict[str, Any] = {
            "speculation": "none",
            "max_running_requests": 8,
            "context_length": 2048,
            "prefix_cache": "off",
        }
        complete |= {"prefill_tokens": 2048, "flash_attention": "on", **values}
        if complete["speculation"] != "none":
            complete |= {"topk": 1, "num_draft_tokens": complete["num_steps"] + 1}
        if complete["speculation"] == "ngram":
            size = complete.get("ngram_max", complete.get("ngram_min", min(2, complete["num_steps"])))
            complete |= {"ngram_min": complete.get("ngram_min", size), "ngram_max": size}
        return complete

    def own_problems(self, values: Mapping[str, Any]) -> list[str]:
        """See `ServedEngine.own_problems`."""
        drafter = values["speculation"]
        found = []
        head = _HEADS.get(drafter)
        if head and head not in values:
            found.append(f"{head}: is needed with speculation {drafter}: a .gguf file or a hub id")
        theirs = {"ngram": ("ngram_min", "ngram_max"), "eagle3": ("draft_head",), "draft_model": ("draft_model",)}
        for kind, names in theirs.items():
            found += [
                f"{name}: has no meaning with speculation {drafter}"
                for name in names
                if drafter not in ("none", kind) and name in values
            ]
        if drafter == "ngram":
            size = values["ngram_max"]
            if values["ngram_min"] != size:
                found.append(f"ngram_min: llama-server looks up one length; valid: {size}, as ngram_max")
            if values["num_steps"] < size:
                found.append(
                    f"num_steps: llama-server proposes no draft shorter than the {size} tokens that it looks up "
                    f"(ngram_max); valid: from {size}"
                )
        return found

    def told(self, values: Mapping[str, Any]) -> Told:
        """See `ServedEngine.told`."""
        told = Told()
        for name, flag in FLAGS.items():
            if name in values:
                told.argv += flag.write(values[name])
        if "threads" in values:
            told.argv += ["--threads-batch", str(values["threads"])]
        if "kv_cache_dtype" in values:
            told.argv += ["--cache-type-v", str(values["kv_cache_dtype"])]
        # Without --fit off it shrinks what it was not told until it fits, without another word.
        told.argv += ["--ctx-size", str(values["context_length"] * values["max_running_requests"]), "--no-kv-unified"]
        told.argv += ["--fit", "off", "--no-cache-prompt", "--cache-ram", "0", "--metrics", "--slots"]
        drafter = values["speculation"]
        told.argv += ["--spec-type", _TYPES.get(drafter, "none")]
        if drafter == "ngram":
            told.argv += ["--spec-ngram-simple-size-n", str(values["ngram_max"])]
            told.argv += ["--spec-ngram-simple-size-m", str(values["num_steps"]), "--spec-ngram-simple-min-hits", "1"]
        elif drafter != "none":
            told.argv += ["--spec-draft-n-max", str(values["num_steps"]), "--spec-draft-n-min", "0"]
            told.argv += ["--spec-draft-p-min", "0"]
        if head := _HEADS.get(drafter):
            named = str(values[head])
            local = Path(named).expanduser()
            told.argv += ["--spec-draft-model", str(local.resolve())] if local.is_file() else ["--spec-draft-hf", named]
        return told

    def address(self, model: str, served: str, host: str, port: int) -> list[str]:
        """See `ServedEngine.address`."""
        which = ["--model", model] if Path(model).is_file() else ["--hf-repo", model]
        return [*which, "--alias", served, "--host", host, "--port", str(port)]

    def effective(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """From /props and /slots. The depth is told nowhere, and `speculative.types` of /props may say none wrongly."""
        told: dict[str, Any] = {}
        if isinstance(slots := info.get("total_slots"), int):
            told["max_running_requests"] = slots
        general = info.get("default_generation_settings")
        if isinstance(general, Mapping) and isinstance(length := general.get("n_ctx"), int):
            told["context_length"] = length
        states = info.get("slots")
        if isinstance(states, list) and states and all(isinstance(slot, Mapping) for slot in states):
            types = {word for slot in states for word in _types(slot)} - {"none"}
            if not all(slot.get("speculative") for slot in states):
                told["speculation"] = "none"
            elif types:
                told["speculation"] = next((name for name, word in _TYPES.items() if word in types), sorted(types)[0])
        if info.get("log_speculation"):
            told["speculation"] = "none"
        return told

    def check_model(self, model: str) -> str | None:
        """See `Engine.check_model`."""
        path = Path(model).expanduser()
        if model and path.is_file():
            return broken(model) if path.suffix == ".gguf" else f"'{model}' is no .gguf file"
        if HUB_ID.fullmatch(model) and not path.exists():
            return None
        if model and path.is_dir():
            return f"'{model}' is a folder; valid: a .gguf file, such as one in it"
        return f"'{model}' does not exist; valid: a .gguf file, or a hub id of one such as ggml-org/gemma-3-1b-it-GGUF"

    def check_draft(self, named: str) -> str | None:
        """See `ServedEngine.check_draft`."""
        return self.check_model(named)

    def resolved(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> Resolution:
        """See `Installed.resolved`. Without a GPU that it can use, llama-server ignores `gpu_layers` in silence.

        Raises:
            EnvironmentBroken: layers are to be on a GPU, and it lists none.
        """
        if any(record.expected.get("gpu_layers", 0) != 0 for record in records):
            _, heading, devices = installed.ask(self.program(args), "--list-devices").partition("Available devices:")
            if heading and not re.search(r"^\s+\S+: ", devices, re.MULTILINE):
                raise EnvironmentBroken("gpu_layers: this llama-server lists no GPU that it can use")
        return Resolution()


def _types(slot: Mapping[str, Any]) -> list[str]:
    params = slot.get("params")
    return str(params.get("speculative.types", "")).split(",") if isinstance(params, Mapping) else []
