"""What is wrong with a space file, all at once, each with its line and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.errors import UsageError


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong. `line` counts from 1; 0 is the file as a whole, or an override from the command line."""

    line: int
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class SpaceProblems(UsageError):
    """A space file that cannot be used. `problems` are in the order of lines; nothing was started."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(set(problems)))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [
            f"{source}:{problem.line}: {problem}" if problem.line else f"{source}: {problem}"
            for problem in self.problems
        ]
        super().__init__("\n".join([f"{source} has {count}; nothing was started.", *lines]))


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The name that was probably meant, or None."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown(name: str, valid: Iterable[str], *, most: int = 12) -> str:
    """The tail of a message about an unknown name: the nearest one, and what is valid."""
    options = list(dict.fromkeys(valid))
    close = nearest(name, options)
    meant = f"; did you mean '{close}'?" if close else ""
    shown = ", ".join(options[:most]) + (", …" if len(options) > most else "")
    return f"'{name}' is unknown{meant} Valid: {shown}" if close else f"'{name}' is unknown. Valid: {shown or 'none'}"
