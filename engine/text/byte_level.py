"""From tokens to bytes, one token at a time: what incremental detokenisation needs and `tokenizers` does not offer.

Both families of vocabularies that LLMs use give each token a fixed byte string, so text is the concatenation of those
strings, decoded once. That makes streaming exact: no re-decoding of a growing suffix, no guessing where text changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from engine.errors import TokenizerError

TokenBytes = Callable[[str], bytes]
"""Vocabulary entry → the bytes it stands for."""


def _printable_alphabet() -> dict[str, int]:
    """GPT-2's code: printable Latin-1 stands for itself, the other bytes for 256, 257, … in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _printable_alphabet()


def _byte_level(entry: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in entry)
    except KeyError:  # an added token, kept as plain text
        return entry.encode()


def _sentencepiece(entry: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", entry):
        return bytes([int(entry[3:5], 16)])
    return entry.replace("▁", " ").encode()


def token_bytes_for(decoder: Any) -> tuple[TokenBytes, bool]:
    """How a `tokenizers` decoder spells tokens, and whether it drops one leading space of the whole text.

    Raises:
        TokenizerError: a decoder that is neither byte-level nor SentencePiece with byte fallback.
    """
    description = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    parts = description.get("decoders", [description])
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return _byte_level, False
    if "ByteFallback" in kinds:
        return _sentencepiece, "Strip" in kinds
    raise TokenizerError(
        f"the tokenizer's decoder ({', '.join(map(str, kinds))}) is not supported; "
        "supported are ByteLevel (GPT-2, Llama 3, Qwen) and ByteFallback (SentencePiece)"
    )
