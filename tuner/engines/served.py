"""What the adapters of SGLang, vLLM and llama-server have in common: from checked settings to a launch record."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tuner.engines import installed
from tuner.engines.allreduce import Fabric
from tuner.engines.base import (
    Mismatch,
    Resolution,
    SettingSpec,
    compare,
    duplicates,
    env_problems,
    unknown_names,
    value_problems,
)
from tuner.engines.drafts import attention, broken
from tuner.engines.flags import TUNER, extra_problems, flags_of
from tuner.engines.installed import Program
from tuner.engines.names import foreign
from tuner.engines.neutral import SPECULATIVE
from tuner.engines.speculation import shape_problems
from tuner.engines.versions import nearest
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import LaunchRecord, Setting

OWN = ("program", "extra", "version")
"""Keys of `engine.args` that are no settings: the engine's program, further arguments, the version in a container."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.:-]*", re.ASCII)


@dataclass
class Told:
    """What a server is told: its flags, the environment difference, and files that flags name (path → text)."""

    argv: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class ServedEngine(ABC):
    """An engine of its own, found in PATH or where `engine.args.program` says. Subclasses say what is its own.

    `chains` are the drafters that do not branch; `owned` maps each flag that the adapter writes to what says it;
    `spelled` says for people how each setting is said; `also_read` and `trial_env` are as in `LaunchRecord`. What these
    GPUs could not do is refused by `fabric`.
    """

    kind: ClassVar[str]
    settings: ClassVar[Mapping[str, SettingSpec]]
    hot: frozenset[str] = frozenset()
    chains: ClassVar[tuple[str, ...]]
    owned: ClassVar[Mapping[str, str]]
    spelled: ClassVar[Mapping[str, str]]
    trial_env: ClassVar[Mapping[str, str]] = {}
    also_read: ClassVar[Mapping[str, str]] = {}
    info_path: ClassVar[str]
    flush_path: ClassVar[str | None] = None
    fabric: Fabric | None = None

    # -- what subclasses say ------------------------------------------------------------------------------------

    @abstractmethod
    def program(self, args: Mapping[str, Any]) -> Program:
        """How it is started."""

    @abstractmethod
    def completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with all that a rule of the engine would choose otherwise."""

    @abstractmethod
    def own_problems(self, values: Mapping[str, Any]) -> list[str]:
        """What is wrong with the completed settings on this engine."""

    @abstractmethod
    def told(self, values: Mapping[str, Any]) -> Told:
        """How the completed settings are said."""

    @abstractmethod
    def address(self, model: str, served: str, host: str, port: int) -> list[str]:
        """The arguments that say which model and where to listen."""

    @abstractmethod
    def effective(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What the server says of itself, by neutral name. Raises nothing, whatever the server says."""

    # -- the same for all ---------------------------------------------------------------------------------------

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """See `Engine.problems`."""
        return self._problems(args, settings, self.fabric)

    def _problems(
        self, args: Mapping[str, Any], settings: Mapping[str, Setting], fabric: Fabric | None = None
    ) -> list[str]:
        values = {**{name: value for name, value in args.items() if name not in OWN}, **settings}
        found = duplicates(args, settings) + unknown_names(args, [*self.settings, *OWN], self.kind)
        found += unknown_names(settings, self.settings, self.kind)
        found += value_problems(values, self.settings)
        found += extra_problems(args.get("extra", []), self.owned) + _own_words(args)
        found += [] if found else _of_another_engine(self.kind, args.get("extra", []))
        if found:
            return found
        found = shape_problems(values, self.chains, SPECULATIVE)
        if found:
            return found
        complete = self.completed(values)
        known, _ = nearest(self.kind, args.get("version") or self._here(args))
        facts = fabric.facts(complete.get("tp", 1)) if fabric else {}
        return self.own_problems(complete) + known.problems({**complete, **facts})

    def model_problems(self, model: str, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """See `Modelled.model_problems`."""
        values = {**{name: value for name, value in args.items() if name not in OWN}, **settings}
        draft = values.get("draft_head") or values.get("draft_model")
        asked = {"model.attention": model, "draft.attention": draft}
        told = {name: kind for name, one in asked.items() if one and (kind := attention(str(one)))}
        if not told:
            return []
        known, _ = nearest(self.kind, args.get("version") or self._here(args))
        return known.of_model({**self.completed(values), **told})

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
        found = self._problems(args, settings) + env_problems(env)
        if problem := self.check_model(model):
            found.append(f"model: {problem}")
        values = {name: value for name, value in args.items() if name not in OWN} | dict(settings)
        told = Told() if found else self.told(self.completed(values))
        found += [
            f"env.{name}: is set by another setting ({_said(name, value)}); keep one"
            for name, value in told.env.items()
            if name in env
        ]
        if found:
            raise UsageError("; ".join(found))
        located, served = place(model)
        complete = self.completed(values)
        argv = [*self.program(args).command, *self.address(located, served, host, port), *told.argv]
        argv += [str(argument) for argument in args.get("extra", ())]
        return LaunchRecord(
            engine=self.kind,
            engine_version=str(args.get("version") or self._here(args) or "unknown"),
            model=model,
            argv=tuple(argv),
            env={**told.env, **env},
            host=host,
            port=port,
            settings=dict(settings),
            expected={name: value for name, value in complete.items() if value != "auto"},
            served_model=served,
            info_path=self.info_path,
            flush_path=self.flush_path if complete.get("prefix_cache") == "on" else None,
            trial_env=dict(self.trial_env),
            also_read=dict(self.also_read),
            files=told.files,
        )

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        """See `Engine.mismatches`. What the server does not tell is unknown, and no mismatch."""
        told = self.effective(server_info)
        return compare(record.expected, {"effective": told}, all_told=False) + self.fell_back(record, server_info)

    def fell_back(self, record: LaunchRecord, info: Mapping[str, Any]) -> list[Mismatch]:
        """What the server itself, for instance in its log, says it could not do."""
        return []

    def version(self, args: Mapping[str, Any] | None = None) -> str:
        """Of the engine that `record` would start.

        Raises:
            EnvironmentBroken: it is not here, with what to do.
        """
        args = args or {}
        return str(args["version"]) if "version" in args else installed.version(self.program(args))

    def refused(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> list[str]:
        """What the installed engine does not know of these command lines: asked before anything is launched.

        Raises:
            EnvironmentBroken: the engine is not here, or broken.
        """
        program = self.program(args)
        version = self.version(args)
        valid = installed.flags(program, version)
        arguments = [argument for record in records for argument in record.argv[len(program.command) :]]
        return self.unknown(args, arguments, valid, f"{program.engine} {version}")

    def unknown(self, args: Mapping[str, Any], arguments: Sequence[str], valid: Iterable[str], name: str) -> list[str]:
        """A sentence for each flag among arguments that is not valid, in the words of whom it belongs to."""
        found = installed.unknown_flags(arguments, valid, name)
        extra = {flag for argument in args.get("extra", ()) for flag in installed.flags_of([str(argument)])}
        return [f"extra: {s}" if s.partition(":")[0] in extra else s for s in found]

    def notes(self, args: Mapping[str, Any]) -> list[str]:
        """What a person should know of how this engine is treated."""
        _, note = nearest(self.kind, args.get("version") or self._here(args))
        return [note] if note else []

    def resolved(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> Resolution:
        """See `Installed.resolved`; most engines cannot be asked."""
        return Resolution()

    def check_model(self, model: str) -> str | None:
        """See `Engine.check_model`."""
        return folder_problem(model) or broken(model)

    def check_draft(self, named: str) -> str | None:
        """A sentence when a head or draft model is nothing that the engine could load."""
        return folder_problem(named)

    def _here(self, args: Mapping[str, Any]) -> str | None:
        """The version that is installed; None where there is none, or it is broken: `version` says so."""
        try:
            return installed.version(self.program(args))
        except EnvironmentBroken:
            return None


def command_of(args: Mapping[str, Any], default: str, *behind: str) -> tuple[str, ...]:
    """The words before an engine's flags: `engine.args.program`, one program or the whole beginning as a list.

    A path is made absolute: what is launched is also exported.
    """
    program = args.get("program", default)
    first, *further = program if isinstance(program, (list, tuple)) else (program, *behind)
    first = os.path.expanduser(first)
    return (os.path.abspath(first) if os.sep in first else first, *further)


def _own_words(args: Mapping[str, Any]) -> list[str]:
    """What is wrong with the program and the version."""
    found = []
    program = args.get("program", "x")
    words = program if isinstance(program, (list, tuple)) else [program]
    if not words or words[0] == "":
        found.append("program: is empty; name the engine's program")
    elif not all(isinstance(word, str) and "\0" not in word for word in words):
        found.append(f"program: {program!r} is not valid; valid: a program, or a list of words that begins with one")
    if not isinstance(version := args.get("version", ""), str):
        found.append(f"version: {version!r} is not text; write it in quotes, as in '0.5.23'")
    return found


def _of_another_engine(kind: str, extra: Sequence[Any]) -> list[str]:
    """Further arguments that another engine has and this one does not."""
    flags = flags_of(map(str, extra))
    return [f"extra: {said}" for flag in flags if flag.startswith("--") and (said := foreign(kind, flag))]


def place(model: str) -> tuple[str, str]:
    """A model as the command line gets it (paths absolute: an export runs elsewhere), and as clients call it."""
    path = Path(model).expanduser()
    if not path.exists():
        return model, model.rpartition("/")[2]
    path = path.resolve()
    return str(path), path.stem if path.is_file() else path.name


def local(named: Any) -> str:
    """A head or draft model as the command line gets it: a path that exists is made absolute."""
    path = Path(str(named)).expanduser()
    return str(path.resolve()) if path.exists() else str(named)


def folder_problem(model: str) -> str | None:
    """What is wrong with a model that must be a Hugging Face folder or the id of one."""
    valid = "valid: a Hugging Face folder (with config.json), or a hub id such as Qwen/Qwen3-8B"
    path = Path(model).expanduser()
    if model and path.is_dir():
        return None if (path / "config.json").is_file() else f"the folder '{model}' has no config.json; {valid}"
    if model and path.is_file():
        return f"'{model}' is a file; {valid}"
    return None if HUB_ID.fullmatch(model) else f"'{model}' does not exist; {valid}"


def _said(name: str, value: str | None) -> str:
    return f"{name} removed" if value is None else f"{name}={value}"


def owned(settings: Mapping[str, Sequence[str]], tuner: Sequence[str]) -> dict[str, str]:
    """Flag → what says it, for `ServedEngine.owned`."""
    found = {flag: f"engine.args.{name}" for name, flags in settings.items() for flag in flags}
    return {**found, **dict.fromkeys(tuner, TUNER)}
