"""The bundled engine, started as `python -m engine serve`. It is never imported here: it is one more server."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.engines.allreduce import BUNDLED, Fabric
from tuner.engines.base import (
    Change,
    Mismatch,
    SettingSpec,
    compare,
    duplicates,
    env_problems,
    unknown_names,
    value_problems,
)
from tuner.engines.drafts import broken
from tuner.engines.speculation import draft_tokens, shape_problems
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import LaunchRecord, Setting

_MODELS = ("smollm2-135m",)

_ALLREDUCE = (
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
_POLICIES = ("fixed", "adaptive")
_CHAINS = ("ngram", "draft_model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SPECULATION = {
    "speculation": SettingSpec("str", "the drafter", choices=("none", "ngram", "eagle3", "draft_model", "hybrid")),
    "num_steps": SettingSpec("int", "draft depth per round", low=1, high=8),
    "topk": SettingSpec("int", "branches per node; 1 is a chain", low=1, high=8),
    "num_draft_tokens": SettingSpec("int", "rows verified per request and round, root included", low=2, high=64),
    "spec_version": SettingSpec("str", "v1: synchronous, v2: overlap scheduling", choices=("v1", "v2")),
    "disable_batch_threshold": SettingSpec(
        "int", "speculate at up to this many running requests", low=1, words=("never",)
    ),
    "steps_by_batch": SettingSpec("str", "draft depth by running requests, as in 1:0,8:3,64:0"),
    "policy": SettingSpec("str", "adaptive: go below these depths where acceptance says so", choices=_POLICIES),
    "acceptance": SettingSpec("str", "of drafts at a temperature above 0", choices=("target", "rejection")),
    "draft_head": SettingSpec("str", "file of the eagle3 drafter's head; default: the one that ships"),
    "draft_model": SettingSpec("str", "model of the draft_model drafter"),
    "hybrid": SettingSpec("str", "the two drafters that hybrid composes, as in ngram,eagle3"),
    "hybrid_steps": SettingSpec("int", "draft depth of hybrid's second drafter; default: num_steps", low=1, high=8),
    "ngram_min": SettingSpec("int", "shortest suffix looked up by the ngram drafter", low=1),
    "ngram_max": SettingSpec("int", "longest suffix looked up by the ngram drafter", low=1),
}
_ENGINE = {
    "dtype": SettingSpec("str", "of weights and activations", choices=("auto", "bfloat16", "float32")),
    "weights": SettingSpec("str", "of the linear layers", choices=("auto", "bf16", "int8", "int4")),
    "context_length": SettingSpec("int", "longest prompt + output, in tokens", low=1),
    "kv_tokens": SettingSpec("int", "size of the KV pool, in tokens", low=1),
    "page_size": SettingSpec("int", "tokens per KV page", low=1),
    "max_running_requests": SettingSpec("int", "requests decoded together; more wait", low=1),
    "max_waiting_requests": SettingSpec("int", "requests that wait, at most; more are refused", low=1),
    "prefill_tokens": SettingSpec("int", "prompt tokens run per step, at most", low=1),
    "threads": SettingSpec("int", "threads of the model process", low=1),
    "prefix_cache": SettingSpec("str", "requests that begin alike share what was computed", choices=("on", "off")),
    "seed": SettingSpec("int", "from which requests without a seed get theirs", low=0),
    "device": SettingSpec("str", "what computes", choices=("cpu", "gpu")),
    "cuda_graphs": SettingSpec("bool", "decode steps are captured, or the server does not start"),
    "tp": SettingSpec("int", "tensor parallel size: ranks that share each layer", low=1, high=64),
    "allreduce": SettingSpec("str", "how the ranks exchange what they computed", choices=_ALLREDUCE),
    "collective_timeout_s": SettingSpec("float", "a rank silent for so long takes the server down", low=0.1, high=3600),
}


HOT = (
    *("speculation", "num_steps", "topk", "num_draft_tokens", "spec_version"),
    *("disable_batch_threshold", "steps_by_batch", "policy", "acceptance", "hybrid_steps"),
)


class BundledEngine:
    """`engine/` of this distribution, on the interpreter that runs the tuner."""

    kind = "bundled"
    settings: Mapping[str, SettingSpec] = {**_SPECULATION, **_ENGINE}
    hot = frozenset(HOT)
    fabric: Fabric | None = None

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """See `Engine.problems`."""
        return self._problems(args, settings, self.fabric)

    def _problems(
        self, args: Mapping[str, Any], settings: Mapping[str, Setting], fabric: Fabric | None = None
    ) -> list[str]:
        values = {**args, **settings}
        found = duplicates(args, settings) + unknown_names(values, self.settings, self.kind)
        found += value_problems(values, self.settings)
        if not found and values.get("allreduce", "auto") != "auto" and values.get("tp", 1) == 1:
            found.append("allreduce: has no meaning with one rank (tp 1); valid: auto")
        if not found and fabric is not None:
            known = {**values, **fabric.facts(values.get("tp", 1))}
            found = [f"{rule.setting}: {rule.says}" for rule in BUNDLED if rule.holds(known)]
        # What no running server can be changed in, and all share, is there for when it does speculate.
        idle = [name for name in _SPECULATION if name in self.hot or name not in args]
        return found or shape_problems(values, _CHAINS, tuple(idle))

    def record(
        self,
        *,
        model: str,
        args: Mapping[str, Any],
        env: Mapping[str, str | None],
        settings: Mapping[str, Setting],
        host: str,
        port: int,
    ) -> LaunchRecord:
        """See `Engine.record`."""
        found = self._problems(args, settings) + env_problems(env)
        if problem := self.check_model(model):
            found.append(f"model: {problem}")
        if found:
            raise UsageError("; ".join(found))
        values = _complete({**args, **settings})
        path, served = _located(model)
        argv = [sys.executable, "-m", "engine", "serve", "--model", path, "--served-model-name", served]
        argv += ["--host", host, "--port", str(port)]
        for name in self.settings:
            if name in values:
                argv += ["--" + name.replace("_", "-"), str(_told(name, values[name]))]
        return LaunchRecord(
            engine=self.kind,
            engine_version=self.version(),
            model=model,
            argv=tuple(argv),
            env=dict(env),
            host=host,
            port=port,
            settings=dict(settings),
            expected={name: _told(name, value) for name, value in values.items() if value != "auto"},
            served_model=served,
            flush_path="/flush_cache",
        )

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        """See `Engine.mismatches`. This engine reports every setting: silence about one is a mismatch.

        A KV pool that was rounded up to whole pages is what was asked for.
        """
        effective = server_info.get("effective")
        page = effective.get("page_size") if isinstance(effective, Mapping) else None

        def rounded_up(m: Mismatch) -> bool:
            whole = isinstance(m.effective, int) and isinstance(page, int)
            return m.setting == "kv_tokens" and whole and 0 <= m.effective - m.requested < page

        return [m for m in compare(record.expected, server_info, all_told=True) if not rounded_up(m)]

    def change(self, record: LaunchRecord) -> Change:
        """See `Reconfigurable.change`."""
        return Change("/reconfigure", hot_settings(record.expected))

    def version(self) -> str:
        """The distribution's version and a hash of the engine's source, which an editable install may change.

        Raises:
            EnvironmentBroken: the engine is not installed.
        """
        return _version()

    def check_model(self, model: str) -> str | None:
        """See `Engine.check_model`."""
        valid = f"valid: {', '.join(_MODELS)}, a .gguf file, a Hugging Face folder (with config.json), or a hub id"
        path = Path(model).expanduser()
        if model in _MODELS:
            return None
        if path.is_dir() and not (path / "config.json").is_file():
            return f"the folder '{model}' has no config.json; {valid}"
        if path.is_dir() or path.is_file():
            return broken(model)
        if _HUB_ID.fullmatch(model):  # whether the hub has it is found out when it is fetched
            return None
        close = difflib.get_close_matches(model.lower(), _MODELS, n=1, cutoff=0.5)
        return f"'{model}' does not exist{f'; did you mean {close[0]!r}?' if close else ''}; {valid}"


def _told(name: str, value: Any) -> Any:
    """A setting's value as this engine calls it."""
    if name == "device":
        return {"gpu": "cuda"}.get(value, value)
    if name == "cuda_graphs":
        return "required" if value else "off"
    return value


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """With what the engine would derive, told explicitly: a default may change, a launch record must not."""
    values.setdefault("speculation", "none")
    if values["speculation"] != "none":
        values.setdefault("topk", 1)
        values.setdefault("spec_version", "v1")
        values.setdefault("num_draft_tokens", draft_tokens(values["num_steps"], values["topk"]))
        if "steps_by_batch" not in values:
            values.setdefault("disable_batch_threshold", "never")
    return values


