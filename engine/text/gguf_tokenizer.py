"""A `tokenizers` tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import TokenizerError
from engine.text import gguf_sentencepiece
from engine.text.gguf_sentencepiece import Kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before merging. `pattern` None is GPT-2's own, with or without single digits first."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _words(digits: str) -> str:
    """The pattern that GPT-4 style vocabularies share; they differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _PreTokenizer()
_LLAMA3 = _PreTokenizer(_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(single_digits=True),
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(_words(r"\p{N}"), nfc=True),
}
"""By the names that `tokenizer.ggml.pre` uses."""


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes: special tokens, and what it puts around a text.

    Raises:
        TokenizerError: neither byte-level BPE nor SentencePiece's BPE, or an unknown pre-tokenizer. Guessing one would
            give plausible but wrong token ids.
    """
    from tokenizers import AddedToken, processors

    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata)
    elif model == "llama":
        tokenizer, adds_bos = gguf_sentencepiece.build(metadata), True
    else:
        raise TokenizerError(
            f"the vocabulary '{model}' of this GGUF file is not supported; supported: gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE)"
        )
    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [Kind.NORMAL] * len(entries))
    tokenizer.add_tokens(
        [
            AddedToken(entry, special=kind != Kind.USER_DEFINED, normalized=False)
            for entry, kind in zip(entries, kinds, strict=True)
            if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
        ]
    )
    around = {
        name: metadata[f"tokenizer.ggml.{name}_token_id"]
        for name, default in (("bos", adds_bos), ("eos", False))
        if f"tokenizer.ggml.{name}_token_id" in metadata and metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    }
    if around:
        spelled = {name: entries[index] for name, index in around.items()}
        single = " ".join(part for part in (spelled.get("bos"), "$A", spelled.get("eos")) if part)
        ids = {entries[index]: index for index in around.values()}
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    return tokenizer


def _byte_level(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer without its special tokens, and whether such texts begin with BOS where the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(f"the pre-tokenizer '{name}' is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))

    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)), use_regex=pre.pattern is None
    )
    steps: list[Any] = [byte_level]
    if pre.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    if pre.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre.adds_bos
