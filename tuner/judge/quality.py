"""Whether a candidate's answers are still the baseline's: a verdict from stored answers; it can be computed again."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean, median
from typing import Any, Literal

LOSSY = frozenset({"weights", "dtype", "quantization", "kv_cache_dtype", "kv_dtype"})
"""Settings that change what is computed, and not only how: another value than the baseline's is lossy by its name."""

NEAR_TIE = 0.5
"""Nats. Rounding turns a choice between tokens whose log-probabilities lie closer than this, and no other."""

MAX_FAR = 0.1
"""Share of answers that may leave the baseline's at a token that was no near tie."""

MAX_LOSS = 0.1
"""Nats a token by which the answers may be less likely to the baseline than its own answers are."""

MIN_SPOKEN = 0.5
"""Share of prompts that must have been answered with something for equal answers to mean anything."""

MAX_LENGTH_SHIFT = 0.25
LEAST_ALIKE = 0.7
"""Cosine of the counts of letter pairs of the answers that differ. Answers of one language to the same prompts have
0.85 and more, of two languages less than this."""

ALIKE_NEEDS_LETTERS = 400
MAX_REPEATING = 0.1
"""Share of answers, beyond the baseline's, that repeat themselves."""

NGRAM = 4
REPEATING = 0.5
"""An answer repeats itself when at least this share of its runs of four words was there before."""


@dataclass(frozen=True)
class Answers:
    """Answers to the same prompts, in their order. `likelihoods` are those that the baseline's server gave them.

    `unknown` says why there are none, where there are none. `asked` tells prompts apart; "": not known.
    """

    texts: tuple[str, ...]
    likelihoods: tuple[Likelihood, ...] = ()
    unknown: str = ""
    asked: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        likelihoods = [
            {"offsets": list(one.offsets), "chosen": list(one.chosen), "best": list(one.best)}
            for one in self.likelihoods
        ]
        found = {"texts": list(self.texts), "likelihoods": likelihoods, "unknown": self.unknown}
        return {**found, "asked": self.asked} if self.asked else found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Answers:
        """The answers that `to_dict` wrote."""
        likelihoods = tuple(
            Likelihood(tuple(one["offsets"]), tuple(one["chosen"]), tuple(one["best"])) for one in data["likelihoods"]
        )
        return cls(tuple(data["texts"]), likelihoods, str(data["unknown"]), str(data.get("asked", "")))


