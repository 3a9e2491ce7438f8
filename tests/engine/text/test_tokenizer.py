"""A tokenizer built from a GGUF file gives the ids that the model was trained with."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from engine.errors import TemplateError, TokenizerError
from engine.model.source import ModelSource
from engine.text.gguf_metadata import read_metadata
from engine.text.gguf_tokenizer import PRE_TOKENIZERS
from engine.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CORPUS = [
    "The year 2026 has 365 days; don't they say it'll be 1234567 hours?\n\n  def f(x):\n\treturn x ** 2",
    "Grüße aus Köln, 你好世界, здравствуй мир 🎉🎉  ... !!! <tag attr='1'>",
] * 3


def _write(path: Path, entries: list[str], merges: list[str], **keys) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(keys.get("model", "gpt2"))
    writer.add_tokenizer_pre(keys.get("pre", "smollm"))
    writer.add_token_list(entries)
    writer.add_token_merges(merges)
    writer.add_token_types([int(keys.get("types", {}).get(entry, 3 if entry in SPECIAL else 1)) for entry in entries])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if "bos" in keys:
        writer.add_add_bos_token(keys["bos"])
    if keys.get("template", TEMPLATE):
        writer.add_chat_template(keys.get("template", TEMPLATE))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("test", "gguf", path)


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    """A small byte-level vocabulary, trained here: its entries in the order of their ids, and its merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, "<tool>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


@pytest.fixture(scope="module")
def tokenizer(trained, tmp_path_factory) -> Tokenizer:
    return load_tokenizer(_write(tmp_path_factory.mktemp("gguf") / "m.gguf", *trained, types={"<tool>": 4}))


def test_metadata_is_what_the_gguf_package_reads(trained, tmp_path):
    source = _write(tmp_path / "m.gguf", *trained)
    ours = read_metadata(source.path)
    fields = gguf.GGUFReader(source.path).fields
    theirs = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert ours == theirs


@pytest.mark.parametrize("cut", [0, 3, 10, 23, 24, 60, 2000])
def test_a_cut_file_is_an_error_that_names_it(trained, tmp_path, cut):
    source = _write(tmp_path / "m.gguf", *trained)
    source.path.write_bytes(source.path.read_bytes()[:cut])
    with pytest.raises(TokenizerError, match=r"m\.gguf"):
        load_tokenizer(source)


@settings(deadline=None)
@given(st.text())
def test_ids_equal_those_of_transformers(trained, text):
    import transformers

    entries, merges = trained
    text = "".join(char for char in text if not char.isnumeric())  # GPT-2 keeps digits together, SmolLM does not
    theirs = transformers.GPT2Tokenizer(
        vocab={entry: index for index, entry in enumerate(entries)}, merges=[tuple(m.split(" ")) for m in merges]
    )
    ours = _cached(entries, merges)
    assert ours.encode(text) == theirs(text)["input_ids"]


def _cached(entries, merges, made={}):  # noqa: B006 - one per module
    if not made:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            made["it"] = load_tokenizer(_write(Path(folder) / "m.gguf", entries, merges, types={"<tool>": 4}))
    return made["it"]


def test_digits_stay_single_for_smollm(tokenizer):
    assert [tokenizer.decode([one]) for one in tokenizer.encode("2026 365")] == ["2", "0", "2", "6", " ", "3", "6", "5"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll say 12345  now", ["I", "'ll", "Ġsay", "Ġ12345", "Ġ", "Ġnow"]),
        ("smollm", "say 123!", ["say", "Ġ", "1", "2", "3", "!"]),
        ("llama-bpe", "I'LL say 12345\n\nok", ["I", "'LL", "Ġsay", "Ġ", "123", "45", "ĊĊ", "ok"]),
        ("qwen2", "x=12 \n y", ["x", "=", "1", "2", "ĠĊ", "Ġy"]),
    ],
)
def test_pre_tokenizers_cut_as_published(trained, tmp_path, pre, text, pieces):
    backend = load_tokenizer(_write(tmp_path / "m.gguf", *trained, pre=pre))._backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@given(st.text())
def test_decode_reverses_encode(tokenizer, text):
    for special in SPECIAL:
        text = text.replace(special, "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.data())
def test_decode_equals_the_library_for_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_one_id_and_not_shown(tokenizer):
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b<tool>c")) == "ab<tool>c"


def test_both_end_tokens_stop(tokenizer):
    assert tokenizer.stop_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("keys", "leads"),
    [({}, False), ({"bos": True}, True), ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "bos": False}, False)],
)
def test_the_beginning_of_text_token_leads_where_the_file_says_so(trained, tmp_path, keys, leads):
    tokenizer = load_tokenizer(_write(tmp_path / "m.gguf", *trained, **keys))
    assert (tokenizer.encode("a")[0] == 1) is leads
    assert tokenizer.encode("a", add_special=False)[0] != 1


def test_what_is_not_supported_is_refused_by_name(trained, tmp_path):
    with pytest.raises(TokenizerError, match="'deepseek' is not supported"):
        load_tokenizer(_write(tmp_path / "a.gguf", *trained, pre="deepseek"))
    with pytest.raises(TokenizerError, match="vocabulary 't5'"):
        load_tokenizer(_write(tmp_path / "b.gguf", *trained, model="t5"))
    assert {"smollm", "gpt-2", "llama-bpe", "qwen2"} <= set(PRE_TOKENIZERS)


def test_a_folder_gives_the_same_tokenizer_as_the_file(trained, tokenizer, tmp_path):
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 7]}')
    settings_file = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "unused"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_file))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    folder = load_tokenizer(ModelSource("test", "hf", tmp_path))
    assert folder.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])
    assert folder.stop_token_ids == (0, 2, 7)
    assert folder.render_chat([{"role": "user", "content": "x"}]) == "<|im_start|><|im_start|>x<|im_end|>"


def test_sentencepiece_vocabularies_decode_as_the_library_does():
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257, "b": 258, "▁": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    ours = Tokenizer(backend)
    for ids in ([257, 258, 257], [258, 0xC3 + 1, 0xA9 + 1, 257], [259, 257], []):
        assert ours.decode(ids) == backend.decode(ids)


def test_a_broken_folder_is_an_error_that_names_the_file(tmp_path):
    source = ModelSource("test", "hf", tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(source)


def test_a_model_without_a_template_says_what_to_use(trained, tmp_path):
    tokenizer = load_tokenizer(_write(tmp_path / "m.gguf", *trained, template=None))
    with pytest.raises(TemplateError, match="/v1/completions"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
