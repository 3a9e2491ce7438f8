"""What can be known before the first launch: is the engine here, does it know the flags, is the hardware there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.engines.allreduce import Fabric, doubt
from tuner.engines.base import Engine, Placed, on_gpus
from tuner.engines.nccl import same_levels
from tuner.errors import EnvironmentBroken, UsageError
from tuner.records import Candidate, LaunchRecord
from tuner.secrets import without_secrets
from tuner.space import Space
from tuner.study.engine import hot_settings, illegal, launch_record, legality, none_drawn, split
from tuner.study.fabric import fabric_here, used_devices

_MOST = 500
"""Candidates whose command lines are looked at: flags repeat long before."""
_REASONS = 5
"""Why candidates are left out: so many reasons are said, the commonest."""


@dataclass(frozen=True)
class Preflight:
    """`refused`: the engine here would not take it. `missing`: this machine lacks it. `notes`: worth knowing."""

    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def preflight(space: Space) -> Preflight:
    """Looks at the installed engine and the machine; starts no server. The engine's own flags are asked for once."""
    from tuner.engines.base import Installed, get_engine

    gpus = fabric_here(space)
    engine, placed = get_engine(space.kind), on_gpus(get_engine(space.kind), gpus)
    if not isinstance(engine, Installed):
        notes = _left_out(space, engine, placed)
        if not isinstance(placed, Placed) or not _may_use_gpus(space):
            return Preflight(tuple(_contradicted(space, engine)), (), tuple(notes))
        bundled = launch_record(space, engine, space.baseline, host="127.0.0.1", port=1)
        missing = _hardware(space, [bundled]) or _impossible(space, engine, placed)
        return Preflight(tuple(_contradicted(space, engine)), tuple(missing), tuple(notes))
    refused = _contradicted(space, engine)
    records: list[LaunchRecord] = []
    for candidate in _candidates(space):
        if candidate is not space.baseline and illegal(space, placed, candidate):
            continue
        try:
            records.append(launch_record(space, engine, candidate, host="127.0.0.1", port=1))
        except UsageError as error:
            refused.append(str(error))
    refused += _drafts(space, records)
    missing = _hardware(space, records) or _impossible(space, engine, placed)
    notes = [*engine.notes(space.args), *_left_out(space, engine, placed), *_allreduce(space, records, gpus)]
    if space.container is not None:
        unknown, why_not = ([], "") if refused else _in_image(space, records)
        refused += unknown
        notes += [f"the flags are not held against the engine in the image: {why_not}"] if why_not else []
    elif not refused:
        try:
            refused += engine.refused(space.args, records)
            if not refused:
                resolution = engine.resolved(space.args, records)
                refused += resolution.refused
                notes += resolution.notes
        except EnvironmentBroken as error:
            missing.append(str(error))
    return Preflight(tuple(dict.fromkeys(refused)), tuple(missing), tuple(dict.fromkeys(notes)))


def kept_secret(space: Space) -> str | None:
    """What to know of a space whose arguments hold what looks like a secret, which the study's database would keep."""
    if without_secrets(space.args) == space.args:
        return None
    return (
        "engine.args hold what looks like a secret, and a study's database keeps its command lines: leave it out and "
        "set it in your own environment, which the server inherits (engine.api_key_env, where requests need it too)"
    )


def require(space: Space) -> Preflight:
    """`preflight` before a study.

    Raises:
        UsageError: flags that the installed engine does not know.
        EnvironmentBroken: the engine or the hardware is not here.
    """
    from tuner.engines.base import engine_kinds

    if reasons := nothing_left(space):
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise UsageError(f"no candidate can be tried beside the baseline:\n{listed}\nNothing was started.")
    found = preflight(space)
    refuse(found)
    if found.missing:
        simulated = " To see a study all the same, simulated: --set engine.kind=simulated."
        hint = simulated if "simulated" in engine_kinds() else ""
        raise EnvironmentBroken(f"this machine cannot run the study: {'; '.join(found.missing)}.{hint}")
    return found


def nothing_left(space: Space) -> list[str]:
    """Why every candidate is ruled out, the commonest reasons first; nothing where one is left or none is listed."""
    from tuner.engines.base import get_engine

    engine = on_gpus(get_engine(space.kind), fabric_here(space))
    reasons: Counter[str] = Counter()
    for listed in (space.listed() or {}).values():
        why = "it is the baseline" if listed.candidate == space.baseline else illegal(space, engine, listed.candidate)
        if why is None:
            return []
        reasons[why] += 1
    return [f"{count} of them: {why}" for why, count in reasons.most_common(5)]


