"""Small random models, written as transformers writes them, and cores built on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig
from engine.ipc.messages import SamplingParams, Submit

VOCAB = 97


def tiny_llama(folder: Path, *, tied: bool = False, seed: int = 0, **sizes: int) -> Path:
    """A Hugging Face folder with a random Llama; `sizes` override the configuration's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(**{**shape, **sizes}, tie_word_embeddings=tied, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_core(tiny_model: Path) -> Callable[..., Core]:
    def make(spec: SpecConfig | None = None, **settings: object) -> Core:
        defaults: dict[str, object] = {"model": str(tiny_model), "dtype": "float32", "page_size": 4, "threads": 1}
        return build(EngineConfig(**{**defaults, **settings}, spec=spec or SpecConfig()))

    return make


def generate(core: Core, prompts: Iterable[Iterable[int]], **sampling: object) -> list[list[int]]:
    """Outputs of all prompts, run together to the end; the pages must all be free again."""
    params = SamplingParams(**{"max_tokens": 40, **sampling})
    outputs: dict[int, list[int]] = {}
    for rid, prompt in enumerate(prompts):
        outputs[rid] = []
        assert core.scheduler.submit(Submit(rid, tuple(prompt), params)) is None
    finished = {}
    while core.scheduler.busy:
        for update in core.scheduler.step():
            assert not update.error, update.error
            assert update.rid not in finished
            outputs[update.rid].extend(update.token_ids)
            if update.finish:
                finished[update.rid] = update.finish
    core.scheduler.check()
    assert finished.keys() == outputs.keys()
    return list(outputs.values())
