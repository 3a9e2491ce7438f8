"""More corpus, by the target itself: it writes the user's turn, then answers it.

Given the chat template up to where a user would speak, an instruction-tuned model samples a plausible request (Xu et
al., "Magpie", 2024). Those are short questions, mostly; people also name a field, and paste a text to be worked on. So
turns of three kinds are made: `self` as it comes, `topic` under a system prompt that names a field, and `task`, an
instruction with one of the target's own earlier answers. Each is answered under the template's own system prompt. What
repeats, is too short or too long, or never ends, is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.build import Core
from engine.errors import InvalidConfig, TemplateError
from engine.train.corpus import Conversation, append, whole
from engine.train.target import answer

log = logging.getLogger(__name__)

_BATCH = 192
"""Turns that are made, then answered, at once: more than run together, so that few wait for the longest."""

_USER_TOKENS = 128
_RESPONSE_TOKENS = 224
_PASSAGE_TOKENS = 32, 192
_TEMPERATURES = (0.0, 0.7)
"""Of answers, half each: acceptance is measured on greedy ones; sampled ones keep the head from knowing only those."""

KINDS = ("self", "topic", "task")

TOPICS = (
    "You help programmers. They ask for code, or paste some.",
    "You solve problems of mathematics and physics, step by step.",
    "You write and improve letters, emails and announcements.",
    "You turn notes, lists and tables into JSON.",
    "You explain to curious people how things work.",
    "You give advice on home, garden, kitchen, health, work and travel.",
    "You write stories, poems and dialogues.",
    "You translate from one language into another.",
    "You make plans, lists and comparisons.",
    "You know history, geography, law and the sciences.",
)

PROSE = (
    "Sum this up in two sentences.",
    "Name the most important points of the text, at most four, as a list.",
    "Mend the grammar and the spelling of this text; leave everything else as it is.",
    "Say this in easier words.",
    "Make this text sound formal.",
    "Make a friendly message to a colleague of it.",
    "Cut this text down to half of its length.",
    "Which claims does the author make? One on each line.",
    'Give me JSON with the keys "title", "topic" and "points" for this text.',
    "Find all names, places, dates and numbers in it and return them as JSON.",
    "Make a table in Markdown of what it says.",
    "Write three questions about the text, each with its answer.",
    "Go on with this text.",
    "What can be said for and against what is written here?",
    "Find a headline for it, and a line below.",
    "Put the text into the past tense.",
    "Tell a child what this is about.",
    "Repeat the text, with its paragraphs numbered.",
)

CODE = (
    "What happens here? Explain it line by line.",
    "What could fail in this code, and how would you mend it?",
    "Comment every step of it.",
    "Make this code shorter without changing what it does.",
    "Write the same in another programming language.",
    "Give the names in it more meaning.",
)


class Frame(Protocol):
    """What is asked of a `ChatFrame`."""

    @property
    def before(self) -> tuple[int, ...]:
        """Ids up to where a user speaks."""

    def under(self, system: str) -> tuple[int, ...]:
        """The same with this system prompt. Raises `TemplateError` where the template has none."""

    def prompt(self, user: Sequence[int]) -> tuple[int, ...]:
        """All ids up to where the answer begins."""

    def ids(self, text: str) -> tuple[int, ...]:
        """Of a piece of text."""

    def text(self, ids: Sequence[int]) -> str:
        """The reverse."""


def generate(
    core: Core,
    frame: Frame,
    file: Path,
    tokens: int,
    stop: Sequence[int],
    tick: Callable[[int], None] = lambda _made: None,
) -> int:
    """Append conversations to `file` until it holds at least `tokens` response tokens; how many it holds.

    Each batch is written when it is whole; its kind, temperature and seed follow from what is there, so that a killed
    run goes on where it was.

    Raises:
        InvalidConfig: no turn that the target makes can be used.
    """
    known = whole(file)
    seen = {c.user for c in known}
    made = sum(len(c.response) for c in known)
    kinds = _possible(frame)
    empty = 0
    while made < tokens:
        kind, temperature = _rarest(known, kinds)
        seed = len(known) + empty
        users = _tasks(frame, known, stop, seed) if kind == "task" else _users(core, _begins(frame, kind), stop, seed)
        most = core.context_length - _RESPONSE_TOKENS
        fresh = [user for user in dict.fromkeys(users) if user not in seen and len(frame.prompt(user)) <= most]
        seen.update(fresh)
        answers = answer(
            core, [frame.prompt(user) for user in fresh], _RESPONSE_TOKENS, stop, temperature, 7_919 * (seed + 1)
        )
        done = [
            Conversation(user, tuple(response), temperature, kind)
            for user, response in zip(fresh, answers, strict=True)
            if len(response) > 8
        ]
        if done:
            append(file, done, "self")
        else:
            empty += 1
            kinds = tuple(other for other in kinds if other != kind)
            if not kinds:
                raise InvalidConfig(
                    f"the model writes no turn that can be answered within its {core.context_length} tokens: none of "
                    "those of the last batches ended, was new, and was answered in 8 tokens or more"
                )
        known += done
        made += sum(len(c.response) for c in done)
        tick(made)
    return made


def _rarest(known: Sequence[Conversation], kinds: Sequence[str]) -> tuple[str, float]:
    """The kind, and its temperature, of which there are fewest; tasks once there is something to be their text."""
    count = Counter((c.kind, c.temperature) for c in known)
    of = {kind: sum(count[kind, t] for t in _TEMPERATURES) for kind in kinds}
    kind = min((k for k in kinds if k != "task" or known or len(kinds) == 1), key=lambda k: (of[k], kinds.index(k)))
    return kind, min(_TEMPERATURES, key=lambda t: count[kind, t])


def _possible(frame: Frame) -> tuple[str, ...]:
    try:
        if frame.under(TOPICS[0]) != frame.before:
            return KINDS
        why: object = "the template leaves them out"
    except TemplateError as error:
        why = error
    log.warning("no turns under system prompts: %s", why)
    return tuple(kind for kind in KINDS if kind != "topic")


def _begins(frame: Frame, kind: str) -> list[tuple[int, ...]]:
    return [frame.under(topic) for topic in TOPICS] if kind == "topic" else [frame.before]


def _users(core: Core, begins: Sequence[tuple[int, ...]], stop: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """User turns that ended by themselves, without their end token."""
    prompts = [begins[i % len(begins)] for i in range(_BATCH)]
    turns = answer(core, prompts, _USER_TOKENS, stop, 1.0, 1_000_003 * (seed + 1))
    ends = set(stop)
    return [
        tuple(turn[:-1])
        for turn in turns
        if len(turn) > 4 and turn[-1] in ends and not Conversation((), tuple(turn), 0.0, "").loops
    ]


def _tasks(frame: Frame, known: Sequence[Conversation], stop: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Instructions with answers of the target's own as the text that they are about; none before there are such."""
    ends = set(stop)
    least, most = _PASSAGE_TOKENS
    passages = [tuple(token for token in c.response if token not in ends) for c in known if not (c.loops or c.held_out)]
    passages = [passage for passage in passages if least <= len(passage) <= most]
    if not passages:
        return []
    rng = np.random.default_rng(seed)
    made = []
    for i in rng.permutation(len(passages))[:_BATCH]:
        instructions = CODE if "```" in frame.text(passages[i]) else PROSE
        instruction = instructions[rng.integers(len(instructions))]
        if rng.random() < 0.5:
            made.append((*frame.ids(f"{instruction}\n\n"), *passages[i]))
        else:
            made.append((*passages[i], *frame.ids(f"\n\n{instruction}")))
    return made
