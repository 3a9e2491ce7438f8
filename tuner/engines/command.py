"""Any OpenAI-compatible server, started by a command line that the user writes as a template.

    engine:
      kind: command
      model: my-model
      args:
        command: [my-server, --listen, "{host}:{port}", --model, "{model}", --draft, "{num_steps?}"]
        ready_path: /health
        info_path: /server_info
        served_model: my-model
        log_rules: [{kind: oom, pattern: 'arena is full'}]
        tp: 2

`{name}` stands for `host`, `port`, `model`, a parameter or another key of `args`; `{{` and `}}` are plain braces.
For an inactive parameter, `{name?}` drops the element and, when it is all of the element, the flag in front of it.
Parameters that are environment variables are called `env.NAME` and need no placeholder. There is no shell: an element
is one argument, whatever it holds. `log_rules` say what lines of this server's log mean, before the generic rules do:
a list, or the name of a YAML file with such a list.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tuner.engines.base import Mismatch, SettingSpec, compare, duplicates, env_problems
from tuner.errors import UsageError
from tuner.records import LaunchRecord, Setting

_OWN = ("command", "ready_path", "info_path", "served_model", "version", "log_rules")
_BUILT_IN = ("host", "port", "model")


class _AnySetting(Mapping[str, SettingSpec]):
    """A server of the user's has the settings that the user's template names."""

    def __getitem__(self, name: str) -> SettingSpec:
        return SettingSpec("any", "a placeholder of the command")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class CommandEngine:
    """A server of the user's own. `args` hold the command, its paths, and fixed values for the template."""

    kind = "command"
    settings: Mapping[str, SettingSpec] = _AnySetting()
    hot: frozenset[str] = frozenset()

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """See `Engine.problems`.

        A setting that no placeholder uses is a problem: it could change nothing, and would be measured as if.
        """
        found = duplicates(args, settings) + _shape(args)
        if found:
            return found
        used: set[str] = set()
        values = _values(args, settings)
        for element in args["command"]:
            used |= _check(str(element), values, found)
        if "port" not in used:
            found.append("args.command: {port} is missing; the server must listen on the port that it is given")
        found += [
            f"{name}: is used by no placeholder of args.command, so it would change nothing"
            for name in (*args, *settings)
            if name not in (*_OWN, *used)
        ]
        return found

    def record(
        self,
        *,
        model: str,
        args: Mapping[str, Any],
        env: Mapping[str, str | None],
        settings: Mapping[str, Setting],
        host: str,
        port: int,
    ) -> LaunchRecord:
        """See `Engine.record`."""
        found = self.problems(args, settings) + env_problems(env)
        if found:
            raise UsageError("; ".join(found))
        values = {**_values(args, settings), "host": host, "port": port, "model": model}
        argv = _argv([str(element) for element in args["command"]], values)
        return LaunchRecord(
            engine=self.kind,
            engine_version=self.version() if "version" not in args else str(args["version"]),
            model=model,
            argv=tuple(argv),
            env=dict(env),
            host=host,
            port=port,
            settings=dict(settings),
            expected=dict(settings),
            served_model=str(args.get("served_model", model)),
            ready_path=str(args.get("ready_path", "/health")),
            info_path=str(args["info_path"]) if "info_path" in args else None,
            log_rules=_log_rules(args.get("log_rules", ())),
        )

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        """See `Engine.mismatches`. What the server does not mention is unknown rather than wrong."""
        info = server_info if isinstance(server_info.get("effective"), Mapping) else {"effective": server_info}
        return compare(record.expected, info, all_told=False)

    def version(self) -> str:
        """Not known, unless the space file says it (`args.version`)."""
        return "unknown"

    def check_model(self, model: str) -> str | None:
        """Only the server can tell; an empty name is wrong everywhere."""
        return None if model.strip() else "is empty"