_DEFAULTS = {
    "spec_version": "v1",
    "disable_batch_threshold": "never",
    "steps_by_batch": None,
    "policy": "fixed",
    "acceptance": "target",
    "hybrid_steps": None,
}


def hot_settings(expected: Mapping[str, Any]) -> dict[str, Any]:
    """Every hot setting as a launch with these has it. Without speculation there is no shape to a draft."""
    told = {"speculation": "none", **_DEFAULTS, **{name: expected[name] for name in HOT if name in expected}}
    if told["speculation"] == "none":
        return {name: value for name, value in told.items() if name not in ("num_steps", "topk", "num_draft_tokens")}
    return told


def _located(model: str) -> tuple[str, str]:
    """A model as the command line gets it (paths absolute: an export runs elsewhere), and as clients call it."""
    if model in _MODELS:
        return model, model
    path = Path(model).expanduser().resolve()
    if not path.exists():
        return model, model.rpartition("/")[2]
    return str(path), path.stem if path.is_file() else path.name


@lru_cache
def _version() -> str:
    spec = importlib.util.find_spec("engine")
    if spec is None or spec.origin is None:
        raise EnvironmentBroken("the bundled engine is not installed; install the distribution that holds `engine`")
    root = Path(spec.origin).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cpp", ".hpp"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        number = importlib.metadata.version("spec-tuner")
    except importlib.metadata.PackageNotFoundError:
        number = "0"
    return f"{number}+{digest.hexdigest()[:8]}"
