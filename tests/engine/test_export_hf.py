"""A GGUF model written as a Hugging Face folder is the same model, to transformers and to ourselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.errors import UsageError
from engine.export import export_folder
from engine.model.source import ModelSource
from engine.ops.reference import ReferenceOps
from engine.text.tokenizer import load_tokenizer
from tests.engine.test_architectures import CASES, TOKENS, random_model, write_gguf
from tests.engine.test_model import our_logits

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
# Two bytes of the alphabet merge; the rest are single bytes, as byte-level vocabularies spell them.
ALPHABET = [chr(n) for n in range(ord("!"), ord("!") + 93)]


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*ALPHABET, "ab", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, "Ġ"])
    writer.add_token_merges(["a b"])
    kinds = [gguf.TokenType.NORMAL] * 94 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(94)
    writer.add_eos_token_id(95)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(case: str) -> tuple[ModelSource, Path]:
        monkeypatch.setenv("SPEC_TUNER_CACHE", str(tmp_path / "cache"))
        family, options = CASES[case]
        folder = random_model(tmp_path / "hf", family, **options)
        write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0, more=add_vocabulary)
        return ModelSource("m", "gguf", tmp_path / "m.gguf"), tmp_path / "out"

    return make


@pytest.mark.parametrize("case", ["llama", "llama tied", "llama 3 rope", "llama yarn", "qwen2", "qwen3 tied"])
def test_logits_text_and_template_are_the_same(made: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if case == "llama 3 rope":
        monkeypatch.setattr("engine.export.LLAMA3_CONTEXT", 32)
    source, target = made(case)
    export_folder(source, target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(TOKENS.unsqueeze(0)).logits[0]
    ours = our_logits(ModelSource("m", "hf", target), ReferenceOps(), torch.float32, TOKENS)
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=5e-4)
    from_gguf = our_logits(source, ReferenceOps(), torch.bfloat16, TOKENS)
    assert (from_gguf - theirs).square().mean() < 0.02 * theirs.square().mean()

    tokenizer = AutoTokenizer.from_pretrained(target)
    before, after = load_tokenizer(source), load_tokenizer(ModelSource("m", "hf", target))
    text, messages = "<|im_start|>abba ab12<|im_end|>", [{"role": "user", "content": "ab"}]
    assert tokenizer(text)["input_ids"] == before.encode(text) == after.encode(text)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == before.render_chat(messages)
    assert after.render_chat(messages) == "<user>ab<|im_end|>"
    assert after.stop_token_ids == before.stop_token_ids == (95,)
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": [95], "bos_token_id": 94}


def test_nothing_is_overwritten_and_nothing_half_written_stays(made: Any, tmp_path: Path) -> None:
    source, target = made("llama")
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(UsageError, match="not an empty folder"):
        export_folder(source, target)
    with pytest.raises(UsageError, match="already"):
        export_folder(ModelSource("m", "hf", tmp_path / "hf"), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf", "out"]
    assert [path.name for path in target.iterdir()] == ["mine"]
