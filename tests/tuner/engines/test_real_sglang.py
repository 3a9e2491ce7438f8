"""Against the argument parser and the resolution of a real SGLang 0.5.23; skipped where there is none.

Set SGLANG_PATH to the folders (joined as in PYTHONPATH) of the unpacked package and of what it imports. No GPU needed:

    pip download --no-deps sglang==0.5.23, unpack the wheel, and pip install --target what it asks for
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.engines.test_served_engines import ARGS, SETTINGS
from tuner.engines.base import get_engine
from tuner.engines.sglang_resolution import SCRIPT
from tuner.launch.server import write_files
from tuner.records import LaunchRecord

pytestmark = pytest.mark.skipif("SGLANG_PATH" not in os.environ, reason="SGLANG_PATH names no SGLang")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, architecture in (("model", "LlamaForCausalLM"), ("head", "LlamaForCausalLMEagle3")):
        found[name] = str(tmp_path_factory.mktemp(name))
        config = {**CONFIG, "architectures": [architecture]}
        (Path(found[name]) / "config.json").write_text(json.dumps(config))
    return found


def resolve(argvs: list[list[str]], capability: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.read_text()],
        input=json.dumps(argvs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.environ["SGLANG_PATH"], "CAPABILITY": capability, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def record(settings: dict[str, Any], folders: dict[str, str], **args: Any) -> LaunchRecord:
    heads = {name: folders["head"] for name in ("draft_head", "draft_model") if name in settings}
    launch = get_engine("sglang").record(
        model=folders["model"],
        args={**ARGS["sglang"], **args},
        env={},
        settings={**settings, **heads},
        host="127.0.0.1",
        port=31234,
    )
    write_files(launch)
    return launch


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.0"])
def test_all_that_is_asked_for_is_what_sglang_resolves(capability: str, folders: dict[str, str]) -> None:
    tree = {"speculation": "eagle3", "num_steps": 3, "topk": 4, "num_draft_tokens": 8, "draft_head": "x"}
    launches = [record(settings, folders) for settings in [*SETTINGS["sglang"], tree]]
    answers = resolve([list(launch.argv[2:]) for launch in launches], capability)
    for launch, answer in zip(launches, answers, strict=True):
        assert "error" not in answer, (answer, launch.argv)
        assert get_engine("sglang").mismatches(launch, answer) == []


REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"topk": 4}, {"attention_backend": "trtllm_mha", "page_size": 64}),
    ({"topk": 4}, {"attention_backend": "fa4", "page_size": 16}),
    ({}, {"attention_backend": "flex_attention"}),
    ({}, {"attention_backend": "trtllm_mha", "page_size": 1}),
    ({"speculation": "ngram", "topk": 2}, {"attention_backend": "triton", "page_size": 16}),
    ({"speculation": "draft_model", "acceptance": "rejection", "draft_model": "x"}, {}),
    ({"speculation": "ngram", "mixed_chunk": True}, {}),
    ({"speculation": "ngram", "disable_batch_threshold": 8}, {}),
    ({"topk": 4, "disable_batch_threshold": 8}, {}),
]


@pytest.mark.timeout(600)
def test_what_our_rules_refuse_sglang_refuses_or_rewrites(folders: dict[str, str]) -> None:
    """Each rule is right: without it, the candidate would be refused at its launch, or measured as another."""
    engine = get_engine("sglang")
    launches = []
    for changed, args in REFUSED:
        settings: dict[str, Any] = {"speculation": "eagle3", "num_steps": 3, **changed}
        head = {"eagle3": "draft_head", "draft_model": "draft_model"}.get(settings["speculation"])
        if head:
            settings[head] = folders["head"]
        values = {**ARGS["sglang"], **args}
        assert engine.problems(values, settings), (changed, args)
        complete = engine.completed({**{n: v for n, v in values.items() if n != "version"}, **settings})  # type: ignore[attr-defined]
        told = engine.told(complete)  # type: ignore[attr-defined]
        base = record({"speculation": "none"}, folders)
        argv = (*base.argv[: base.argv.index("--enable-metrics")], *told.argv)
        launch = LaunchRecord(
            **{**base.to_dict(), "argv": argv, "expected": complete, "settings": settings, "files": told.files}
        )
        write_files(launch)
        launches.append(launch)
    answers = resolve([list(launch.argv[2:]) for launch in launches], "10.0")
    for launch, answer, (changed, args) in zip(launches, answers, REFUSED, strict=True):
        assert "error" in answer or engine.mismatches(launch, answer), (changed, args)


@pytest.mark.timeout(600)
def test_a_flag_that_sglang_does_not_know_is_refused_by_its_parser(folders: dict[str, str]) -> None:
    argv = [*record({"speculation": "none"}, folders).argv[2:], "--num-stepz", "3"]
    (answer,) = resolve([argv], "12.0")
    assert "unrecognized arguments: --num-stepz" in answer["error"]
