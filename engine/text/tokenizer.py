"""Text ↔ token ids, and messages → prompt, for one model. Needs no torch, so that the frontend starts at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import TemplateError, TokenizerError
from engine.text.byte_level import token_bytes_for
from engine.text.chat_template import ChatTemplate
from engine.text.gguf_metadata import read_metadata
from engine.text.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    import tokenizers

    from engine.model.source import ModelSource

# Files name one end token at most, yet chat models end a turn with another one than a document. Where a vocabulary
# has one of these as a special token, it ends the answer.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>")


class Tokenizer:
    """One model's vocabulary and chat template.

    Args:
        backend: the vocabulary, with its special tokens.
        stop_token_ids: ids that end an answer, beside the well-known end tokens that the vocabulary has.
        chat_template: Jinja text, or None for a model without one.
        template_tokens: what templates know by name, such as `bos_token`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        stop_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        special = {index: token.content for index, token in backend.get_added_tokens_decoder().items() if token.special}
        known = [index for index, content in special.items() if content in _END_TOKENS]
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*stop_token_ids, *known}))
        self._hidden = frozenset(special) | frozenset(self.stop_token_ids)
        self._spell, self._strips_space = token_bytes_for(backend.decoder)
        self._spelled: dict[int, bytes] = {}
        self._template = ChatTemplate(chat_template, template_tokens or {}) if chat_template else None
        self._template_source, self._names = chat_template, dict(template_tokens or {})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`, which must be valid Unicode. `add_special` puts the beginning-of-text token first where the
        model has one. Special tokens written out in `text` become those tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none for special and stop tokens, and for ids without an entry."""
        spelled = self._spelled.get(token_id)
        if spelled is None:
            entry = None if token_id in self._hidden else self._backend.id_to_token(token_id)
            spelled = self._spelled[token_id] = b"" if entry is None else self._spell(entry)
        return spelled

    def literal_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, but special tokens as they are written, such as `<|im_end|>`."""
        if token_id not in self._hidden:
            return self.token_bytes(token_id)
        return (self._backend.id_to_token(token_id) or "").encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, without special tokens; bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text is not part of it.
        """
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def literal_text(self, token_ids: Iterable[int]) -> str:
        """As `decode`, but with special tokens as they are written."""
        text = b"".join(map(self.literal_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    @property
    def has_template(self) -> bool:
        """Whether `render_chat` works at all."""
        return self._template is not None

    @property
    def begin_token_id(self) -> int | None:
        """The beginning-of-text token, where the model names one."""
        name = self._names.get("bos_token")
        found: int | None = None if name is None else self._backend.token_to_id(name)
        return found

    def save(self, folder: Path) -> None:
        """Write it the way Hugging Face folders hold it: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self._names}
        if self._template_source:
            settings["chat_template"] = self._template_source
            (folder / "chat_template.jinja").write_text(self._template_source, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant's answer begins.

        Encode it with `add_special=False`: templates write the beginning-of-text token themselves.

        Raises:
            TemplateError: the model has no chat template, or its template refused the messages.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(messages)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model: from the metadata of a GGUF file, or from the files of a Hugging Face folder.

    Raises:
        TokenizerError: files are missing or broken, or of a kind that is not supported.
    """
    return _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    ids = {
        name: metadata[key]
        for name in ("bos", "eos", "eot", "unk", "pad")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    try:
        backend = build_tokenizer(metadata)
        entries = metadata["tokenizer.ggml.tokens"]
        names = {f"{name}_token": entries[index] for name, index in ids.items()}
    except TokenizerError:
        raise
    except Exception as error:  # broken metadata fails anywhere, and the Rust constructor raises bare Exception
        raise TokenizerError(f"{path}: the vocabulary is incomplete or broken ({error!r})") from error
    stops = [ids[name] for name in ("eos", "eot") if name in ids]
    return Tokenizer(backend, stops, metadata.get("tokenizer.chat_template"), names)


def _from_folder(folder: Path) -> Tokenizer:
    import tokenizers

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json, which is the only vocabulary format read from a folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust parser raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json")
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if text := value.get("content") if isinstance(value, dict) else value:
            names[name] = text
    stops: set[int | None] = {backend.token_to_id(names["eos_token"])} if "eos_token" in names else set()
    for settings_file in ("generation_config.json", "config.json"):
        found = _read_json(folder / settings_file).get("eos_token_id")
        stops.update(found if isinstance(found, list) else [found])
    return Tokenizer(backend, [stop for stop in stops if stop is not None], _folder_template(folder, settings), names)


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name: take the one for plain conversation
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; an absent file is an empty one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return content
