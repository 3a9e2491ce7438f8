"""A SentencePiece vocabulary from a GGUF file: ids as SentencePiece gives them, text back as it was, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from engine.errors import TokenizerError
from engine.model.source import ModelSource
from engine.text.gguf_sentencepiece import Kind
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The year 2026 has 365 days; don't they say it'll be 1234567 hours?  The theory then thins there.",
    "Grüße aus Köln, 你好世界, здравствуй мир ... !!! <tag attr='1'>  aa aaa aaaa hahahaha",
] * 3
SPECIAL = {"<unk>": Kind.UNKNOWN, "<s>": Kind.CONTROL, "</s>": Kind.CONTROL}
BYTES = {f"<0x{byte:02X}>": Kind.BYTE for byte in range(256)}
Vocabulary = tuple[list[str], list[float], list[int]]


def trained() -> Vocabulary:
    """Pieces, scores and kinds as SentencePiece's trainer orders them: special ones, bytes, merged pieces, letters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=250, show_progress=False))
    known = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    letters = [piece for piece in known if len(piece) == 1]
    merged = [piece for piece in known if len(piece) > 1] + ["▁▁", "▁▁▁▁"]
    entries = [*SPECIAL, *BYTES, *merged, *letters, "<tool>", "[PAD1]"]
    first = len(SPECIAL) + len(BYTES)
    scores = [0.0] * first + [-float(i) for i in range(len(merged) + len(letters))] + [0.0, -1000.0]
    kinds = [*SPECIAL.values(), *BYTES.values()] + [Kind.NORMAL] * (len(merged) + len(letters))
    return entries, scores, [*map(int, kinds), int(Kind.USER_DEFINED), int(Kind.UNUSED)]


VOCABULARY = trained()


def describe(writer: gguf.GGUFWriter, vocabulary: Vocabulary = VOCABULARY) -> None:
    entries, scores, kinds = vocabulary
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(entries)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write(
    path: Path, vocabulary: Vocabulary = VOCABULARY, more: Callable[[gguf.GGUFWriter], None] | None = None
) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, vocabulary)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("test", "gguf", path)


def sentencepiece(text: str, vocabulary: Vocabulary = VOCABULARY) -> list[int]:
    """The definition: again and again, of all neighbours that join to a piece, those of the best score, leftmost."""
    entries, scores, kinds = vocabulary
    score = {e: s for e, s, kind in zip(entries, scores, kinds, strict=True) if kind == Kind.NORMAL}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(score.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        found = [(-s, i) for s, i in joined if s is not None]
        if not found:
            break
        at = min(found)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    ids = {entry: index for index, entry in enumerate(entries)}
    return [i for s in symbols for i in ([ids[s]] if s in score else [ids[f"<0x{byte:02X}>"] for byte in s.encode()])]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("gguf") / "m.gguf"))


plain = st.text().filter(lambda text: not any(entry in text for entry in (*SPECIAL, "<tool>", "▁")))
words = st.lists(st.sampled_from(" ".join(CORPUS).split(" ")) | plain, max_size=8).map(" ".join)


@given(plain | words)
def test_ids_are_those_of_sentencepiece(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special=False) == sentencepiece(text)
    assert tokenizer.encode(text) == [1, *sentencepiece(text)]


@given(plain | words)
def test_decode_reverses_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(words | plain, st.data())
def test_a_stream_of_tokens_gives_the_text_whatever_the_borders(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """Characters of several byte tokens among them; no piece ever holds half a character."""
    ids = tokenizer.encode(text)
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stream = TextStream(tokenizer)
    pieces = [stream.feed(ids[a:b]) for a, b in itertools.pairwise([0, *borders, len(ids)])]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) == (" " + text if text else "")
    assert stream.finish() == ""


@given(st.lists(st.integers(0, len(VOCABULARY[0]) - 1), max_size=30), st.integers(1, 4))
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int], group: int) -> None:
    stream = TextStream(tokenizer)
    text = "".join(stream.feed(ids[at : at + group]) for at in range(0, len(ids), group)) + stream.finish()
    assert text.removeprefix(" ") == tokenizer.decode(ids)


def test_an_output_keeps_its_first_space(tokenizer: Tokenizer) -> None:
    """It goes on from the prompt: "Hello" and "▁there" are "Hello there"."""
    assert TextStream(tokenizer).feed(tokenizer.encode("there", add_special=False)) == " there"


def test_special_tokens_are_one_id_and_a_space_follows_them(tokenizer: Tokenizer) -> None:
    entries = VOCABULARY[0]
    spelled = [entries[i] for i in tokenizer.encode("<s>The</s>the <tool>The", add_special=False)]
    assert [s for s in spelled if s in (*SPECIAL, "<tool>")] == ["<s>", "</s>", "<tool>"]
    assert "".join(spelled) == "<s>▁The</s>▁the▁<tool>▁The"
    assert tokenizer.decode(tokenizer.encode("The</s>")) == "The"
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.vocab_size == len(entries)


@given(words)
def test_without_a_leading_space_nothing_is_added(text: str) -> None:
    tokenizer = _without_space()
    expected = sentencepiece(text)
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.encode(" " + text, add_special=False) == expected or not text


def _without_space(made: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 - one per module
    if not made:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            made.append(load_tokenizer(write(Path(folder) / "m.gguf", more=lambda w: w.add_add_space_prefix(False))))
    return made[0]


@pytest.mark.parametrize(
    ("more", "begin", "end"),
    [
        (lambda writer: None, [1], []),
        (lambda writer: writer.add_add_bos_token(False), [], []),
        (lambda writer: writer.add_add_eos_token(True), [1], [2]),
    ],
)
def test_what_goes_around_a_text_is_what_the_file_says(
    tmp_path: Path, more: Callable[[gguf.GGUFWriter], None], begin: Sequence[int], end: Sequence[int]
) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", more=more))
    assert tokenizer.encode("The") == [*begin, *sentencepiece("The"), *end]


def test_a_vocabulary_that_is_not_known_exactly_is_refused(tmp_path: Path) -> None:
    entries, scores, kinds = VOCABULARY
    at = entries.index("<0x41>")
    without_a_byte = (entries, scores, [*kinds[:at], int(Kind.NORMAL), *kinds[at + 1 :]])
    twice = ([*entries[:-1], entries[-3]], scores, kinds)
    spaces = ([*entries[:-2], "▁▁▁", entries[-1]], scores, kinds)
    for vocabulary, reason in ((without_a_byte, "255 byte tokens"), (twice, "twice"), (spaces, "'▁▁▁'")):
        with pytest.raises(TokenizerError, match=reason):
            load_tokenizer(write(tmp_path / "m.gguf", vocabulary))
    for more, reason in (
        (lambda writer: writer.add_remove_extra_whitespaces(True), "remove_extra_whitespaces"),
        (lambda writer: writer.add_precompiled_charsmap(b"\1\2"), "precompiled_charsmap"),
    ):
        with pytest.raises(TokenizerError, match=reason):
            load_tokenizer(write(tmp_path / "m.gguf", more=more))
    with pytest.raises(TokenizerError, match=r"m\.gguf"):
        load_tokenizer(write(tmp_path / "m.gguf", (entries, scores[:-1], kinds)))


def test_transformers_reads_what_is_exported_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*CORPUS, "naïve 🎉", "a<tool>b"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
