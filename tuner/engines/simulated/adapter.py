"""`kind: simulated`: stands in for the engine of any space. Its launches start `python -m tuner.engines.simulated`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tuner.engines.base import Change, Mismatch, SettingSpec, compare, env_problems
from tuner.engines.bundled import BundledEngine, hot_settings
from tuner.engines.simulated.profiles import DEFAULT, profile_named
from tuner.engines.speculation import schedule_problems
from tuner.errors import UsageError
from tuner.records import LaunchRecord, Setting

PREFIX = "simulation."
"""Arguments of this prefix are a space's `simulation` section; all others are of the engine that is stood in for."""

VERSION = "1"
"""Of the model of machines; another gives other figures."""


_COUNTS = {"num_steps": 0, "topk": 1, "num_draft_tokens": 1}
"""Counts that the physics makes a step of, with the least that they may be; most engines have a most as well."""


class _Settings(Mapping[str, SettingSpec]):
    """The settings that the physics knows, and any other, which changes nothing: the space may be of any engine."""

    known: ClassVar[Mapping[str, SettingSpec]] = {
        **BundledEngine.settings,
        "tp": SettingSpec("int", "GPUs that share the model", low=1),
        "allreduce": SettingSpec("str", "backend of the sums over the GPUs"),
    }

    def __getitem__(self, name: str) -> SettingSpec:
        return self.known.get(name) or SettingSpec("any", "without effect on a simulated machine")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


class SimulatedEngine:
    """A model of a machine behind the bundled engine's API. Every record of it is marked as simulated."""

    kind = "simulated"
    settings: Mapping[str, SettingSpec] = _Settings()
    hot = BundledEngine.hot

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """See `Engine.problems`. What the space's own engine would refuse is not known here."""
        try:
            profile = profile_named(str(args.get(PREFIX + "profile", DEFAULT)))
        except UsageError as error:
            return [f"{PREFIX}profile: {error}"]
        settings = {**args, **settings}
        found = [
            f"{name}: {value!r} is not valid; valid: a whole number from {least} on"
            for name, least in _COUNTS.items()
            if (value := settings.get(name)) is not None and not (type(value) is int and value >= least)
        ]
        if settings.get("steps_by_batch") is not None:
            found += schedule_problems(str(settings["steps_by_batch"]), sys.maxsize)
        backend = settings.get("allreduce")
        if backend is not None and backend not in profile.machine.allreduce:
            found.append(f"allreduce: {backend!r} is unknown; valid: {', '.join(profile.machine.allreduce)}")
        tp = settings.get("tp", 1)
        if not isinstance(tp, int) or not 1 <= tp <= profile.machine.gpus:
            found.append(f"tp: {tp!r} is not valid; valid: 1 to {profile.machine.gpus}")
        drafter = settings.get("speculation", "none")
        if drafter != "none" and drafter not in profile.model.drafters:
            found.append(f"speculation: {drafter!r} is not simulated; valid: none, {', '.join(profile.model.drafters)}")
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
        if found := self.problems(args, settings) + env_problems(env):
            raise UsageError("; ".join(found))
        fixed = {name: value for name, value in args.items() if isinstance(value, (bool, int, float, str))}
        told = {name: value for name, value in {**fixed, **settings}.items() if not name.startswith(PREFIX)}
        options = {name.removeprefix(PREFIX): value for name, value in args.items() if name.startswith(PREFIX)}
        argv = [sys.executable, "-m", "tuner.engines.simulated", "--host", host, "--port", str(port), "--model", model]
        argv += ["--options", json.dumps(options), "--settings", json.dumps(told)]
        return LaunchRecord(
            engine=self.kind,
            engine_version=self.version(),
            model=model,
            argv=tuple(argv),
            env=dict(env),
            host=host,
            port=port,
            settings=dict(settings),
            expected=told,
            served_model=model,
            flush_path="/flush_cache",
            simulated=True,
        )

    def mismatches(self, record: LaunchRecord, server_info: Mapping[str, Any]) -> list[Mismatch]:
        """See `Engine.mismatches`."""
        return compare(record.expected, server_info, all_told=True)

    def change(self, record: LaunchRecord) -> Change:
        """See `Reconfigurable.change`."""
        told = json.loads(record.argv[record.argv.index("--settings") + 1])
        return Change("/reconfigure", hot_settings(told))

    def version(self) -> str:
        """Of the model of machines."""
        return VERSION

    def check_model(self, model: str) -> str | None:
        """Any name will do: the profile says what runs."""
        return None if model else "is empty; give the simulated model a name"
