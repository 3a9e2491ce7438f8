"""The part of an engine that a study needs, and the candidate-to-launch mapping that is the same for all engines."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tuner.engines.base import UNSET, Change, Installed, Modelled, Placed, Reconfigurable
from tuner.engines.container import contained, listens_on
from tuner.engines.nccl import contradictory, impossible
from tuner.records import Block, Candidate, Failure, Gate, LaunchRecord, Setting
from tuner.space import Space
from tuner.space.space import COMMAND
from tuner.study.belied import belied

DRAWN = 200
"""Candidates that are drawn from a space that cannot be listed, to see whether any may be launched."""


class Mismatch(Protocol):
    """A setting that is not in effect as asked."""

    @property
    def setting(self) -> str:
        """Its neutral name."""

    @property
    def requested(self) -> Any:
        """What was asked for."""

    @property
    def effective(self) -> Any:
        """What the server runs with; None when it does not have the setting in effect at all."""

    @property
    def reason(self) -> str:
        """Why, as far as the server says."""


class StudyEngine(Protocol):
    """What a study asks of an engine."""

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """Why the combination cannot work."""

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
        """How to start it."""

    def mismatches(self, record: LaunchRecord, server_info: dict[str, Any]) -> Sequence[Mismatch]:
        """What is not in effect although it was asked for."""


def hot_settings(engine: StudyEngine) -> frozenset[str]:
    """What can be changed on a running server of this engine."""
    return engine.hot if isinstance(engine, Reconfigurable) else frozenset()


def unsettled(engine: StudyEngine, record: LaunchRecord, change: Change, info: Mapping[str, Any] | None) -> str | None:
    """Why a server does not run as a change asked, by its own words (`info`); None when it does.

    Every hot setting must be in effect, also those that the record leaves to the engine: nothing may stay of what the
    server ran with before.
    """
    if info is None:
        return "the server does not say what is in effect"
    found = engine.mismatches(replace(record, expected={**record.expected, **change.body}), dict(info))
    failure = not_in_effect(found)
    return failure.message if failure else None


def split(candidate: Candidate) -> tuple[dict[str, Setting], dict[str, str | None]]:
    """A candidate's engine settings, and its environment variables (None removes one)."""
    settings = {name: value for name, value in candidate.settings.items() if not name.startswith("env.")}
    env = {
        name.removeprefix("env."): None if value == UNSET else str(value)
        for name, value in candidate.settings.items()
        if name.startswith("env.")
    }
    return settings, env


def illegal(space: Space, engine: StudyEngine, candidate: Candidate) -> str | None:
    """Why a candidate must not be launched: a rule of the space, or of the engine, by its model and GPUs too.

    None when it may.
    """
    return legality(space, engine)(candidate)


def legality(space: Space, engine: StudyEngine) -> Callable[[Candidate], str | None]:
    """`illegal` for many candidates: what the engine knows of models and GPUs is found out once."""
    hot = hot_settings(engine)
    modelled = engine if isinstance(engine, Modelled) else None
    fabric = engine.fabric if isinstance(engine, Placed) else None

    def why(candidate: Candidate) -> str | None:
        if rule := space.forbidden(candidate):
            return rule
        settings, env = split(candidate)
        args = space.args_for(settings, hot)
        problems = engine.problems(args, settings)
        if not problems and modelled is not None:
            problems = modelled.model_problems(space.model, args, settings)
        problems += contradictory({**space.env, **env})
        if fabric is not None:
            tp = settings.get("tp", space.args.get("tp", 1))
            problems += impossible(env, fabric.facts(tp) if isinstance(tp, int) else {})
        return "; ".join(problems) or None

    return why


def none_drawn(space: Space, engine: StudyEngine) -> str:
    """What to know of a space that cannot be listed, where none of many candidates drawn from it may be launched.

    "" where one may: then nothing is known.
    """
    reasons: Counter[str] = Counter()
    for candidate in space.drawn(DRAWN):
        why = "it is the baseline" if candidate.id == space.baseline.id else illegal(space, engine, candidate)
        if why is None:
            return ""
        reasons[why] += 1
    said = "; ".join(f"{count} of them: {why}" for why, count in reasons.most_common(3))
    return f"of {DRAWN} candidates drawn at random none may be tried ({said})"