def refuse(found: Preflight) -> None:
    """Raises for what the installed engine would refuse.

    Raises:
        UsageError: with every flag, and the nearest one that it knows.
    """
    if found.refused:
        listed = "\n".join(f"  - {sentence}" for sentence in found.refused)
        raise UsageError(f"the engine would refuse these settings:\n{listed}\nNothing was started.")


def _candidates(space: Space) -> list[Candidate]:
    listed = space.listed() or {}
    return [space.baseline, *(each.candidate for each in list(listed.values())[:_MOST])]


def _drafts(space: Space, records: list[LaunchRecord]) -> list[str]:
    from tuner.engines.base import get_engine
    from tuner.engines.drafts import misfit
    from tuner.engines.served import ServedEngine

    engine = get_engine(space.kind)
    check = engine.check_draft if isinstance(engine, ServedEngine) and space.container is None else None
    found = []
    for drafter, name in (("eagle3", "draft_head"), ("draft_model", "draft_model")):
        used = {
            str(r.expected[name]) for r in records if r.expected.get("speculation") == drafter and name in r.expected
        }
        for draft in sorted(used):
            if why := (check(draft) if check else None) or misfit(space.model, draft, drafter):
                found.append(f"{name}: {why}")
    return found


def _in_image(space: Space, records: list[LaunchRecord]) -> tuple[list[str], str]:
    """Flags that the engine in the space's image does not know; and why it could not be asked.

    Its help is asked for in a container of its own, once for each image.
    """
    from tuner.engines import installed
    from tuner.engines.base import get_engine
    from tuner.engines.container import asking
    from tuner.engines.served import ServedEngine
    from tuner.launch import container

    engine, section = get_engine(space.kind), space.container
    if not isinstance(engine, ServedEngine) or section is None:
        return [], "it is asked nothing"
    program = engine.program(space.args)
    command = [*program.command, *program.help]
    try:
        image = container.image(section.runtime, section.image).pinned
        valid = installed.flags_shown(
            program,
            image,
            f"{section.runtime} run {section.image} {' '.join(command)}",
            lambda: container.said_by(section.runtime, asking(section, image, command), installed.HELP_TIMEOUT_S),
        )
    except EnvironmentBroken as error:
        return [], str(error)
    behind = [record.argv[record.argv.index(section.image) + 1 + len(program.command) :] for record in records]
    arguments = [argument for each in behind for argument in each]
    return engine.unknown(space.args, arguments, valid, f"the {program.engine} of {section.image}"), ""


def _hardware(space: Space, records: list[LaunchRecord]) -> list[str]:
    from tuner.launch import gpu

    wanted = [r.expected for r in records if r.expected.get("device") in ("gpu", "cuda")]
    if not wanted:
        return []
    most = max(int(settings.get("tp", 1)) for settings in wanted)
    gpus = gpu.gpus()
    known = {str(one.index) for one in gpus}
    if known and (unknown := [d for d in space.devices if d.isdigit() and d not in known]):
        return [f"engine.devices names {', '.join(unknown)}, and this machine has {', '.join(sorted(known))}"]
    if space.devices and len(space.devices) < most:
        return [f"{most} GPUs are needed (tp), and engine.devices names {len(space.devices)}"]
    here = len(gpus)
    if here >= most:
        return _in_use(space, most, wanted[0])
    return [f"{most} GPU{'s are' if most > 1 else ' is'} needed (tp), and nvidia-smi knows of {here or 'none'} here"]


