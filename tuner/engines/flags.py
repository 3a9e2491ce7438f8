"""Flags of command lines: how a value is written, and which of a user's own arguments say what a setting says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TUNER = "the tuner itself"
"""What says a flag that no setting says."""

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


def _odd(argument: Any) -> bool:
    if isinstance(argument, str):
        return "\0" in argument
    return isinstance(argument, bool) or not isinstance(argument, (int, float))


def extra_problems(extra: Any, owned: Mapping[str, str]) -> list[str]:
    """What is wrong with a user's further arguments: the last of two equal flags would win unseen.

    Args:
        extra: `engine.args.extra`.
        owned: flag → the setting (or the part of the tuner) that says it.
    """
    if not isinstance(extra, Sequence) or isinstance(extra, str):
        return ["extra: must be a list of arguments such as ['--some-flag', 'value']"]
    found = [f"extra: {each!r} is no argument; valid: text in quotes, or a number" for each in extra if _odd(each)]
    if found:
        return found
    for place, argument in enumerate(map(str, extra)):
        flag = flag_of(argument)
        if flag is None and place == 0:
            found.append(f"extra: '{argument}' stands behind no flag")
        if flag is None:
            continue
        if len(words := argument.partition("=")[0].split(maxsplit=1)) > 1:
            found.append(f"extra: '{argument}' is one argument with a space in it; write '{words[0]}' by itself")
            continue
        for known, setting in owned.items():
            shortened = flag.startswith("--") and len(flag) >= 2 + MIN_PREFIX and known.startswith(flag)
            if flag == known or shortened:
                advice = "leave it out" if setting == TUNER else "say it there"
                found.append(f"extra: {argument.partition('=')[0]} is said by {setting}; {advice}")
                break
    return found