@dataclass(frozen=True)
class Likelihood:
    """Of one answer's tokens: where each begins in the answer's text (characters), its log-probability (nats) after the
    prompt and all tokens before it, and that of the likeliest token there."""

    offsets: tuple[int, ...]
    chosen: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Nats a token; None of an empty answer."""
        return fmean(self.chosen) if self.chosen else None

    def gap_at(self, character: int) -> float | None:
        """How much likelier the best token was than the one at this character; None past the end."""
        index = sum(offset <= character for offset in self.offsets) - 1
        return self.best[index] - self.chosen[index] if 0 <= index < len(self.chosen) else None


@dataclass(frozen=True)
class Quality:
    """The verdict on one candidate.

    `same`: every answer is the baseline's to the letter. `equivalent`: they differ as rounding makes them differ.
    `different`: more than that. `unknown`: they differ, and there are no likelihoods to say how, or there are hardly
    any answers.
    `divergence` is the median character at which answers part, `far` how many part at no near tie, `loss` in nats a
    token (positive: less likely than the baseline's own), `length_ratio` of mean words. An answer that ends where the
    baseline's goes on parts at no near tie: rounding ends one now and then, and not many.
    """

    candidate_id: str
    prompts: int
    exact: int
    outcome: Literal["same", "equivalent", "different", "unknown"]
    why: str
    divergence: float | None = None
    far: int | None = None
    loss: float | None = None
    length_ratio: float | None = None
    repeating: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(self.__dict__)


def compare(candidate_id: str, baseline: Answers, candidate: Answers) -> Quality:
    """The verdict on a candidate's answers; both must be to the same prompts."""
    if len(baseline.texts) != len(candidate.texts) or baseline.asked != candidate.asked:
        why = "the two sides were asked other prompts, by another version"
        return Quality(candidate_id, len(candidate.texts), 0, "unknown", why)
    pairs = list(zip(baseline.texts, candidate.texts, strict=True))
    exact = sum(a == b for a, b in pairs)
    count = len(pairs)
    spoken = sum(bool(a.strip() or b.strip()) for a, b in pairs)
    if exact == count and spoken < MIN_SPOKEN * count:
        why = f"only {spoken} of {count} prompts were answered at all, alike; silence is no evidence"
        return Quality(candidate_id, count, exact, "unknown", why)
    if exact == count:
        return Quality(candidate_id, count, exact, "same", f"all {count} answers are the baseline's to the letter")
    parts = [_parting(a, b) for a, b in pairs if a != b]
    words = [fmean(len(text.split()) for text in side.texts) for side in (baseline, candidate)]
    length_ratio = words[1] / words[0] if words[0] else None
    repeating = _repeating(candidate.texts) - _repeating(baseline.texts)
    wrong = []
    if length_ratio is not None and abs(length_ratio - 1) > MAX_LENGTH_SHIFT:
        wrong.append(f"they are {length_ratio:.2f} times as long")
    if repeating > MAX_REPEATING:
        wrong.append(f"{100 * repeating:.0f} % more of them repeat themselves")
    most = max(1, math.floor(MAX_FAR * count))
    cut = [_ends_early(a, b) for a, b in pairs]
    if sum(cut) > most:
        wrong.append(f"{sum(cut)} of {count} end where the baseline's go on")
    alike = _alike([a for a, b in pairs if a != b], [b for a, b in pairs if a != b])
    if alike is not None and alike < LEAST_ALIKE:
        wrong.append(f"they are in another language or script (letters alike by {alike:.2f})")
    far, loss = None, None
    if _judged(baseline) and _judged(candidate):
        far = sum(cut[i] or _is_far(a, b, candidate.likelihoods[i]) for i, (a, b) in enumerate(pairs) if a != b)
        losses = [
            own.mean - other.mean
            for own, other in zip(baseline.likelihoods, candidate.likelihoods, strict=True)
            if own.mean is not None and other.mean is not None
        ]
        loss = fmean(losses) if losses else None
        if far > most:
            wrong.append(f"{far} of {count} leave the baseline's at a token that was no near tie")
        if loss is not None and loss > MAX_LOSS:
            wrong.append(f"to the baseline they are less likely by {loss:.2f} nats a token than its own")
    outcome: Literal["equivalent", "different", "unknown"]
    if wrong:
        outcome, why = "different", "; ".join(wrong)
    elif far is None:
        outcome = "unknown"
        why = f"{count - exact} of {count} answers differ, and {candidate.unknown or 'no likelihoods are known'}"
    else:
        outcome = "equivalent"
        why = f"{count - exact} of {count} answers differ, as rounding makes them differ"
    return Quality(candidate_id, count, exact, outcome, why, median(parts), far, loss, length_ratio, repeating)


def lossy_settings(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """Names of the candidate's settings that are lossy by their name, and not the baseline's."""
    return sorted(name for name in LOSSY if candidate.get(name) != baseline.get(name))


def _judged(answers: Answers) -> bool:
    """Whether every answer that says something has likelihoods."""
    if len(answers.likelihoods) != len(answers.texts):
        return False
    return all(one.chosen or not text.strip() for one, text in zip(answers.likelihoods, answers.texts, strict=True))


def _parting(a: str, b: str) -> int:
    """The first character at which two texts differ."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), min(len(a), len(b)))


def _is_far(baseline: str, candidate: str, likelihood: Likelihood) -> bool:
    gap = likelihood.gap_at(_parting(baseline, candidate))
    return gap is not None and gap > NEAR_TIE


def _ends_early(baseline: str, candidate: str) -> bool:
    """Whether an answer is the beginning of the baseline's."""
    return baseline.startswith(candidate.rstrip()) and len(candidate.rstrip()) < len(baseline.rstrip())


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> float | None:
    """How alike two sets of texts are written; None where they hold too few letters to tell."""
    counts = [_letter_pairs(" ".join(texts)) for texts in (ours, theirs)]
    if min(count.total() for count in counts) < ALIKE_NEEDS_LETTERS:
        return None
    one, other = counts
    product = sum(count * other[pair] for pair, count in one.items())
    return product / math.sqrt(sum(x * x for x in one.values()) * sum(x * x for x in other.values()))


def _letter_pairs(text: str) -> Counter[str]:
    """Pairs of neighbouring letters, the edges of words among them."""
    found: Counter[str] = Counter()
    for word in re.findall(r"[^\W\d_]+", text.lower()):
        found.update(a + b for a, b in pairwise(f" {word} "))
    return found


def _repeating(texts: Sequence[str]) -> float:
    """Share of texts that repeat themselves."""

    def repeats(text: str) -> bool:
        words = re.findall(r"\S+", text)
        runs = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
        return len(runs) >= 2 * NGRAM and 1 - len(set(runs)) / len(runs) >= REPEATING

    return sum(map(repeats, texts)) / len(texts) if texts else 0.0
