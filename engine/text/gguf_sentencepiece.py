"""A `tokenizers` tokenizer from the SentencePiece vocabulary inside a GGUF file (`tokenizer.ggml.model` "llama").

SentencePiece's BPE has no list of merges: of all neighbours that join to a piece, those whose piece has the highest
score join first. So every way to cut a piece into two others is a merge, in the order of the scores. Text that no piece
spells falls back to its bytes.

One thing differs: of neighbours that join to the same piece SentencePiece takes the leftmost pair, `tokenizers` that
whose first part has the lower id. It shows only where both share a part, as in "aaa" with the pieces "aa" and "aaa".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from engine.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer without its special tokens: model, normaliser and decoder.

    Raises:
        TokenizerError: a vocabulary without byte tokens, or one that changes text in ways that are not known here.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    _refuse_what_is_unknown(metadata, entries, kinds)
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    unknown = next((entry for entry, kind in zip(entries, kinds, strict=True) if kind == Kind.UNKNOWN), None)
    model = models.BPE(vocabulary, merges(entries, scores, kinds), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    leads = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if leads else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leads else steps)
    return tokenizer


def merges(entries: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of ordinary pieces that join to one, by that one's score, highest first."""
    pieces = {
        entry: (-score, index)
        for index, (entry, score, kind) in enumerate(zip(entries, scores, kinds, strict=True))
        if kind == Kind.NORMAL
    }
    found = [
        (pieces[entry], pieces[entry[:cut]][1], entry[:cut], entry[cut:])
        for entry in pieces
        for cut in range(1, len(entry))
        if entry[:cut] in pieces and entry[cut:] in pieces
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


def _refuse_what_is_unknown(metadata: dict[str, Any], entries: Sequence[str], kinds: Sequence[int]) -> None:
    twice = [entry for entry, times in Counter(entries).items() if times > 1]
    spelled_bytes = {entry for entry, kind in zip(entries, kinds, strict=True) if kind == Kind.BYTE}
    problem = None
    if spelled_bytes != {f"<0x{byte:02X}>" for byte in range(256)}:
        problem = f"has {len(spelled_bytes)} byte tokens; it needs one for each of the 256 bytes"
    elif twice:
        problem = f"holds '{twice[0]}' twice"
    elif metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        problem = "drops repeated spaces (remove_extra_whitespaces)"
    elif metadata.get("tokenizer.ggml.precompiled_charsmap"):
        problem = "rewrites characters (precompiled_charsmap)"
    elif spaced := [e for e, kind in zip(entries, kinds, strict=True) if kind == Kind.USER_DEFINED and SPACE in e]:
        problem = f"has the user-defined token '{spaced[0]}', which stands for spaces"
    if problem:
        raise TokenizerError(f"the SentencePiece vocabulary of this GGUF file is not supported: it {problem}")
