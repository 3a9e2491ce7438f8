"""Flags of command lines: how a value is written, and which of a user's own arguments say what a setting says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_PREFIX = 4
"""Letters from which on a shortened flag counts as the whole one, as some parsers take it."""


@dataclass(frozen=True)
class Flag:
    """How one setting is written. A setting that is not given writes nothing, whatever its type.

    Args:
        name: the flag in front of a value, or what says true.
        off: what says false; None: the flag is left out, and the engine's default is false.
        words: text values that are said as true or false.
    """

    name: str
    off: str | None = None
    words: Mapping[str, bool] | None = None

    def write(self, value: Any) -> list[str]:
        """The arguments that say the value."""
        if self.words is not None and isinstance(value, str):
            value = self.words[value]
        if isinstance(value, bool):
            said = self.name if value else self.off
            return [said] if said else []
        return [self.name, str(value)]

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that it writes."""
        return tuple(name for name in (self.name, self.off) if name)


def json_text(value: Mapping[str, Any]) -> str:
    """A flag's JSON value: one spelling per value, so that equal settings give equal command lines."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def flag_of(argument: str) -> str | None:
    """The flag of one argument, in dashes and without its value or inner keys; None where it is none.

    `--a_b=3`, `--a-b.c 3` and `--a-b` are one flag.
    """
    if not argument.startswith("-") or argument.lstrip("-")[:1].isdigit() or argument.strip("-") == "":
        return None
    name = argument.partition("=")[0].partition(".")[0]
    dashes = len(name) - len(name.lstrip("-"))
    return name[:dashes] + name[dashes:].replace("_", "-")


def flags_of(arguments: Iterable[str]) -> list[str]:
    """The flags among arguments, each once, in order."""
    return list(dict.fromkeys(flag for argument in arguments if (flag := flag_of(argument)) is not None))


def extra_problems(extra: Any, owned: Mapping[str, str]) -> list[str]:
    """What is wrong with a user's further arguments: the last of two equal flags would win unseen.

    Args:
        extra: `engine.args.extra`.
        owned: flag → the setting (or the part of the tuner) that says it.
    """
    if not isinstance(extra, Sequence) or isinstance(extra, str):
        return ["extra: must be a list of arguments such as ['--some-flag', 'value']"]
    found = []
    for argument in map(str, extra):
        flag = flag_of(argument)
        if flag is None:
            continue
        for known, setting in owned.items():
            shortened = flag.startswith("--") and len(flag) >= 2 + MIN_PREFIX and known.startswith(flag)
            if flag == known or shortened:
                found.append(f"extra: {argument.partition('=')[0]} is said by {setting}; say it there")
                break
    return found