def _in_use(space: Space, most: int, baseline: Mapping[str, Any], devices: Sequence[str] = ()) -> list[str]:
    """Who is on the GPUs already: a server may not fit beside it, and its figures would be of a shared GPU."""
    from tuner.launch.strangers import held_unseen, strangers

    ours = (used_devices(space, devices) or tuple(map(str, range(most))))[:most]
    held = strangers(ours)
    theirs = {one.pid for one in strangers(ours, but_ours=True)} if held else set()
    found = [
        f"process {one.pid}{'' if one.pid in theirs else ', a server of a study at work,'} "
        f"holds {one.used_mib or 'unknown'} MiB"
        for one in held
    ]
    share = baseline.get("memory_fraction")
    if not found and isinstance(share, float):
        unseen = held_unseen(ours, share)
        found = [f"{one.used_mib} of {one.memory_mib} MiB of GPU {one.index} are held, unseen" for one in unseen]
    advice = "wait for it, end it, or name other GPUs with engine.devices (--devices)"
    named = f"GPU{'s' if len(ours) > 1 else ''} {', '.join(ours)}"
    return [f"{named}: already in use ({', '.join(found)}); {advice}"] if found else []


def require_free(space: Space, devices: Sequence[str] = ()) -> None:
    """Before a study goes on.

    Raises:
        EnvironmentBroken: somebody else computes on the GPUs that its servers would have.
    """
    from tuner.engines.base import get_engine

    engine = get_engine(space.kind)
    if not isinstance(engine, Placed):
        return
    expected = launch_record(space, engine, space.baseline, host="127.0.0.1", port=1).expected
    if expected.get("device") not in ("gpu", "cuda"):
        return
    if found := _in_use(space, int(expected.get("tp", 1)), expected, devices):
        raise EnvironmentBroken(f"{found[0]}. Nothing was started")


def _may_use_gpus(space: Space) -> bool:
    values = [space.args.get("device"), space.baseline.settings.get("device")]
    return "gpu" in values or any("gpu" in (p.choices or ()) for p in space.parameters if p.name == "device")


def _impossible(space: Space, engine: Engine, placed: Engine) -> list[str]:
    """What keeps the baseline from these GPUs, and not from others."""
    here, elsewhere = illegal(space, placed, space.baseline), illegal(space, engine, space.baseline)
    return [f"the baseline: {here}"] if here and not elsewhere else []


def _contradicted(space: Space, engine: Engine) -> list[str]:
    """Why the baseline cannot run as it says, by rules about its model or environment: all else is compared with it."""
    settings, _ = split(space.baseline)
    if space.forbidden(space.baseline) or engine.problems(space.args_for(settings, hot_settings(engine)), settings):
        return []  # said where a command line is made of it
    why = illegal(space, engine, space.baseline)
    return [f"the baseline: {why}"] if why else []


def _left_out(space: Space, engine: Engine, placed: Engine) -> list[str]:
    """What is not tried: since the engine could not, or since this machine's GPUs could not, though others might."""
    here: Counter[str] = Counter()
    anywhere: Counter[str] = Counter()
    gpus_known = isinstance(placed, Placed) and placed.fabric is not None
    listed = space.listed()
    if listed is None:
        return [said] if (said := none_drawn(space, placed)) else []
    looked = [each.candidate for each in listed.values() if each.candidate.id != space.baseline.id]
    anyhow, on_these = legality(space, engine), legality(space, placed)
    for each in looked:
        if why := anyhow(each):
            anywhere[why] += 1
        elif gpus_known and (why := on_these(each)):
            here[why] += 1
    of = f"of {len(looked)} candidates"
    found = [f"left out on these GPUs ({count} {of}): {said}" for said, count in here.most_common()]
    found += [f"left out ({count} {of}): {said}" for said, count in anywhere.most_common(_REASONS)]
    if others := sum(count for _, count in anywhere.most_common()[_REASONS:]):
        found.append(f"left out ({others} {of}): for other reasons")
    return found


def _allreduce(space: Space, records: list[LaunchRecord], gpus: Fabric | None) -> list[str]:
    asked = {(str(r.expected.get("allreduce")), int(r.expected.get("tp", 1))) for r in records}
    tried = sorted(pair for pair in asked if pair[1] > 1)
    notes = [f"allreduce: {why}" for path, tp in tried if gpus and (why := doubt(path, gpus.facts(tp)))]
    for parameter in space.parameters:
        if gpus and parameter.name == "env.NCCL_P2P_LEVEL" and tried:
            farthest = gpus.farthest(max(tp for _, tp in tried))
            if same := same_levels(parameter.choices or (), farthest):
                notes.append(f"{parameter.name}: {' and '.join(same)} are one here: no two GPUs are beyond {farthest}")
    if any(path not in ("None", "auto") for path, _ in tried):
        notes.append("allreduce: no path has been run on such hardware by this project; each counts once read back")
    return notes
