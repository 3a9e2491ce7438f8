"""Log rules: which line of a server's log means which failure class, one data file per engine, and the user's own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tuner.launch.kinds import KINDS

WRAPPER = "wrapper"
"""The kind of a user's rule for a line that only reports another error."""

OWN_KINDS = (*KINDS, "oom", "crash", WRAPPER)
_KEYS = ("kind", "pattern", "examples", "not")


@dataclass(frozen=True)
class Rule:
    """A pattern that is searched for in each line. `kind` is a failure class, "oom" or "crash"; "" for a wrapper."""

    kind: str
    pattern: re.Pattern[str]
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleBook:
    """The rules of one engine, the generic ones included.

    `wrappers` match errors that only report another one; `stages` match what a start announces, and their `kind` says
    in words what the server is then doing.
    """

    causes: tuple[Rule, ...]
    wrappers: tuple[Rule, ...]
    stages: tuple[Rule, ...] = ()

    def cause(self, line: str) -> Rule | None:
        """The first cause that matches the line."""
        return next((rule for rule in self.causes if rule.pattern.search(line)), None)

    def is_wrapper(self, line: str) -> bool:
        """Whether the line only says that something else went wrong."""
        return any(rule.pattern.search(line) for rule in self.wrappers)

    def stage(self, line: str) -> str:
        """What the server is doing from this line on; "" when it does not say."""
        return next((rule.kind for rule in self.stages if rule.pattern.search(line)), "")


def names() -> list[str]:
    """The engines that have rules of their own, and "generic"."""
    return sorted(entry.name[:-5] for entry in files(__package__).iterdir() if entry.name.endswith(".yaml"))


def rule_book(engine: str, own: Sequence[Mapping[str, Any]] = ()) -> RuleBook:
    """The rules for one engine: the user's `own`, then its own, then the generic ones.

    An engine without a file of its own has only the generic ones.
    """
    book = _rule_book(engine)
    if not own:
        return book
    rules = tuple(map(_rule, own))
    wrappers = tuple(rule for rule in rules if rule.kind == WRAPPER)
    causes = tuple(rule for rule in rules if rule.kind != WRAPPER)
    return replace(book, causes=(*causes, *book.causes), wrappers=(*wrappers, *book.wrappers))


@lru_cache
def _rule_book(engine: str) -> RuleBook:
    books = [_load(engine)] if engine != "generic" and engine in names() else []
    books.append(_load("generic"))
    return RuleBook(
        causes=tuple(rule for book in books for rule in book.causes),
        wrappers=tuple(rule for book in books for rule in book.wrappers),
        stages=tuple(rule for book in books for rule in book.stages),
    )


def _load(name: str) -> RuleBook:
    data = yaml.safe_load(files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    sections = (data["causes"], data["wrappers"], data.get("stages", ()))
    return RuleBook(*(tuple(map(_rule, section)) for section in sections))


def _rule(entry: Mapping[str, Any]) -> Rule:
    return Rule(
        kind=entry.get("kind", ""),
        pattern=re.compile(entry["pattern"]),
        examples=tuple(entry.get("examples", ())),
        counterexamples=tuple(entry.get("not", ())),
    )


def own_problems(rules: Any) -> list[tuple[tuple[str | int, ...], str]]:
    """What is wrong with a user's log rules, all at once: where in them, and a sentence.

    Args:
        rules: a list of mappings with `kind` and `pattern`, and `examples` and `not` (lines that it must match, and
            must not); or the path of a YAML file that holds such a list.
    """
    if not isinstance(rules, str):
        return [*_list_problems(rules)]
    try:
        data = yaml.safe_load(Path(rules).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return [((), f"{rules} cannot be read: {getattr(error, 'strerror', None) or error}")]
    except yaml.YAMLError as error:
        return [((), f"{rules} is not YAML: {' '.join(str(error).split())}")]
    return [((), f"{rules}, rule {_place(place)}: {message}") for place, message in _list_problems(data)]


def _place(place: tuple[str | int, ...]) -> str:
    return " ".join(str(part + 1) if isinstance(part, int) else part for part in place) or "list"


def _list_problems(rules: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        yield (), "must be a list of rules such as {kind: oom, pattern: 'arena is full'}, or the name of a file of them"
        return
    for i, rule in enumerate(rules):
        for place, message in _rule_problems(rule):
            yield (i, *place), message


def _rule_problems(rule: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for name in rule:
        if name not in _KEYS:
            yield (name,), _unknown(str(name), _KEYS)
    if "kind" not in rule:
        yield (), "has no kind"
    elif rule["kind"] not in OWN_KINDS:
        yield ("kind",), _unknown(str(rule["kind"]), OWN_KINDS)
    if not isinstance(rule.get("pattern"), str) or not rule["pattern"]:
        yield ("pattern",) if "pattern" in rule else (), "needs a pattern: a regular expression, as text"
        return
    try:
        pattern = re.compile(rule["pattern"])
    except re.error as error:
        yield ("pattern",), f"is not a regular expression: {error}"
        return
    if pattern.search(""):
        yield ("pattern",), "matches an empty line, so it would match every one"
    for name, wanted in (("examples", True), ("not", False)):
        lines = rule.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            yield (name,), "must be a list of log lines, in quotes"
            continue
        for i, line in enumerate(lines):
            if bool(pattern.search(line)) != wanted:
                yield (name, i), f"the pattern {'does not match' if wanted else 'matches'} {line!r}"


def _unknown(name: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1)
    meant = f"; did you mean '{close[0]}'?" if close else "."
    return f"'{name}' is unknown{meant} Valid: {', '.join(valid)}"