def _log_rules(rules: Any) -> tuple[Mapping[str, Any], ...]:
    """The rules of a list or a file; what is wrong with them is found before a study begins.

    Raises:
        UsageError: the file cannot be read any more.
    """
    if not isinstance(rules, str):
        return tuple(rules)
    try:
        return tuple(yaml.safe_load(Path(rules).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
        raise UsageError(f"args.log_rules: {rules} cannot be read: {error}") from error


def _values(args: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """What placeholders stand for; host, port and model are filled in by `record`."""
    fixed = {name: value for name, value in args.items() if name not in _OWN}
    return {**dict.fromkeys(_BUILT_IN, ""), **fixed, **settings}


def _shape(args: Mapping[str, Any]) -> list[str]:
    found = []
    command = args.get("command")
    if not isinstance(command, (list, tuple)) or not command:
        found.append("args.command: is needed: the server's command line as a list, e.g. [my-server, --port, '{port}']")
    elif any("\0" in str(element) for element in command):
        found.append("args.command: holds a NUL character, which no argument can")
    for name in ("ready_path", "info_path"):
        if name in args and not (isinstance(args[name], str) and args[name].startswith("/")):
            found.append(f"args.{name}: {args[name]!r} is not a path; it begins with '/'")
    found += [f"args.{name}: is the tuner's own; choose another name" for name in _BUILT_IN if name in args]
    for name, value in args.items():
        if name not in _OWN and isinstance(value, (list, tuple, dict)):
            close = difflib.get_close_matches(name, _OWN, n=1)
            meant = f"; did you mean '{close[0]}'?" if close else "; a value for the template is one text or number"
            found.append(f"args.{name}: is a list{meant}")
    return found


def _check(text: str, values: Mapping[str, Any], found: list[str]) -> set[str]:
    """The placeholders of one element; what is wrong with them goes to `found`."""
    try:
        fields = _fields(text)
    except ValueError as error:
        found.append(f"args.command: {text!r} {error}")
        return set()
    names = set()
    for _, name, optional in fields:
        if name is None:
            continue
        names.add(name)
        if name not in values and not optional:
            close = difflib.get_close_matches(name, values, n=1)
            meant = f"; did you mean '{{{close[0]}}}'?" if close else ""
            found.append(
                f"args.command: {{{name}}} stands for nothing here{meant} (write {{{name}?}} for a parameter that is "
                f"not always active)"
            )
    return names


def _fields(text: str) -> list[tuple[str, str | None, bool]]:
    """The parts of a template: plain text, the placeholder behind it, whether that is optional.

    Raises:
        ValueError: for a brace that is not closed, or anything but a name between braces.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"is not a template ({error}); write {{{{ and }}}} for plain braces") from error
    fields: list[tuple[str, str | None, bool]] = []
    for plain, field, spec, conversion in parts:
        if field is None:
            fields.append((plain, None, False))
            continue
        name = field.removesuffix("?")
        if spec or conversion or not name.isidentifier():
            shown = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(f"holds {{{shown}}}, which is not a name; write {{{{ and }}}} for plain braces")
        fields.append((plain, name, field.endswith("?")))
    return fields


def _argv(command: list[str], values: Mapping[str, Any]) -> list[str]:
    argv: list[str] = []
    bare_flag = False
    for element in command:
        text = _filled(element, values)
        if text is not None:
            argv.append(text)
            bare_flag = element.startswith("-") and "{" not in element and "=" not in element
            continue
        if bare_flag and _is_one_placeholder(element):
            argv.pop()
        bare_flag = False
    return argv


def _is_one_placeholder(element: str) -> bool:
    fields = _fields(element)
    return len(fields) == 1 and fields[0][0] == "" and fields[0][1] is not None


def _filled(text: str, values: Mapping[str, Any]) -> str | None:
    """The text with its placeholders replaced; None when an optional one stands for nothing."""
    result = ""
    for plain, name, _ in _fields(text):
        result += plain
        if name is not None:
            if name not in values:
                return None
            value = values[name]
            result += ("true" if value else "false") if isinstance(value, bool) else str(value)
    return result
