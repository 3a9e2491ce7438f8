"""Log rules: which line of a server's log means which failure class, one data file per engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import yaml


@dataclass(frozen=True)
class Rule:
    """A pattern that is searched for in each line. `kind` is a failure class, "oom" or "crash"; "" for a wrapper."""

    kind: str
    pattern: re.Pattern[str]
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleBook:
    """The rules of one engine, the generic ones included. `wrappers` match errors that only report another one."""

    causes: tuple[Rule, ...]
    wrappers: tuple[Rule, ...]

    def cause(self, line: str) -> Rule | None:
        """The first cause that matches the line."""
        return next((rule for rule in self.causes if rule.pattern.search(line)), None)

    def is_wrapper(self, line: str) -> bool:
        """Whether the line only says that something else went wrong."""
        return any(rule.pattern.search(line) for rule in self.wrappers)


def names() -> list[str]:
    """The engines that have rules of their own, and "generic"."""
    return sorted(entry.name[:-5] for entry in files(__package__).iterdir() if entry.name.endswith(".yaml"))


@lru_cache
def rule_book(engine: str) -> RuleBook:
    """The rules for one engine: its own before the generic ones; only the generic ones for an engine without any."""
    books = [_load(engine)] if engine != "generic" and engine in names() else []
    books.append(_load("generic"))
    return RuleBook(
        causes=tuple(rule for book in books for rule in book.causes),
        wrappers=tuple(rule for book in books for rule in book.wrappers),
    )


def _load(name: str) -> RuleBook:
    data = yaml.safe_load(files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return RuleBook(*(tuple(map(_rule, data[section])) for section in ("causes", "wrappers")))


def _rule(entry: dict) -> Rule:
    return Rule(
        kind=entry.get("kind", ""),
        pattern=re.compile(entry["pattern"]),
        examples=tuple(entry.get("examples", ())),
        counterexamples=tuple(entry.get("not", ())),
    )
