"""What a real SGLang makes of command lines: run, with `-c`, by the interpreter that has SGLang.

Reads a JSON list of argument lists, writes a JSON list: the resolved settings of each, or {"error": ...}. No server is
started, no model loaded, and nothing put on a GPU. With CAPABILITY in the environment (as in 12.0) it answers for such
GPUs, and needs none, nor SGLang's kernels; written for 0.5.23. This file imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import types
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer  # noqa: F401
from transformers.utils.import_utils import is_torchvision_available

is_torchvision_available()  # asked before the stand-in below, and remembered
import transformers.image_processing_utils  # noqa: E402
import transformers.image_utils  # noqa: E402, F401


def stand_in(name: str, **members: Any) -> types.ModuleType:
    """An empty module in the place of one that only images need."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    return module


if importlib.util.find_spec("torchvision") is None:
    Mode = types.SimpleNamespace(BICUBIC=1, BILINEAR=1, NEAREST=1, LANCZOS=1)
    functional = stand_in("torchvision.transforms.functional", InterpolationMode=Mode)
    stand_in("torchvision.transforms.v2", functional=functional)
    transforms = stand_in("torchvision.transforms", InterpolationMode=Mode)
    stand_in("torchvision", transforms=transforms)

import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups import pipeline  # noqa: E402, F401
from sglang.srt.server_args import prepare_server_args  # noqa: E402

MEMORY_MIB = 96_000


def fake_gpu(major: int, minor: int) -> None:
    """Makes SGLang take the machine for one with such GPUs."""
    known = set(runtime_context._PLATFORM_PROBES) | set(runtime_context._PLATFORM_VALUES)
    wanted: dict[str, Any] = {name: True for name in known if "flashinfer" in name}
    wanted |= {"is_cuda": True, "is_cuda_alike": True, "is_cpu": False, "device_capability": (major, minor)}
    wanted |= {"device_sm": 10 * major + minor, "is_sm90": major == 9, "is_hopper_with_cuda_12_3": major == 9}
    wanted |= {"is_sm100": major == 10, "is_sm100_or_sm110": major == 10, "is_sm120": major == 12}
    wanted["is_blackwell"] = major >= 10
    runtime_context.override_platform(**{name: v for name, v in wanted.items() if name in known}).install()
    torch.cuda.get_device_capability = lambda *_, **__: (major, minor)
    torch.cuda.get_device_name = lambda *_, **__: "GPU"


def fake_memory() -> None:
    """Wherever SGLang has taken the function over, memory is what we say."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang") and hasattr(module, "get_device_memory_capacity"):
            module.get_device_memory_capacity = lambda *_, **__: MEMORY_MIB  # type: ignore[attr-defined]


def resolved(argv: list[str]) -> dict[str, Any]:
    """The settings in effect, or what SGLang says against them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = prepare_server_args(argv)
            if "CAPABILITY" in os.environ:
                fake_memory()
            args.resolve_once()
            args.check_server_args()
            return json.loads(json.dumps(args.resolved_dict(), default=str))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers on standard output."""
    real, sys.stdout = sys.stdout, sys.stderr
    if "CAPABILITY" in os.environ:
        major, _, minor = os.environ["CAPABILITY"].partition(".")
        fake_gpu(int(major), int(minor))
    json.dump([resolved(argv) for argv in json.load(sys.stdin)], real)


if __name__ == "__main__":
    main()
