"""What an engine is to the tuner, and the list of them."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tuner.engines.allreduce import Fabric
from tuner.errors import UsageError
from tuner.records import LaunchRecord, Setting
from tuner.secrets import is_secret

_ENGINES = {
    "bundled": "tuner.engines.bundled:BundledEngine",
    "command": "tuner.engines.command:CommandEngine",
    "llama_server": "tuner.engines.llama_server:LlamaServerEngine",
    "sglang": "tuner.engines.sglang:SglangEngine",
    "simulated": "tuner.engines.simulated.adapter:SimulatedEngine",
    "vllm": "tuner.engines.vllm:VllmEngine",
}
"""Kind → where its class stands; imported when it is asked for."""

UNSET = "unset"
"""The choice of an `env.NAME` parameter that removes the variable; an empty or "0" value is something else."""

_OFF: tuple[Setting | None, ...] = (None, False, "none", "never", "off", 0)


@dataclass(frozen=True)
class SettingSpec:
    """What is known of one setting.

    Args:
        type: of its values; an int is also taken where a float is wanted, a bool never is a number.
        doc: one line for a person.
        choices: the only valid values, when they can be listed.
        low, high: the range of numbers, ends included.
        words: texts that are valid beside numbers, for instance "never".
    """

    type: Literal["int", "float", "bool", "str", "any"]
    doc: str
    choices: tuple[Setting, ...] = ()
    low: float | None = None
    high: float | None = None
    words: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with the value and what would be valid; None when it is fine."""
        if self.type == "any" or (isinstance(value, str) and value in self.words):
            return None
        if self.choices:
            if any(value == choice and type(value) is type(choice) for choice in self.choices):
                return None
            return f"{value!r} is not valid{self._meant(value)}; valid: {self.valid}"
        if not self._type_fits(value):
            return f"{value!r} is not valid; valid: {self.valid}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low = -math.inf if self.low is None else self.low
            high = math.inf if self.high is None else self.high
            if not low <= value <= high:
                return f"{value!r} is not valid; valid: {self.valid}"
        return None

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return ", ".join(str(choice) for choice in self.choices)
        kind = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "any": "any"}
        low = "" if self.low is None else f" from {self.low:g}"
        high = "" if self.high is None else f" up to {self.high:g}"
        return " or ".join([kind[self.type] + low + high, *self.words])

    def _type_fits(self, value: Any) -> bool:
        if isinstance(value, bool):
            return self.type == "bool"
        if isinstance(value, float):
            return self.type == "float" and math.isfinite(value)
        if isinstance(value, int):
            return self.type in ("int", "float")
        return self.type == "str" and isinstance(value, str)

    def _meant(self, value: Any) -> str:
        options = {str(choice).casefold(): choice for choice in self.choices}
        close = difflib.get_close_matches(str(value).casefold(), options, n=1)
        return f"; did you mean '{options[close[0]]}'?" if close else ""


@dataclass(frozen=True)
class Mismatch:
    """A setting that is not in effect as asked; `effective` None: it is not in effect, or the server has none."""

    setting: str
    requested: Any
    effective: Any
    reason: str


class Engine(Protocol):
    """One kind of server: how it is started and what it says about itself. Stateless; starts nothing itself."""

    @property
    def kind(self) -> str:
        """Its name in a space file."""

    @property
    def settings(self) -> Mapping[str, SettingSpec]:
        """The settings it knows, by neutral name."""

    @property
    def hot(self) -> frozenset[str]:
        """Those that can be changed on a running server."""

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """Why this combination cannot work: each sentence names the setting and what would be valid."""

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
        """How to start a server with these settings.

        Raises:
            UsageError: for a combination that has `problems`.
        """

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        """What was asked for and, by the server's own words, is not in effect."""

    def version(self) -> str:
        """Of the engine that `record` would start; part of what makes two studies comparable."""

    def check_model(self, model: str) -> str | None:
        """A sentence when the model does not exist, with the nearest name."""


@dataclass(frozen=True)
class Change:
    """The request that puts a running server to the hot settings of a launch record: a POST of `body` to `path`.

    `body` names every hot setting, also those that the record leaves to the engine, so that nothing stays of what the
    server ran with before; afterwards the server must report them all as in effect.
    """

    path: str
    body: Mapping[str, Any]


@runtime_checkable
class Reconfigurable(Protocol):
    """An engine whose `hot` settings are changed on a running server."""

    @property
    def hot(self) -> frozenset[str]:
        """See `Engine.hot`."""

    def change(self, record: LaunchRecord) -> Change:
        """What makes a server, launched with other hot settings but the same cold ones, what this record starts."""


@dataclass(frozen=True)
class Resolution:
    """`refused`: the study cannot be run so. `notes`: some candidates will fail, or be something else."""

    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@runtime_checkable
