"""What a model's own config.json says decides what may be tried with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.engines.base import get_engine
from tuner.engines.drafts import attention
from tuner.records import Candidate
from tuner.space import parse_space
from tuner.study.engine import illegal
from tuner.study.preflight import preflight

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "num_attention_heads": 64,
    "vocab_size": 163840,
}
HEADS = {"architectures": ["LlamaForCausalLM"], "kv_lora_rank": None, "num_attention_heads": 9, "vocab_size": 49152}

SPACE = """
name: x
engine:
  kind: sglang
  model: {model}
  args: {{version: 0.5.23, attention_backend: {kernels}, page_size: 1}}
workload: {{prompts: mixed, max_tokens: 16, temperature: 0, concurrency: [1]}}
baseline: {{speculation: none}}
parameters:
  speculation: {{choices: [none, eagle3]}}
  draft_head: {{choices: [some/head], when: speculation == 'eagle3'}}
  num_steps: {{choices: [3], when: speculation != 'none'}}
  topk: {{choices: [1, 4], when: speculation != 'none'}}
"""


def model(folder: Path, config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def why(named: str, topk: int, kernels: str = "flashinfer") -> str | None:
    settings = {"speculation": "eagle3", "draft_head": "some/head", "num_steps": 3, "topk": topk}
    space = parse_space(SPACE.format(model=named, kernels=kernels), source="x.yaml")
    return illegal(space, get_engine("sglang"), Candidate(settings))


def test_trees_are_refused_where_the_kernels_verify_a_latent_model_by_chains_only(tmp_path: Path) -> None:
    latent = model(tmp_path / "latent", LATENT)
    said = why(latent, 4)
    assert said is not None
    assert "latent attention" in said
    assert "triton" in said
    assert why(latent, 1) is None
    assert why(latent, 4, "triton") is None
    assert why(model(tmp_path / "heads", HEADS), 4) is None


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_a_model_within_a_model_is_asked_of_its_language_part(tmp_path: Path, key: str) -> None:
    assert (
        attention(model(tmp_path / "whole", {"architectures": ["Seeing"], key: LATENT, "vision_config": {}})) == "mla"
    )
    deeper = {"architectures": ["Hearing"], "thinker_config": {"text_config": LATENT}}
    assert attention(model(tmp_path / "deeper", deeper)) == "mla"


@pytest.mark.parametrize(
    "config", [[], "x", {**HEADS, "kv_lora_rank": "512"}, {**HEADS, "kv_lora_rank": 0}, {"text_config": 3}, {}]
)
def test_odd_configs_are_no_latent_models(tmp_path: Path, config: Any) -> None:
    assert attention(model(tmp_path / "odd", config)) != "mla"


def test_of_a_model_that_is_not_here_nothing_is_known_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    assert attention("nobody/here") is None
    assert why("nobody/here", 4) is None
    cached = Path(model(tmp_path / "cached", LATENT)) / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: str(cached))
    assert attention("nobody/here") == "mla"


@pytest.mark.parametrize("name", ["./model.gguf", "models/q--8b.gguf", "a/b/c", "x/", "/", "org/model--v2", "r/m:Q4"])
def test_names_that_the_hub_does_not_take_are_no_error(name: str) -> None:
    assert attention(name) is None


def test_a_latent_head_drafts_chains_only_with_kernels_that_have_no_trees(tmp_path: Path) -> None:
    text = SPACE.replace("page_size: 1", "page_size: 1, draft_attention_backend: flashinfer")
    text = text.replace(
        "some/head", model(tmp_path / "head", {**LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"]})
    )
    space = parse_space(text.format(model=model(tmp_path / "m", LATENT), kernels="triton"), source="x.yaml")
    said = {
        each.candidate.settings.get("topk"): illegal(space, get_engine("sglang"), each.candidate)
        for each in (space.listed() or {}).values()
    }
    assert said[1] is None
    assert said[4] is not None
    assert "draft chains only" in said[4]


def test_a_baseline_that_the_model_rules_out_is_refused(tmp_path: Path) -> None:
    text = SPACE.replace("{{speculation: none}}", "{{speculation: ngram, num_steps: 3, topk: 4}}")
    space = parse_space(text.format(model=model(tmp_path / "m", LATENT), kernels="flashinfer"), source="x.yaml")
    assert any("the baseline" in said and "latent" in said for said in preflight(space).refused)


def test_check_says_how_many_candidates_the_engine_leaves_out_and_why(tmp_path: Path) -> None:
    """A count of candidates that cannot be tried would promise a study of another size."""
    space = parse_space(SPACE.format(model=model(tmp_path / "m", LATENT), kernels="flashinfer"), source="x.yaml")
    (note,) = [note for note in preflight(space).notes if "latent" in note]
    assert note.startswith("left out (1 of 2 candidates): attention_backend: ")
