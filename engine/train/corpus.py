"""Conversations as token ids, on disk as gzipped JSON lines: what the target says is what the head learns.

One object a line: `user` and `resp` (ids, without and with the closing token), `temperature`, `source`, `kind`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import InvalidConfig, TokenizerError
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """One user turn and the target's answer. `held_out` is decided by the user turn alone, so paraphrases stay."""

    user: tuple[int, ...]
    response: tuple[int, ...]
    temperature: float
    kind: str

    @property
    def key(self) -> int:
        """By which it is known again, 63 bits."""
        ids = np.array((*self.user, -1, *self.response), dtype="<i4").tobytes()
        return int.from_bytes(hashlib.blake2b(ids, digest_size=8).digest(), "little") >> 1

    @property
    def held_out(self) -> bool:
        """Two in a hundred, by a stable hash of the user turn."""
        return zlib.crc32(np.array(self.user, dtype="<u4").tobytes()) % 100 < 2

    @property
    def loops(self) -> bool:
        """Whether the answer ends in a repetition: its last 48 tokens hold fewer than 16 distinct 3-grams."""
        tail = self.response[-48:]
        return len(tail) == 48 and len({tail[i : i + 3] for i in range(46)}) < 16


class ChatFrame:
    """The chat template around a user turn, as ids: `before` + user + `between` + response."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        before, between = self._around([])
        self.before = tuple(tokenizer.encode(before))
        self.between = self.ids(between)

    def under(self, system: str) -> tuple[int, ...]:
        """`before`, with this system prompt.

        Raises:
            TemplateError: the template takes none.
        """
        return tuple(self._tokenizer.encode(self._around([{"role": "system", "content": system}])[0]))

    def ids(self, text: str) -> tuple[int, ...]:
        """Of a piece of text, within a turn."""
        return tuple(self._tokenizer.encode(text, add_special=False))

    def text(self, ids: Sequence[int]) -> str:
        """What ids say."""
        return self._tokenizer.decode(ids)

    def _around(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        mark = "placemark"
        text = self._tokenizer.render_chat([*messages, {"role": "user", "content": mark}])
        if text.count(mark) != 1:
            raise TokenizerError("the chat template does not show a user turn exactly once; it cannot be framed")
        before, between = text.split(mark)
        return before, between

    def prompt(self, user: Sequence[int]) -> tuple[int, ...]:
        """All ids up to where the answer begins."""
        return (*self.before, *user, *self.between)


def read(paths: Iterable[Path]) -> Iterator[Conversation]:
    """Conversations of these files in order; a torn last line, as a kill leaves it, ends its file.

    Raises:
        InvalidConfig: a file that is not gzipped at all.
    """
    for path in paths:
        with gzip.open(path, "rt") as file:
            begun = False
            try:
                for line in filter(str.strip, file):
                    data = json.loads(line)
                    begun = True
                    yield Conversation(
                        tuple(data["user"]), tuple(data["resp"]), data["temperature"], data.get("kind", "")
                    )
            except gzip.BadGzipFile:
                if not begun:
                    raise InvalidConfig(f"{path} holds no gzipped lines of conversations") from None
            except (EOFError, ValueError, zlib.error):
                continue


def whole(path: Path) -> list[Conversation]:
    """What a file holds; where it is torn, it is written again without the torn end, behind which nothing is read."""
    if not path.exists():
        return []
    found = list(read([path]))
    try:
        lines = gzip.decompress(path.read_bytes()).count(b"\n")
    except (EOFError, ValueError, OSError, zlib.error):
        lines = -1
    if lines != len(found):
        mended = path.with_suffix(".mended")
        mended.unlink(missing_ok=True)
        if found:
            append(mended, found, "self")
            mended.replace(path)
        else:
            path.unlink()
    return found


def append(path: Path, conversations: Iterable[Conversation], source: str) -> None:
    """Add conversations as one gzip member, so that what is written before a kill can be read."""
    lines = [
        json.dumps(
            {
                "user": c.user,
                "resp": c.response,
                "temperature": c.temperature,
                "source": source,
                "kind": c.kind,
            },
            separators=(",", ":"),
        )
        for c in conversations
    ]
    with path.open("ab") as file:
        file.write(gzip.compress(("\n".join(lines) + "\n").encode()))


def kept_vocabulary(conversations: Iterable[Conversation], size: int) -> np.ndarray:
    """The `size` most frequent response tokens, ascending; int64 [size]. Ties and gaps are filled by lowest id."""
    counts: Counter[int] = Counter()
    for c in conversations:
        counts.update(c.response)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    filler = (token for token in range(size * 2) if token not in chosen)
    while len(chosen) < size:
        chosen.add(next(filler))
    return np.array(sorted(chosen), dtype=np.int64)
