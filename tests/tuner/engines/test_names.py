"""Words of an engine's command line in a space file: what they are called there is said, whichever engine has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engines.base import SettingSpec, get_engine
from tuner.engines.names import foreign, meant
from tuner.space import SpaceProblems
from tuner.study.session import read_space


@pytest.mark.parametrize(
    ("kind", "word", "says"),
    [
        ("sglang", "max_num_seqs", "'max_num_seqs' is a word of vllm; here it is 'max_running_requests'"),
        ("sglang", "tensor-parallel-size", "'tensor-parallel-size' is a word of sglang; here it is 'tp'"),
        ("sglang", "num_speculative_tokens", "is a word of vllm; here it is 'num_steps'"),
        ("vllm", "mem_fraction_static", "is a word of sglang; here it is 'memory_fraction'"),
        ("vllm", "speculative_eagle_topk", "is a word of sglang; here it is 'topk'"),
        ("vllm", "enable_torch_symm_mem", "is a word of sglang; here it is 'allreduce'"),
        ("bundled", "max_num_batched_tokens", "is a word of vllm; here it is 'prefill_tokens'"),
        ("llama_server", "attention_backend", "for 'attention_backend', which llama_server does not have"),
        ("vllm", "ctx_size", "is a word of llama_server; here it is 'context_length'"),
        ("sglang", "disable_outlines_disk_cache", "may stand in engine.args.extra, as [--disable-outlines-disk-cache]"),
        ("vllm", "speculative_config", "that is said by the speculative settings"),
        ("vllm", "api_key", "that is said by the tuner itself"),
        ("vllm", "disable_outlines_disk_cache", "is a word of sglang, and vllm has nothing of that name"),
    ],
)
def test_a_word_of_a_command_line_is_told_by_what_it_is_called_here(kind: str, word: str, says: str) -> None:
    assert says in str(meant(kind, word))


def test_what_no_engine_has_is_left_to_the_nearest_name() -> None:
    assert meant("sglang", "num_stepz") is None
    assert meant("of-nobody", "max_num_seqs") is None


def test_a_space_of_one_engine_in_the_words_of_another_is_refused_with_its_own(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        """
name: mixed_up
engine:
  kind: sglang
  model: Qwen/Qwen3-8B
  args: {attention_backend: flashinfer, page_size: 1, max-num-seqs: 64}
workload: {concurrency: [1]}
baseline: {gpu_memory_utilization: 0.8}
parameters:
  num_speculative_tokens: {choices: [2, 3]}
  max_num_batched_tokens: {choices: [2048, 4096]}
"""
    )
    with pytest.raises(SpaceProblems) as caught:
        read_space(str(file))
    said = {problem.where: problem.message for problem in caught.value.problems}
    assert "here it is 'max_running_requests'" in said["engine.args.max-num-seqs"]
    assert "here it is 'memory_fraction'" in said["baseline.gpu_memory_utilization"]
    assert "here it is 'num_steps'" in said["parameters.num_speculative_tokens"]
    assert "here it is 'prefill_tokens'" in said["parameters.max_num_batched_tokens"]


def test_further_arguments_of_another_engine_are_found_without_an_engine_to_ask() -> None:
    args = {"attention_backend": "flashinfer", "page_size": 1, "version": "0.5.23"}
    (said,) = get_engine("sglang").problems({**args, "extra": ["--max-num-seqs=64"]}, {})
    assert said == "extra: '--max-num-seqs' is a word of vllm; here it is 'max_running_requests'"
    assert get_engine("sglang").problems({**args, "extra": ["--of-a-later-release"]}, {}) == []
    assert foreign("sglang", "--async-engine-of-tomorrow") is None


def test_values_in_another_engines_letters_are_told() -> None:
    args = {"attention_backend": "FLASHINFER", "page_size": 1, "version": "0.5.23"}
    (said,) = get_engine("sglang").problems(args, {})
    assert said.startswith("attention_backend: SGLang writes its kernels in small letters")
    spec = SettingSpec("str", "the drafter", choices=("none", "eagle3", "ngram"))
    assert "did you mean 'eagle3'?" in str(spec.problem("EAGLE3"))