class Installed(Protocol):
    """An engine that is installed apart from the tuner, so that it may be missing, or of another version."""

    def version(self, args: Mapping[str, Any] | None = None) -> str:
        """Of the engine that `engine.args` name. Raises `EnvironmentBroken` where it is not here."""

    def refused(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> list[str]:
        """Flags of these launches that it does not know, one sentence each. Raises `EnvironmentBroken`."""

    def notes(self, args: Mapping[str, Any]) -> list[str]:
        """What a person should know of how it is treated."""

    def resolved(self, args: Mapping[str, Any], records: Sequence[LaunchRecord]) -> Resolution:
        """What it would make of these launches, where it can be asked without a start; the baseline's comes first."""


@runtime_checkable
class Placed(Protocol):
    """An engine that refuses by the GPUs that it is to run on; None where nothing is known of them."""

    fabric: Fabric | None


@runtime_checkable
class Modelled(Protocol):
    """An engine that refuses by what its model is, where that can be told without loading it."""

    def model_problems(self, model: str, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """Why settings, without `problems` of their own, cannot work with this model."""


def version_of(engine: Engine, args: Mapping[str, Any], *, contained: bool = False) -> str:
    """The version of the engine that `args` name; "unknown" within a container, unless `args.version` says it.

    Raises:
        EnvironmentBroken: it is not here.
    """
    if not isinstance(engine, Installed):
        return engine.version()
    return str(args.get("version", "unknown")) if contained else engine.version(args)


def get_engine(kind: str) -> Engine:
    """The engine of this kind.

    Raises:
        UsageError: for an unknown kind, with the nearest one.
    """
    if kind not in _ENGINES:
        close = difflib.get_close_matches(kind, _ENGINES, n=1)
        meant = f"; did you mean '{close[0]}'?" if close else "."
        raise UsageError(f"'{kind}' is not a kind of engine{meant} Valid: {', '.join(engine_kinds())}")
    module, _, name = _ENGINES[kind].partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine


def on_gpus(engine: Engine, fabric: Fabric | None) -> Engine:
    """The engine, told of the GPUs that it is to run on."""
    if isinstance(engine, Placed):
        engine.fabric = fabric
    return engine


def engine_kinds() -> list[str]:
    """The kinds of engines, sorted."""
    return sorted(_ENGINES)


def env_problems(env: Mapping[str, str | None]) -> list[str]:
    """What cannot be in the environment difference of a launch record."""
    found = []
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            found.append(f"env: {name!r} is not the name of a variable")
        elif value is not None and "\0" in value:
            found.append(f"env.{name}: the value holds a NUL character")
        elif value and is_secret(name):
            found.append(
                f"env.{name}: looks like a secret, and a study keeps what it is given; leave it out and set it in "
                f"your own environment: the server inherits it"
            )
    return found


def compare(expected: Mapping[str, Setting], server_info: Mapping[str, Any], *, all_told: bool) -> list[Mismatch]:
    """Settings that differ between what must be in effect and what the server says is.

    Args:
        expected: of the launch record.
        server_info: with `effective` (settings by neutral name), and optionally `differences` (a list of
            {setting, reason}) and `paths` ({name: {state, detail}}; state active, fell_back or failed).
        all_told: whether a setting that the server does not mention is a mismatch, or unknown.
    """
    effective = server_info.get("effective")
    effective = effective if isinstance(effective, Mapping) else {}
    reasons = _reasons(server_info.get("differences"))
    found = []
    for name, wanted in expected.items():
        if name not in effective:
            if all_told:
                found.append(Mismatch(name, wanted, None, "the server does not report it"))
        elif not _same(wanted, effective[name]):
            found.append(Mismatch(name, wanted, effective[name], reasons.get(name, "")))
    return found + _paths(expected, server_info.get("paths"), {mismatch.setting for mismatch in found})


def _reasons(differences: Any) -> dict[str, str]:
    entries = differences if isinstance(differences, Sequence) and not isinstance(differences, str) else ()
    return {str(e["setting"]): str(e.get("reason", "")) for e in entries if isinstance(e, Mapping) and "setting" in e}


def _same(wanted: Setting, effective: Any) -> bool:
    if wanted == "never" or effective == "never":
        return wanted in ("never", None) and effective in ("never", None)
    if isinstance(wanted, bool) or isinstance(effective, bool):
        return wanted is effective
    return bool(wanted == effective)


def _paths(expected: Mapping[str, Setting], paths: Any, known: set[str]) -> list[Mismatch]:
    """Optional paths that were asked for, by the name or by the value of a setting, and did not come up."""
    found = []
    for path, entry in (paths if isinstance(paths, Mapping) else {}).items():
        state = entry.get("state") if isinstance(entry, Mapping) else entry
        if state not in ("failed", "fell_back"):
            continue
        detail = str(entry.get("detail") or entry.get("reason") or "") if isinstance(entry, Mapping) else ""
        for name, wanted in expected.items():
            asked = wanted not in _OFF and path.split(".")[0] in (name, wanted)
            if asked and name not in known:
                found.append(Mismatch(name, wanted, state, f"{path}: {detail}" if detail else path))
                known.add(name)
    return found


def value_problems(values: Mapping[str, Any], known: Mapping[str, SettingSpec]) -> list[str]:
    """What is wrong with each value by itself; unknown names are `unknown_names`' to tell."""
    return [
        f"{name}: {problem}"
        for name, value in values.items()
        if name in known and (problem := known[name].problem(value))
    ]


def duplicates(args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
    """Settings that are both fixed and tried: of the two, the last one on a command line would win unseen."""
    return [f"{name}: is both in engine.args and among the settings; keep one" for name in args if name in settings]


def unknown_names(names: Iterable[str], valid: Iterable[str], kind: str = "") -> list[str]:
    """A sentence for each name that is not valid: what it is called with this kind of engine, or the nearest one."""
    from tuner.engines.names import meant

    options = sorted(valid)
    found = []
    for name in names:
        if name not in options and (hint := meant(kind, name)):
            found.append(f"{name}: {hint}")
        elif name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            near = f"; did you mean '{close[0]}'?" if close else "."
            found.append(f"{name}: is unknown{near} Valid: {', '.join(options)}")
    return found
