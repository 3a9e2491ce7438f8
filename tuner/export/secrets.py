"""Secrets in a launch record: left out of every artefact, with the variable that takes their place."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from tuner.errors import UsageError
from tuner.records import LaunchRecord
from tuner.secrets import find, is_secret
from tuner.secrets import without_secrets as hidden

TOLD = 8
"""Characters from which on a secret is looked for wherever else it stands; shorter ones are found by chance."""


LONGEST_FLAG = 8
"""Characters of a flag with one dash, such as `-tp`."""


@dataclass(frozen=True)
class Secret:
    """The place of a secret within an argument, by the variable that a deployment reads it from."""

    variable: str
    value: str


Parts = tuple[str | Secret, ...]


def secret_env(record: LaunchRecord) -> dict[str, str]:
    """Variable of the record's environment → variable that a deployment reads it from (itself, as a valid name).

    One whose value holds a secret, such as an address with a password, is left out whole.
    """
    return {name: _variable(name) for name, value in record.env.items() if value and (is_secret(name) or find(value))}


def secret_args(record: LaunchRecord) -> dict[int, Parts]:
    """Index in argv → its text in parts, for each argument that is a secret, or holds one.

    That are values behind a flag that says so (`--api-key X`, `--api-key=X`), what looks like a secret by its name or
    shape within an argument (a header, JSON, an address), and any of these where it stands once more.
    """
    found: dict[int, Parts] = {}
    most = None if record.engine == "vllm" else 1  # vLLM takes several keys behind one --api-key
    for i, element in enumerate(record.argv):
        flag, equals, value = element.partition("=")
        named = flag.startswith("-") and is_secret(flag)
        if named and equals and value:
            found[i] = (flag + "=", Secret(_variable(flag), value))
        elif i in found:
            continue
        elif inner := find(element):
            found[i] = _cut(element, [(each.start, each.end, _variable(each.name)) for each in inner])
        if named and not equals:
            behind = itertools.takewhile(lambda at: _is_value(record.argv[at]), range(i + 1, len(record.argv)))
            found |= {at: (Secret(_variable(flag), record.argv[at]),) for at in itertools.islice(behind, most)}
    variables = secret_env(record)
    told = {variables[name]: value for name, value in record.env.items() if value and name in variables}
    known = {part.value: part.variable for parts in found.values() for part in parts if isinstance(part, Secret)}
    known |= {value: variable for variable, value in told.items()}
    for i, element in enumerate(record.argv):
        if i not in found and (again := _again(element, known)):
            found[i] = _cut(element, again)
    return {i: tuple(_apart(part, told) for part in parts) for i, parts in found.items()}


def _is_value(argument: str) -> bool:
    """Whether what stands behind a flag is its value; a key that begins with a dash is longer than short flags."""
    return not argument.startswith("-") or (len(argument) > LONGEST_FLAG and not argument.startswith("--"))


def _again(text: str, known: dict[str, str]) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, str]] = []
    for value, variable in known.items():
        if len(value) >= TOLD:
            spans += [(at.start(), at.end(), variable) for at in re.finditer(re.escape(value), text)]
    return sorted(spans)


def _cut(text: str, spans: list[tuple[int, int, str]]) -> Parts:
    parts: list[str | Secret] = []
    rest = 0
    for start, end, variable in spans:
        if start >= rest:
            parts += [text[rest:start], Secret(variable, text[start:end])]
            rest = end
    return tuple(part for part in (*parts, text[rest:]) if part)


def _apart(part: str | Secret, told: dict[str, str]) -> str | Secret:
    """The same with a variable of its own for each secret: two values never share one. `told` remembers them."""
    if isinstance(part, str):
        return part
    name, number = part.variable, 2
    while told.setdefault(name, part.value) != part.value:
        name, number = f"{part.variable}_{number}", number + 1
    return Secret(name, part.value)


def secret_variables(record: LaunchRecord) -> list[str]:
    """The variables that a deployment must be given, sorted."""
    inner = [part.variable for parts in secret_args(record).values() for part in parts if isinstance(part, Secret)]
    return sorted({*secret_env(record).values(), *inner})


def without_secrets(record: LaunchRecord) -> LaunchRecord:
    """The record with `${VARIABLE}` in place of each secret; the same record when it holds none."""
    variables = secret_env(record)
    env = {name: f"${{{variables[name]}}}" if name in variables else value for name, value in record.env.items()}
    argv = list(record.argv)
    for i, parts in secret_args(record).items():
        argv[i] = "".join(f"${{{part.variable}}}" if isinstance(part, Secret) else part for part in parts)
    return replace(record, env=env, argv=tuple(argv))


def refuse_secrets(record: LaunchRecord) -> None:
    """Raises for a record with a secret where no format has a place for a variable.

    Raises:
        UsageError: a setting, a name or a file holds what looks like a secret, or one that the command holds too.
    """
    shown = without_secrets(record)
    known = [part.value for parts in secret_args(record).values() for part in parts if isinstance(part, Secret)]
    known += [value for name, value in record.env.items() if value and name in secret_env(record)]
    for name, value in replace(shown, argv=(), env={}).to_dict().items():
        texts = list(_texts(value))
        again = any(secret in text for secret in known if len(secret) >= TOLD for text in texts)
        if again or hidden(value) != value:
            raise UsageError(
                f"the launch record's {name} hold{'' if name.endswith('s') else 's'} what looks like a secret, and an "
                "export could not leave it out there; take it out of the space. Nothing was written."
            )


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def _variable(name: str) -> str:
    variable = re.sub(r"\W", "_", name.lstrip("-"), flags=re.ASCII).upper()
    return variable if not variable[:1].isdigit() else f"_{variable}"
