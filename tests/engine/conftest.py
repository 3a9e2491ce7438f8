"""Small random models, written as transformers writes them, and cores built on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import Core, build
from engine.config import EngineConfig, SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.memory.pool import KVPool
from engine.model.eagle3 import HeadShape
from engine.model.head_file import fingerprint, save_head

VOCAB = 97


@pytest.fixture(autouse=True)
def nothing_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory holds before it is written is anything: here NaN, which shows in every sum that it enters."""
    made = KVPool.__init__

    def poisoned(self: KVPool, *args: object, **options: object) -> None:
        made(self, *args, **options)  # type: ignore[arg-type]
        for tensor in self.tensors:
            if tensor.numel() < 2**22:  # not a whole machine's memory
                tensor.fill_(float("nan"))

    monkeypatch.setattr(KVPool, "__init__", poisoned)


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


def tiny_head(core: Core, file: Path, *, seed: int = 0, draft_vocab: int = 60) -> Path:
    """A random draft head for the core's model, over the first token ids."""
    torch.manual_seed(seed)
    config = core.model.config
    shape = HeadShape(
        hidden=config.hidden,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=64,
        draft_vocab=draft_vocab,
        rope_theta=config.rope.theta,
        layers=(0, 1, 2),
    )
    weights = {name: torch.randn(size) * (0.3 if len(size) > 1 else 1) for name, size in shape.parameters().items()}
    about = {"target": "tiny", "target_fingerprint": fingerprint(core.model)}
    save_head(file, shape, weights, torch.arange(draft_vocab), about)
    return file


@pytest.fixture(scope="session")
def head_file(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    core = build(EngineConfig(model=str(tiny_model), dtype="float32", page_size=4, threads=1))
    return tiny_head(core, tmp_path_factory.mktemp("head") / "head.safetensors")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same vocabulary as `tiny_model`."""
    return tiny_llama(tmp_path_factory.mktemp("small"), seed=1, hidden_size=24, num_hidden_layers=1)


@pytest.fixture
def spec_core(make_core: Callable[..., Core], head_file: Path, small_model: Path) -> Callable[..., Core]:
    """Cores with a draft head and a draft model at hand."""

    def make(spec: SpecConfig, **settings: object) -> Core:
        return make_core(replace(spec, draft_head=str(head_file), draft_model=str(small_model)), **settings)

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
    core.scheduler.land()
    core.scheduler.check()
    assert finished.keys() == outputs.keys()
    return list(outputs.values())
