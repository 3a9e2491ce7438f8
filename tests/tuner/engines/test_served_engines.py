"""SGLang, vLLM and llama-server: what they are told, what they refuse, and what they say is in effect."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engines import table
from tuner.engines.allreduce import FACTS
from tuner.engines.base import Resolution, get_engine
from tuner.engines.drafts import MODEL_FACTS, misfit
from tuner.engines.flags import Flag, extra_problems, flag_of, flags_of, json_text
from tuner.engines.installed import interpreter, parse_help, unknown_flags
from tuner.engines.speculation import depths
from tuner.engines.versions import known, nearest
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import LaunchRecord
from tuner.study.engine import not_in_effect

KINDS = ("sglang", "vllm", "llama_server")
MODELS = {"sglang": "Qwen/Qwen3-8B", "vllm": "Qwen/Qwen3-8B", "llama_server": "org/model-GGUF"}
ARGS: dict[str, dict[str, Any]] = {
    "sglang": {"attention_backend": "flashinfer", "page_size": 1, "version": "0.5.23"},
    "vllm": {"attention_backend": "FLASH_ATTN", "version": "0.32.0"},
    "llama_server": {"version": "0.5.0"},
}


def record(kind: str, settings: dict[str, Any], env: dict[str, str | None] | None = None, **args: Any) -> LaunchRecord:
    return get_engine(kind).record(
        model=MODELS[kind],
        args={**ARGS[kind], **args},
        env=env or {},
        settings=settings,
        host="127.0.0.1",
        port=31234,
    )


def problems(kind: str, settings: dict[str, Any], **args: Any) -> str:
    return "; ".join(get_engine(kind).problems({**ARGS[kind], **args}, settings))


def value(launch: LaunchRecord, flag: str) -> str:
    return launch.argv[launch.argv.index(flag) + 1]


class TestVllm:
    def test_the_baseline_is_told_every_limit_and_no_speculation(self) -> None:
        assert record("vllm", {"speculation": "none"}).argv == (
            *("vllm", "serve", "Qwen/Qwen3-8B", "--served-model-name", "Qwen3-8B"),
            *("--host", "127.0.0.1", "--port", "31234", "--max-num-seqs", "128", "--max-num-batched-tokens", "8192"),
            *("--gpu-memory-utilization", "0.9", "--attention-backend", "FLASH_ATTN", "--tensor-parallel-size", "1"),
            *("--enable-prefix-caching", "--no-enforce-eager", "--async-scheduling"),
        )

    def test_a_head_is_one_json_flag_with_every_number(self) -> None:
        launch = record("vllm", {"speculation": "eagle3", "num_steps": 3, "draft_head": "org/head"})
        assert json.loads(value(launch, "--speculative-config")) == {
            "method": "eagle3",
            "model": "org/head",
            "num_speculative_tokens": 3,
            "draft_sample_method": "greedy",
        }
        assert launch.expected["num_draft_tokens"] == 4

    @pytest.mark.parametrize(
        ("settings", "ranges"),
        [
            ({"disable_batch_threshold": 8}, [[1, 8, 3], [9, 128, 0]]),
            ({"steps_by_batch": "1:0,8:3,64:0"}, [[1, 7, 0], [8, 63, 3], [64, 128, 0]]),
            ({"disable_batch_threshold": "never"}, None),
        ],
    )
    def test_a_schedule_is_its_ranges(self, settings: dict, ranges: list | None) -> None:
        launch = record("vllm", {"speculation": "ngram", "num_steps": 3, **settings})
        config = json.loads(value(launch, "--speculative-config"))
        assert config.get("num_speculative_tokens_per_batch_size") == ranges
        assert "--no-async-scheduling" in launch.argv, "ngram is drafted synchronously"

    def test_what_opens_its_account_of_itself_is_for_the_trial_alone(self) -> None:
        launch = record("vllm", {"speculation": "none"})
        assert launch.trial_env == {"VLLM_SERVER_DEV_MODE": "1"}
        assert launch.env == {}
        assert LaunchRecord.from_dict(launch.to_dict()) == launch

    def test_one_all_reduce_path_is_on_and_the_others_are_off(self) -> None:
        launch = record("vllm", {"speculation": "none", "allreduce": "flashinfer_pcie_ipc"}, tp=8)
        assert launch.env["VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"] == "1"
        assert launch.env["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
        assert "--disable-custom-all-reduce" in launch.argv

    @pytest.mark.parametrize("path", [p for p in get_engine("vllm").settings["allreduce"].choices if p != "auto"])
    def test_the_fused_kernels_carry_sums_only_where_they_are_asked_for(self, path: str) -> None:
        launch, engine = record("vllm", {"speculation": "none", "allreduce": path}, tp=8), get_engine("vllm")
        flag = "--compilation-config.pass_config.fuse_allreduce_rms"
        asked = path == "flashinfer_fusion"
        assert (flag not in launch.argv) if asked else value(launch, flag) == "false"
        config = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
        assert (engine.mismatches(launch, {"vllm_config": config}) == []) == asked
        assert flag not in record("vllm", {"speculation": "none"}, tp=8).argv
        old = record("vllm", {"speculation": "none", "allreduce": path}, tp=8, version="0.11.2")
        assert flag not in old.argv, "it had another name there"
        assert set(launch.argv) - set(old.argv) <= {flag, "false"}

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ("--compilation-config", "takes the place of what allreduce says"),
            ('-cc={"mode": 3}', "takes the place of what allreduce says"),
            ("-cc.mode=3", "takes the place of what allreduce says"),
            ("--compilation-config.pass_config.fuse_allreduce_rms=true", "is said by allreduce"),
            ("--compilation_config.mode=3", None),
            ("--max-logprobs=3", None),
        ],
    )
    def test_a_users_own_compilation_is_not_lost_beside_a_path(self, argument: str, says: str | None) -> None:
        args = {**ARGS["vllm"], "tp": 8, "extra": [argument]}
        found = get_engine("vllm").problems(args, {"speculation": "none", "allreduce": "nccl"})
        assert (says is None and found == []) or (says is not None and says in found[0])
        assert get_engine("vllm").problems(args, {"speculation": "none"}) == []

    def test_what_is_in_effect_is_read_from_its_configuration_and_its_log(self) -> None:
        launch = record("vllm", {"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8})
        spec = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        spec["num_speculative_tokens_per_batch_size"] = [[1, 8, 3], [9, 128, 0]]
        config: dict[str, Any] = {
            "speculative_config": spec,
            "scheduler_config": {"max_num_seqs": 128, "async_scheduling": False},
            "cache_config": {"enable_prefix_caching": True},
        }
        engine = get_engine("vllm")
        assert engine.mismatches(launch, {"vllm_config": config}) == []
        assert [
            m.setting for m in engine.mismatches(launch, {"vllm_config": {**config, "speculative_config": None}})
        ] == ["speculation"]
        config["scheduler_config"] = {"max_num_seqs": 64, "async_scheduling": True}
        del spec["num_speculative_tokens_per_batch_size"]  # as it is dropped with several data-parallel ranks
        found = {m.setting: m.effective for m in engine.mismatches(launch, {"vllm_config": config})}
        assert found == {"max_running_requests": 64, "spec_version": "v2", "disable_batch_threshold": None}
        log = {"log_attention": ["INFO Using TRITON_ATTN attention backend out of potential backends: [...]"]}
        assert [m.effective for m in engine.mismatches(launch, log)] == ["TRITON_ATTN"]

    @pytest.mark.parametrize(
        ("path", "line", "in_effect"),
        [
            ("custom", "Using ['CUSTOM', 'PYNCCL'] all-reduce backends (in dispatch order) for group 'tp:0'", True),
            ("custom", "Using ['PYNCCL'] all-reduce backends (in dispatch order) out of ['CUSTOM', 'PYNCCL']", False),
            ("symm_mem", "Using ['NCCL_SYMM_MEM', 'PYNCCL'] all-reduce backends", False),
            ("flashinfer_pcie_ipc", "Using ['PYNCCL'] all-reduce backends", False),
            ("nccl", "Using ['PYNCCL'] all-reduce backends (in dispatch order) out of ['CUSTOM', 'PYNCCL']", True),
            ("nccl_tree", "Using ['FLASHINFER', 'PYNCCL'] all-reduce backends", False),
            ("flashinfer_fusion", "Using ['FLASHINFER', 'PYNCCL'] all-reduce backends", True),
            ("flashinfer_fusion", "Using ['PYNCCL'] all-reduce backends", False),
        ],
    )
    def test_an_all_reduce_path_that_did_not_come_up_is_a_mismatch(self, path: str, line: str, in_effect: bool) -> None:
        launch = record("vllm", {"speculation": "none", "allreduce": path}, tp=4)
        assert (get_engine("vllm").mismatches(launch, {"log_allreduce": [line]}) == []) == in_effect


ENABLED = "FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first reduction)"
BF16_ONLY = "FlashInfer PCIe-IPC all-reduce serves bf16 only; torch.float16 reductions stay on NCCL."


class TestSglang:
    def test_a_tree_is_told_by_all_three_numbers_with_the_kernels_of_both_sides(self) -> None:
        launch = record("sglang", {"speculation": "eagle3", "num_steps": 3, "topk": 4, "draft_head": "org/head"})
        assert launch.argv == (
            *("sglang", "serve", "--model-path", "Qwen/Qwen3-8B", "--served-model-name", "Qwen3-8B"),
            *("--host", "127.0.0.1", "--port", "31234", "--enable-metrics", "--page-size", "1"),
            *("--max-running-requests", "128", "--chunked-prefill-size", "8192", "--mem-fraction-static", "0.85"),
            *("--attention-backend", "flashinfer", "--device", "cuda", "--tp-size", "1"),
            *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
            *("--speculative-num-draft-tokens", "16", "--speculative-draft-model-path", "org/head"),
            *("--speculative-draft-attention-backend", "flashinfer"),
        )

    def test_the_baseline_has_the_same_limits(self) -> None:
        base = record("sglang", {"speculation": "none"})
        chain = record("sglang", {"speculation": "ngram", "num_steps": 3})
        cut = chain.argv.index("--speculative-algorithm")
        assert base.argv == chain.argv[:cut]
        assert value(chain, "--speculative-ngram-max-bfs-breadth") == "1"
        assert value(chain, "--speculative-num-draft-tokens") == "4"

    def test_v1_is_the_scheduler_without_overlap_and_on_older_releases_a_variable_besides(self) -> None:
        settings = {"speculation": "ngram", "num_steps": 2, "spec_version": "v1"}
        new, old = record("sglang", settings), record("sglang", settings, version="0.5.9")
        assert "--disable-overlap-schedule" in new.argv
        assert new.env == {}
        assert old.env == {"SGLANG_ENABLE_SPEC_V2": "0"}

    def test_a_schedule_is_a_file_named_by_what_it_holds(self) -> None:
        settings = {"speculation": "eagle3", "num_steps": 3, "draft_head": "org/head", "disable_batch_threshold": 8}
        launch = record("sglang", settings)
        path = value(launch, "--speculative-adaptive-config")
        assert json.loads(launch.files[path]) == {"1": {"candidate_steps": [3]}, "9": {"candidate_steps": [0]}}
        assert "--speculative-adaptive" in launch.argv
        assert record("sglang", settings) == launch

    def test_a_schedule_that_sglang_switched_off_is_a_mismatch(self) -> None:
        settings = {"speculation": "eagle3", "num_steps": 3, "draft_head": "org/head", "disable_batch_threshold": 8}
        state = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
        state |= {"speculative_num_draft_tokens": 4, "speculative_adaptive": True}
        engine, launch = get_engine("sglang"), record("sglang", settings)
        assert engine.mismatches(launch, {"internal_states": [state]}) == []
        off = engine.mismatches(launch, {"internal_states": [{**state, "speculative_adaptive": False}]})
        assert [m.setting for m in off] == ["disable_batch_threshold"]
        assert (failure := not_in_effect(off)) is not None
        assert failure.kind == "no_op_setting"

    def test_the_internal_state_counts_over_the_configuration_of_the_start(self) -> None:
        launch = record("sglang", {"speculation": "none"})
        info = {"speculative_algorithm": None, "page_size": 1, "max_running_requests": 128}
        assert get_engine("sglang").mismatches(launch, info) == []
        info["internal_states"] = [{"effective_max_running_requests_per_dp": 48, "page_size": 64}]
        found = {m.setting: m.effective for m in get_engine("sglang").mismatches(launch, info)}
        assert found == {"max_running_requests": 48, "page_size": 64}

    @pytest.mark.parametrize(
        ("lines", "in_effect"),
        [
            (["FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first use)"], True),
            (["FlashInfer PCIe-IPC all-reduce skipped: unsupported world size 6"], False),
            ([ENABLED, "FlashInfer PCIe-IPC workspace (max_numel=9) failed: no room; reductions stay on NCCL"], False),
            ([ENABLED, BF16_ONLY], False),
            ([ENABLED, "FlashInfer PCIe-IPC workspace built (world=8, max_numel=9, hidden=3)", BF16_ONLY], True),
            (["Setup FlashInfer PCIe-IPC allreduce failed with no peer."], False),
            ([], False),
        ],
    )
    def test_pcie_ipc_counts_only_when_the_log_says_so(self, lines: list[str], in_effect: bool) -> None:
        launch = record("sglang", {"speculation": "none", "allreduce": "flashinfer_pcie_ipc"}, tp=8)
        assert launch.env["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"
        assert all(re.search(launch.also_read["log_pcie_ipc"], line) for line in lines)
        found = get_engine("sglang").mismatches(launch, {"log_pcie_ipc": lines})
        assert (found == []) == in_effect

    @pytest.mark.parametrize(
        ("path", "line", "in_effect"),
        [
            (
                "custom",
                "CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs.",
                False,
            ),
            ("custom", "Custom allreduce is disabled because your platform lacks GPU P2P capability", False),
            ("custom", "Setup Custom allreduce failed with invalid literal for int(): 'GPU-1'.", False),
            ("custom", "CustomAllReduceV2 is disabled due to an unsupported world size: 6.", True),
            ("custom", "TorchSymmMemCommunicator: World size 3 not supported, communicator is not available.", True),
            (
                "symm_mem",
                "TorchSymmMemCommunicator: torch symmetric memory multicast operations are not supported.",
                False,
            ),
            ("symm_mem", "CustomAllreduce is disabled because this process group spans across nodes.", True),
            ("mscclpp", "PyMscclpp is unavailable because its dependencies failed to import: no mscclpp", False),
            ("mscclpp", "PyMscclpp is disabled due to an unsupported world size: 2.", False),
            ("flashinfer_fusion", "Failed to initialize FlashInfer workspace (backend=trtllm): no peer.", False),
            ("flashinfer_fusion", "FlashInfer AllReduce fusion disabled: the 8 ranks of this group are not", False),
            ("flashinfer_fusion", "FlashInfer AllReduce Fusion enabled and workspace initialized: backend", True),
        ],
    )
    def test_a_path_that_its_log_gives_up_is_a_mismatch(self, path: str, line: str, in_effect: bool) -> None:
        launch = record("sglang", {"speculation": "none", "allreduce": path}, tp=4)
        read = {key: [line] for key, pattern in launch.also_read.items() if re.search(pattern, line)}
        assert (get_engine("sglang").mismatches(launch, read) == []) == in_effect

    @pytest.mark.parametrize(
        ("path", "switch"),
        [
            ("symm_mem", "enable_torch_symm_mem"),
            ("nccl_symm", "enable_symm_mem"),
            ("mscclpp", "enable_mscclpp"),
            ("nvls", "enable_nccl_nvls"),
            ("flashinfer_fusion", "flashinfer_allreduce_fusion_backend"),
        ],
    )
    def test_a_path_whose_switch_sglang_turned_back_is_a_mismatch(self, path: str, switch: str) -> None:
        launch, engine = record("sglang", {"speculation": "none", "allreduce": path}, tp=4), get_engine("sglang")
        for off in (None, False):
            found = engine.mismatches(launch, {switch: off})
            assert [(m.setting, m.requested) for m in found] == [("allreduce", path)]
        assert engine.mismatches(launch, {switch: "auto" if "fusion" in path else True}) == []


class TestLlamaServer:
    def test_everything_that_would_be_fitted_is_told(self) -> None:
        launch = record("llama_server", {"speculation": "ngram", "num_steps": 4, "ngram_max": 3}, threads=2)
        assert launch.argv == (
            *("llama-server", "--hf-repo", "org/model-GGUF", "--alias", "model-GGUF"),
            *("--host", "127.0.0.1", "--port", "31234", "--parallel", "8", "--batch-size", "2048", "--threads", "2"),
            *("--flash-attn", "on", "--threads-batch", "2", "--ctx-size", "16384", "--no-kv-unified", "--fit", "off"),
            *("--no-cache-prompt", "--cache-ram", "0", "--metrics", "--slots", "--spec-type", "ngram-simple"),
            *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"),
            *("--spec-ngram-simple-min-hits", "1"),
        )
        assert launch.flush_path is None

    def test_speculation_that_failed_to_start_is_seen_in_the_slots(self) -> None:
        launch = record("llama_server", {"speculation": "ngram", "num_steps": 4})
        engine = get_engine("llama_server")
        slot = {"speculative": True, "params": {"speculative.types": "none,ngram-simple"}}
        info = {
            "total_slots": 8,
            "default_generation_settings": {"n_ctx": 2048},
            "slots": [slot, {"speculative": True}],
        }
        assert engine.mismatches(launch, info) == []
        off = engine.mismatches(launch, {**info, "slots": [{"speculative": False}] * 8})
        assert (failure := not_in_effect(off)) is not None
        assert failure.kind == "spec_inactive"
        assert [m.setting for m in engine.mismatches(launch, {**info, "total_slots": 4})] == ["max_running_requests"]


@pytest.mark.parametrize(
    ("kind", "settings", "args", "said"),
    [
        ("vllm", {"speculation": "eagle3", "num_steps": 3}, {}, "draft_head: is needed"),
        ("vllm", {"speculation": "ngram", "num_steps": 3, "topk": 4}, {}, "topk: 4 is not valid"),
        ("vllm", {"speculation": "ngram", "num_steps": 3, "spec_version": "v2"}, {}, "drafts ngram synchronously"),
        ("vllm", {"speculation": "none", "allreduce": "flashinfer_pcie_ipc"}, {"tp": 6}, "2, 4 or 8 GPUs"),
        ("vllm", {"speculation": "none", "allreduce": "custom"}, {}, "one GPU"),
        ("vllm", {"speculation": "none", "prefill_tokens": 64}, {}, "fewer than max_running_requests"),
        ("vllm", {"speculation": "none", "allreduce": "mscclpp"}, {"tp": 8}, "allreduce: 'mscclpp' is not valid"),
        (
            "sglang",
            {"speculation": "none"},
            {"attention_backend": "triton", "page_sise": 1},
            "did you mean 'page_size'",
        ),
        (
            "sglang",
            {"speculation": "eagle3", "num_steps": 3, "topk": 4, "draft_head": "o/h"},
            {"attention_backend": "trtllm_mha", "page_size": 64},
            "chains only",
        ),
        (
            "sglang",
            {"speculation": "eagle3", "num_steps": 3, "topk": 4, "draft_head": "o/h"},
            {"attention_backend": "fa4", "page_size": 16},
            "flashinfer, fa3 or triton only",
        ),
        ("sglang", {"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": 8}, {}, "eagle3 and mtp only"),
        ("sglang", {"speculation": "ngram", "num_steps": 3, "acceptance": "rejection"}, {}, "eagle3 and mtp only"),
        ("sglang", {"speculation": "ngram", "num_steps": 3, "ngram_max": 4}, {}, "ngram_max: is unknown"),
        ("llama_server", {"speculation": "ngram", "num_steps": 2, "ngram_max": 4}, {}, "no draft shorter than the 4"),
        ("llama_server", {"speculation": "ngram", "num_steps": 4, "ngram_max": 3, "ngram_min": 2}, {}, "one length"),
        ("llama_server", {"speculation": "none", "prefix_cache": "on"}, {}, "prefix_cache: 'on' is not valid"),
        (
            "llama_server",
            {"speculation": "none"},
            {"extra": ["-np", "4"]},
            "extra: -np is said by engine.args.max_running",
        ),
        (
            "vllm",
            {"speculation": "none"},
            {"extra": ["--speculative_config.method=ngram"]},
            "extra: --speculative_config",
        ),
        ("sglang", {"speculation": "none"}, {"extra": ["--speculative-algo", "NGRAM"]}, "engine.args.speculation"),
        ("sglang", {"speculation": "none"}, {"extra": "--x"}, "must be a list"),
        ("vllm", {"speculation": "none"}, {"extra": ["--max-num-seqs 64"]}, "is one argument with a space in it"),
        ("vllm", {"speculation": "none"}, {"extra": ["other-model", "--x"]}, "'other-model' stands behind no flag"),
        ("vllm", {"speculation": "none"}, {"extra": ["--ssl-keyfile=k"]}, "the tuner itself; leave it out"),
        ("sglang", {"speculation": "none"}, {"extra": ["--ssl_keyfile", "k"]}, "the tuner itself; leave it out"),
        ("llama_server", {"speculation": "none"}, {"extra": ["--api-prefix", "/x"]}, "the tuner itself; leave it out"),
        ("sglang", {"speculation": "none", "program": "x"}, {}, "program: is unknown"),
        ("sglang", {"speculation": "none"}, {"progam": "x"}, "did you mean 'program'?"),
        ("sglang", {"speculation": "none"}, {"flash_attention": "on"}, "flash_attention: is unknown. Valid: "),
    ],
)
def test_what_cannot_work_is_said_with_the_setting_to_blame(kind: str, settings: dict, args: dict, said: str) -> None:
    assert said in problems(kind, settings, **args)
    with pytest.raises(UsageError):
        record(kind, settings, **args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"version": 0.32}, "version: 0.32 is not text"),
        ({"version": ["0.32"]}, "is not text"),
        ({"program": 5}, "program: 5 is not valid"),
        ({"program": {"path": "x"}}, "program: "),
        ({"program": ["x", None]}, "program: "),
        ({"program": ""}, "program: is empty"),
        ({"extra": ["--x", None]}, "None is no argument"),
        ({"extra": ["--x", True]}, "True is no argument"),
        ({"extra": ["--x", {"a": 1}]}, "is no argument"),
        ({"extra": ["--x", "a\0b"]}, "is no argument"),
    ],
)
def test_words_of_the_engine_that_are_no_words_are_problems(kind: str, args: dict, said: str) -> None:
    assert said in problems(kind, {"speculation": "none"}, **args)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_variable_that_is_tried_and_set_by_a_path_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="NCCL_ALGO"):
        record(kind, {"speculation": "none", "allreduce": "nccl_ring"}, {"NCCL_ALGO": "allreduce:tree"}, tp=4)
    unset = record(kind, {"speculation": "none"}, {"NCCL_PROTO": None}, tp=4)
    assert unset.env["NCCL_PROTO"] is None, "removed, which is not 0"


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sglang": [
        {"speculation": "none", "cuda_graphs": False, "prefix_cache": "off"},
        {"speculation": "eagle3", "num_steps": 3, "draft_head": "o/h", "acceptance": "rejection"},
        {"speculation": "eagle3", "num_steps": 3, "draft_head": "o/h", "steps_by_batch": "1:3,8:0"},
        {"speculation": "mtp", "num_steps": 3, "policy": "adaptive", "spec_version": "v1", "mixed_chunk": True},
        {"speculation": "draft_model", "num_steps": 3, "draft_model": "o/d", "cuda_graph_max_batch": 8},
        {"speculation": "ngram", "num_steps": 3, "topk": 2},
        *(
            {"speculation": "none", "tp": 8, "allreduce": p}
            for p in ("nccl", "custom", "flashinfer_fusion", "flashinfer_pcie_ipc")
        ),
        *({"speculation": "none", "tp": 8, "allreduce": p} for p in ("symm_mem", "nccl_symm", "mscclpp", "nvls")),
    ],
    "vllm": [
        {"speculation": "none", "cuda_graphs": False, "prefix_cache": "off", "seed": 1, "page_size": 16},
        {"speculation": "eagle3", "num_steps": 3, "draft_head": "o/h", "spec_version": "v1"},
        {"speculation": "none", "tp": 8, "allreduce": "custom", "quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"speculation": "none", "tp": 8, "allreduce": "nccl", "context_length": 4096, "dtype": "bfloat16"},
    ],
    "llama_server": [
        {"speculation": "none", "gpu_layers": "all", "kv_cache_dtype": "q8_0", "seed": 1, "threads": 2},
        {"speculation": "draft_model", "num_steps": 3, "draft_model": "o/d"},
        {"speculation": "eagle3", "num_steps": 3, "draft_head": "o/h"},
        {"speculation": "ngram", "num_steps": 3},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_that_is_ever_written_is_one_of_the_known_version(kind: str) -> None:
    (data,) = known(kind).values()
    for settings in SETTINGS[kind]:
        launch = record(kind, settings)
        assert unknown_flags(launch.argv, data.flags, kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_that_is_written_is_owned_so_that_extra_cannot_repeat_it(kind: str) -> None:
    engine = get_engine(kind)
    for settings in SETTINGS[kind]:
        for flag in flags_of(record(kind, settings).argv):
            owned = extra_problems([flag], engine.owned)  # type: ignore[attr-defined]
            assert owned or engine.problems({**ARGS[kind], "extra": [flag]}, settings), flag


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_has_a_source_and_blames_a_setting(kind: str) -> None:
    for data in known(kind).values():
        assert data.source
        for rule in data.rules:
            assert rule.source
            assert {rule.setting, *rule.when} <= {*get_engine(kind).settings, *FACTS, *MODEL_FACTS}
            assert rule.setting in rule.when


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "1.0", "0.4.1", None, "unknown"])
def test_an_unknown_version_works_from_the_nearest_and_says_so(version: str | None) -> None:
    data, note = nearest("sglang", version)
    assert data.version == "0.5.23"
    assert note
    assert nearest("vllm", "0.32.0+cpu")[1] is None
    assert nearest("vllm", "0.32")[1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_not_here_says_what_to_do(kind: str) -> None:
    with pytest.raises(EnvironmentBroken, match=r"engine\.args\.program"):
        get_engine(kind).version({"program": "no-such-program-here"})  # type: ignore[call-arg]


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A llama-server of a later version, in which one flag has another name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (data,) = known("llama_server").values()
    flags = "\n".join(f"{flag} N    text, formerly --parallel" for flag in data.flags if flag != "--parallel")
    (tmp_path / "help").write_text(f"{flags}\n--parallels N   slots\n--old N   the argument has been removed\n")
    return script(
        tmp_path / "llama-server",
        f'#!/bin/sh\n[ "$1" = --version ] && echo "version: 0.9.1 (build 7, commit abc123)" && exit\n'
        f"echo asked >> {tmp_path}/asked\ncat {tmp_path}/help\n",
    )


def test_a_renamed_flag_is_found_before_a_launch_with_the_nearest_and_asked_for_once(
    renamed: str, tmp_path: Path
) -> None:
    engine = get_engine("llama_server")
    args = {"program": renamed, "extra": ["--old", "3"]}
    launch = engine.record(model="o/m", args=args, env={}, settings={"speculation": "none"}, host="::1", port=1)
    assert launch.engine_version == "0.9.1+abc123"
    for _ in range(2):
        found = engine.refused(args, [launch])  # type: ignore[attr-defined]
        assert found[0] == "--parallel: llama_server 0.9.1+abc123 does not know it; did you mean '--parallels'?"
        assert found[1].startswith("extra: --old: ")
    assert (tmp_path / "asked").read_text() == "asked\n"
    assert "nearest" in engine.notes(args)[0]  # type: ignore[attr-defined]


def test_a_broken_engine_is_told_from_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = script(
        tmp_path / "llama-server", "#!/bin/sh\necho 'error while loading shared libraries: libx.so' >&2\nexit 127\n"
    )
    with pytest.raises(EnvironmentBroken, match="libx"):
        get_engine("llama_server").version({"program": broken})  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_engine_is_asked_once_however_many_candidates_ask(kind: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    args = {**ARGS[kind], "program": script(tmp_path / "x", f"#!/bin/sh\necho asked >> {asked}\n")}
    del args["version"]
    first = ""
    for _ in range(3):
        assert get_engine(kind).problems(args, {"speculation": "none"}) == []
        with pytest.raises(EnvironmentBroken):
            get_engine(kind).version(args)  # type: ignore[call-arg]
        first = first or asked.read_text()
    assert asked.read_text() == first
    assert first.count("asked\n") == (2 if kind == "sglang" else 1), "SGLang has another word for it"


def test_the_interpreter_of_a_program_is_found_where_its_path_is_too_long_for_the_first_line(tmp_path: Path) -> None:
    long = script(tmp_path / "vllm", "#!/bin/sh\n'''exec' \"/a place/bin/python\" \"$0\" \"$@\"\n' '''\nimport sys\n")
    assert interpreter(Path(long)) == ["/a place/bin/python"]
    assert interpreter(Path(script(tmp_path / "plain", "#!/opt/x/bin/python3 -sE\n"))) == ["/opt/x/bin/python3"]
    other = script(tmp_path / "other", "#!/bin/sh\nexec other\n")
    assert interpreter(Path(other)) is None
    assert interpreter(Path(script(tmp_path / "env", "#!/usr/bin/env -S A=1 python3 -u\n"))) == ["python3"]
    assert interpreter(Path(sys.executable)) == [sys.executable], "as in [python, -m, vllm]"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("0.32.0", "0.32.0"),
        ("KIND 0.5.23+cu130", "0.5.23+cu130"),
        ("KIND version: v0.6.1rc1", "0.6.1rc1"),
        ("loaded CUDA 12.9\n0.32.0", "0.32.0"),
        ("loaded CUDA 12.9", None),
        ("", None),
    ],
)
def test_a_script_around_an_engine_is_asked_for_the_version_of_what_it_starts(
    kind: str, says: str, version: str | None, tmp_path: Path
) -> None:
    said = says.replace("KIND", kind)
    args = {"program": script(tmp_path / "serve", f"#!/bin/bash\n[ $1 = --version ] && printf '{said}\n'\n")}
    engine: Any = get_engine(kind)
    if version is not None:
        assert engine.version(args) == version
        return
    with pytest.raises(
        EnvironmentBroken, match=r'must pass its arguments on \(exec \w+ "\$@"\), or engine.args.version'
    ):
        engine.version(args)
    assert engine.version({**args, "version": "0.1"}) == "0.1"


def test_a_script_around_sglang_is_asked_in_the_words_that_sglang_has(tmp_path: Path) -> None:
    text = '#!/bin/bash\n[ "$1" = version ] || exit 2\necho sglang version: 0.5.23\necho git revision: 1234567\n'
    engine: Any = get_engine("sglang")
    assert engine.version({"program": script(tmp_path / "serve", text)}) == "0.5.23"


def test_a_script_that_passes_nothing_on_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.engines.installed._VERSION_TIMEOUT_S", 1.0)
    child = tmp_path / "child"
    program = script(tmp_path / "serve", f"#!/bin/bash\nsleep 60 & echo $! > {child}\nwait\n")
    with pytest.raises(EnvironmentBroken, match="did not answer in 1 s") as caught:
        get_engine("vllm").version({"program": program})  # type: ignore[call-arg]
    assert "must pass its arguments on" in str(caught.value)
    # A killed process may still be dying for a moment.
    until = time.monotonic() + 10
    while running(int(child.read_text())):
        assert time.monotonic() < until, "what the script started runs on"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record("llama_server", {"speculation": "none"}, program="~/x").argv[0] == f"{tmp_path}/x"
    assert record("llama_server", {"speculation": "none"}, program=["~/x", "serve"]).argv[0] == f"{tmp_path}/x"


def test_a_command_line_in_place_of_a_program_is_said_to_be_a_list() -> None:
    with pytest.raises(EnvironmentBroken, match=r"is a list, \[no-such-python, -m, vllm\]"):
        get_engine("vllm").version({"program": "no-such-python -m vllm"})  # type: ignore[call-arg]


@pytest.mark.parametrize("layers", ["all", 12, 0, None])
@pytest.mark.parametrize("listed", ["  (none)", "  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)", ""])
def test_layers_for_a_gpu_that_llama_server_does_not_list_are_missing_hardware(
    layers: Any, listed: str, tmp_path: Path
) -> None:
    program = script(tmp_path / "llama-server", f"#!/bin/sh\necho 'Available devices:'\necho '{listed}'\n")
    args = {"program": program}
    launch = record("llama_server", {"speculation": "none", **({"gpu_layers": layers} if layers is not None else {})})
    if layers and "CUDA" not in listed:
        with pytest.raises(EnvironmentBroken, match="gpu_layers"):
            get_engine("llama_server").resolved(args, [launch])  # type: ignore[attr-defined]
    else:
        assert get_engine("llama_server").resolved(args, [launch]) == Resolution()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_not_there_is_told_from_one_that_is(kind: str, tmp_path: Path) -> None:
    engine: Any = get_engine(kind)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    good, bad = tmp_path / "head", tmp_path / "head.gguf"
    good, bad = (bad, good) if kind == "llama_server" else (good, bad)
    assert engine.check_draft(str(good)) is None
    assert engine.check_draft("org/head") is None
    assert "valid: " in engine.check_draft(str(bad))
    assert "does not exist" in engine.check_draft(str(tmp_path / "nothing"))


def test_a_draft_is_held_against_the_language_model_of_one_that_also_sees(tmp_path: Path) -> None:
    for name, config in {"t": {"text_config": {"vocab_size": 99}}, "d": {"vocab_size": 7}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert "7 tokens" in str(misfit(str(tmp_path / "t"), str(tmp_path / "d"), "draft_model"))


def test_help_is_read_by_the_heads_of_its_entries_alone() -> None:
    text = (
        "usage: x [--inner A]\n"
        "  --alpha-beta, --no-alpha-beta\n"
        "                        Says --gamma is better.\n"
        "-c,    --ctx-size N      context (see --delta)\n"
        "--draft, --draft-max N   the argument has been removed. use --spec-n\n"
    )
    assert parse_help(text) == {"--alpha-beta", "--no-alpha-beta", "-c", "--ctx-size"}


names = st.from_regex(r"--[a-z]{2,6}(-[a-z]{1,5}){0,2}", fullmatch=True)


class TestFlags:
    @given(names, st.sampled_from([None, True, False]), st.booleans())
    def test_a_switch_is_unset_on_or_off_and_never_a_word_behind_the_flag(
        self, name: str, state: bool | None, two_sided: bool
    ) -> None:
        flag = Flag(name, "--no-" + name[2:] if two_sided else None)
        said = [] if state is None else flag.write(state)
        assert said == {None: [], True: [name], False: [flag.off] if two_sided else []}[state]

    @given(st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text()), max_size=5))
    def test_json_comes_out_as_it_went_in_and_is_one_text_whatever_the_order(self, value: dict) -> None:
        assert json.loads(json_text(value)) == value
        assert json_text(dict(reversed(list(value.items())))) == json_text(value)

    @given(
        names, st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.sampled_from(["={}", ".key={}", ""])
    )
    def test_a_flag_is_the_same_in_every_spelling(self, name: str, value: str, form: str) -> None:
        assert flag_of(name + form.format(value)) == name
        assert flag_of("--" + name[2:].replace("-", "_") + form.format(value)) == name

    @given(st.one_of(st.integers().map(str), st.floats(allow_nan=False, allow_infinity=False).map(str)))
    def test_a_negative_number_is_no_flag(self, text: str) -> None:
        assert flag_of(text) is None

    @given(st.lists(names, unique=True, min_size=1, max_size=5), st.data())
    def test_an_extra_argument_that_repeats_an_owned_one_is_always_found(self, owned: list[str], data: Any) -> None:
        flag = data.draw(st.sampled_from(owned))
        said = data.draw(st.sampled_from([flag, flag + "=1", "--" + flag[2:].replace("-", "_")]))
        assert extra_problems(["--zz", "value", said], dict.fromkeys(owned, "engine.args.x"))
        assert extra_problems(["--zz-other", "1"], dict.fromkeys(owned, "engine.args.x")) == [] or "--zz-other" in owned


@given(st.integers(1, 64), st.integers(1, 8))
def test_both_words_for_a_schedule_give_the_same_depths(threshold: int, steps: int) -> None:
    short = depths({"num_steps": steps, "disable_batch_threshold": threshold})
    assert short == depths({"num_steps": steps, "steps_by_batch": f"1:{steps},{threshold + 1}:0"})


def test_the_page_holds_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert table.table() in page