def launch_record(
    space: Space,
    engine: StudyEngine,
    candidate: Candidate,
    *,
    host: str,
    port: int,
    image: str | None = None,
    place_env: Mapping[str, str] | None = None,
) -> LaunchRecord:
    """How to start the server of a candidate. Its settings include the environment variables that were tried.

    `image` is the container's by digest, where the space has a container; `place_env` keeps a server to the devices of
    its worker.
    """
    settings, env = split(candidate)
    args = space.args_for(settings, hot_settings(engine))
    if space.container is not None and isinstance(engine, Installed):
        args = {"version": "unknown", **args}  # what is installed here says nothing about the image
    record = engine.record(
        model=space.model,
        args=args,
        env={**space.env, **(place_env or {}), **env},
        settings=settings,
        host=listens_on(space.container, host),
        port=port,
    )
    record = replace(record, settings=dict(candidate.settings))
    if space.container is None:
        return settled(record) if record.engine == COMMAND else record
    named = image or space.container.image
    record = replace(record, engine_version=in_image(record.engine_version, named))
    return contained(record, space.container, named, (space.api_key_env,) if space.api_key_env else ())


def settled(record: LaunchRecord) -> LaunchRecord:
    """The record of a user's own command, so that it starts the same from any folder and with any PATH.

    The program gets its whole path. Where another argument names a file of this folder, the folder is kept too: the
    argument itself stays as the user wrote it.
    """
    path = record.env["PATH"] if "PATH" in record.env else os.environ.get("PATH")
    program = shutil.which(record.argv[0], path=path or os.defpath)
    argv = (os.path.abspath(program), *record.argv[1:]) if program else record.argv
    named = [part for word in record.argv[1:] for part in (word, word.partition("=")[2])]
    here = any(part and not os.path.isabs(part) and os.path.exists(part) for part in named)
    return replace(record, argv=argv, cwd=os.getcwd() if here else "")


def in_image(version: str, image: str | None) -> str:
    """The version of an engine that runs in an image."""
    return f"{version} in {image}" if image else version


MIN_ACCEPT_LENGTH = 1.005
"""Tokens per verify step (drafts + 1). Under it a drafter's proposals are rejected, all but one in two hundred."""


def speculates(record: LaunchRecord, block: Block) -> Gate | None:
    """Whether speculation that was asked for did anything in a window; None where it cannot be told or is off.

    A server may report that it speculates, and reject every draft, or bypass it after the first request. One that was
    told not to, and does, runs with other settings than it says; so does one whose counters they cannot explain.
    """
    told = {**record.settings, **record.expected}
    asked = told.get("speculation", "none")
    off_here = _told_to_be_off({**record.expected, **record.settings}, block.concurrency)
    steps = block.counters.get("server_verify_steps")
    if steps and "speculation" in told and asked in ("none", False):
        return Gate("no_op_setting", steps, 0.0, False, "verify steps, though speculation is to be off")
    if steps and (lie := belied(record.engine, told, block)):
        return lie
    if asked in ("none", False) or off_here or steps is None:
        return None
    length = 1.0 if not steps or block.accept_length is None else block.accept_length
    said = "no verify step in the window" if not steps else f"tokens per verify step, over {steps:.0f} steps"
    return Gate("spec_inactive", round(length, 6), MIN_ACCEPT_LENGTH, length >= MIN_ACCEPT_LENGTH, said)


def pointless(gate: Gate, level: int) -> Failure:
    """The failure that a red gate of `speculates` is."""
    if gate.name != "spec_inactive":
        return Failure(gate.name, "bench", f"{gate.value:g} {gate.detail}, at concurrency {level}")
    said = f"speculation has no effect at concurrency {level}: accept length {gate.value:g} ({gate.detail})"
    return Failure("spec_inactive", "bench", said)


def _told_to_be_off(settings: Mapping[str, Any], level: int) -> bool:
    """Whether the settings turn speculation off at this many running requests, or leave that to the server."""
    threshold = settings.get("disable_batch_threshold")
    if isinstance(threshold, int) and not isinstance(threshold, bool) and level > threshold:
        return True
    depth: int | None = None
    for entry in str(settings.get("steps_by_batch") or "").split(","):
        requests, _, steps = entry.partition(":")
        if requests.strip().isdigit() and int(requests) <= level:
            depth = int(steps) if steps.strip().isdigit() else None
    return depth == 0 or settings.get("policy") == "adaptive"


def not_in_effect(mismatches: Sequence[Mismatch]) -> Failure | None:
    """The failure that mismatches are: such a candidate would be scored as something that it was not."""
    if not mismatches:
        return None
    said = "; ".join(
        f"{m.setting}: asked for {m.requested!r}, in effect {m.effective!r}" + (f" ({m.reason})" if m.reason else "")
        for m in mismatches
    )
    if any(m.setting == "speculation" for m in mismatches):
        kind = "spec_inactive"
    elif all(m.effective is None for m in mismatches):
        kind = "no_op_setting"
    else:
        kind = "capped_effective"
    return Failure(kind, "readback", said)
