"""Creating, continuing and running studies: what stands between a command and the controller."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.engines.base import UNSET, on_gpus
from tuner.errors import EnvironmentBroken, UsageError
from tuner.launch.clock import steady
from tuner.records import short_hash
from tuner.space import Outside, Space, differences, load_space
from tuner.space.devices import device_names
from tuner.study.calibrate import known_pairs
from tuner.study.controller import Controller
from tuner.study.crashes import CrashMemory
from tuner.study.data import Budget, StudyData
from tuner.study.database import storage_problem
from tuner.study.engine import StudyEngine, in_image
from tuner.study.fabric import fabric_here
from tuner.study.hardware import hardware
from tuner.study.inherit import changes_since, import_study, inherit, taken_from
from tuner.study.interrupt import Interrupts
from tuner.study.lease import Lease, hold
from tuner.study.names import check_name, local_studies, study_folder
from tuner.study.notify import message, notify
from tuner.study.place import Place, hostname, measuring, network_filesystem
from tuner.study.plan import Plan, Timing, plan, timing_of
from tuner.study.planner import in_time, launches_used, owed
from tuner.study.policy import BASELINE_EVERY, policy_for, policy_of
from tuner.study.postgres import patient
from tuner.study.preflight import kept_secret
from tuner.study.probe import HttpProbe
from tuner.study.progress import Event, Observer
from tuner.study.sampler import seed_of
from tuner.study.simulated_world import Clock, SimulatedWorld, virtual
from tuner.study.store import StudyStore, create_study, open_study, sampler_facts, study_exists, study_names
from tuner.study.turn import turn
from tuner.study.world import Machine, World, api_key

DEFAULT_SEED = 0

VIRTUAL_WAIT_S = 20.0
"""How long a worker waits that has nothing to do, where time is virtual and looking takes the most of it."""


@dataclass(frozen=True)
class Limits:
    """Changes of a budget: new totals, and `more` candidates on top. None leaves what is."""

    launches: int | None = None
    candidates: int | None = None
    hours: float | None = None
    more: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("launches", self.launches), ("candidates", self.candidates), ("more", self.more)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: must be at least 1")
        if self.hours is not None and not self.hours > 0:
            raise UsageError(f"--hours {self.hours}: must be above 0")
        if self.launches == 1:
            raise UsageError("--launches 1 is only the baseline; at least 2 are needed, 10 to confirm a winner")


def read_space(path_or_name: str, overrides: tuple[str, ...] = (), profile: str | None = None) -> Space:
    """The space in a file, held against the engines and prompt sets that there are.

    Raises:
        UsageError: every problem at once.
    """
    from tuner.bench.prompts import load_prompts
    from tuner.engines.base import env_problems, get_engine
    from tuner.engines.container import container_problems
    from tuner.launch.rules import own_problems

    settings = (*overrides, f"profile={profile}") if profile else overrides
    outside = Outside(
        engine_for=get_engine,
        check_prompts=lambda name: [load_prompts(name, split=s) for s in ("tuning", "held_out")],
        env_problems=env_problems,
        container_problems=container_problems,
        rule_problems=own_problems,
    )
    return load_space(path_or_name, settings, outside)


def outlook(space: Space) -> Plan:
    """What a new study of this space would come to here. Starts nothing; an engine that is not here is no hindrance."""
    from tuner.bench.plan import window_plan
    from tuner.engines.simulated.blocks import BLOCK_S, LAUNCH_S, WARMUP_S

    earlier = []
    for name in local_studies()[-MOST_EARLIER:]:
        try:
            store = open_study(name)
        except (UsageError, EnvironmentBroken):
            continue  # of another version, or unreadable: then it tells nothing
        try:
            earlier.append(store.data())
        finally:
            store.close()
    windows = window_plan(space.profile)
    timing = timing_of(earlier, space, windows.estimate_s(), windows.warmup_s)
    if virtual(space):
        timing = Timing(LAUNCH_S, BLOCK_S, "of the simulation's virtual clock", WARMUP_S)
    engine = engine_here(space)
    try:
        now: dict[str, Any] = current_fingerprint(space)
    except (UsageError, EnvironmentBroken):
        return plan(space, engine, timing)
    return plan(space, engine, timing, pairs=known_pairs(space, now), crashed=CrashMemory().of(space, now))


def engine_here(space: Space) -> StudyEngine:
    """The engine of a space, with what is known of the GPUs here; it need not be installed."""
    from tuner.engines.base import get_engine

    return on_gpus(get_engine(space.kind), fabric_here(space))


MOST_EARLIER = 20
"""Studies that are asked how long launches take, and what they have for a new one."""


def fingerprint(
    space: Space, engine_version: str, machine: Mapping[str, Any], image: str | None = None
) -> dict[str, Any]:
    """All that the figures of a study depend on. A study is only continued while it stays the same.

    `image` is that of the container, by digest; it is part of the engine's version.
    """
    found = {
        "space": space.fingerprint,
        "engine": space.kind,
        "engine_version": in_image(engine_version, image),
        "model": space.model,
        "hardware": dict(machine),
    }
    return {**found, "image": image} if image else found


def changes(data: StudyData, space: Space, now: Mapping[str, Any]) -> list[str]:
    """What is different from when the study began, in sentences."""
    found = differences(data.space, space)
    then = data.fingerprint
    if then.get("engine_version") != now["engine_version"]:
        found.append(f"engine version: was {then.get('engine_version')}, is now {now['engine_version']}")
    if data.sampler and dict(data.sampler) != (sampler := sampler_facts(space.sampler)):
        found.append(f"sampler: was {dict(data.sampler)}, is now {sampler}")
    old, new = then.get("hardware", {}), now["hardware"]
    for key in new:
        if key == "driver" and key not in old:
            continue  # of a version that did not note it
        if old.get(key) != new[key]:
            found.append(f"hardware, {key}: was {old.get(key)!r}, is now {new[key]!r}")
    return found


def refuse_changes(data: StudyData, space: Space, now: Mapping[str, Any]) -> None:
    """Raises when figures from before and from now could not be compared.

    Raises:
        UsageError: what changed, and that a new name makes a new study.
    """
    found = changes(data, space, now)
    if found:
        listed = "\n".join(f"  - {sentence}" for sentence in found)
        raise UsageError(
            f"the study '{data.name}' was begun differently:\n{listed}\n"
            f"Its figures could not be compared with new ones, so nothing was started and nothing is lost. Undo the "
            f"change, or begin a new study: --study {data.name}-2"
        )


def new_budget(data: StudyData, limits: Limits, base: Budget) -> Budget:
    """The totals after `limits`, on top of `base`.

    `more` means so many more candidates than have been tried (when the study is done) or than were planned, with the
    launches that they, a confirmation that is not finished, and a new one take. Hours that do not hold one of them and
    those confirmations are lifted.
    """
    budget = Budget(
        launches=limits.launches or base.launches,
        candidates=limits.candidates or base.candidates,
        hours=limits.hours or base.hours,
    )
    if limits.more is None:
        return budget
    # With all the pairs that a calibration asks for: a larger budget has room for them.
    policy = policy_for(data.space.profile, data.fingerprint, sys.maxsize)
    every = BASELINE_EVERY[data.space.profile]
    refreshes = limits.more // every + 1 if every else 0
    confirmation = owed(data, policy) + 2 * policy.pairs
    launches = launches_used(data) + limits.more + refreshes + confirmation
    if data.state != "done":
        # What was kept for a confirmation is used up where one has begun, and a new one takes as much again.
        planned = budget.launches + limits.more
        most = max(planned, launches) if data.confirmations else planned
        return replace(budget, launches=most, candidates=budget.candidates + limits.more)
    # Hours that are given with it are meant; those of before would end the search at once.
    held = limits.hours is not None or in_time(replace(data, budget=budget), 1 + confirmation)
    return Budget(
        launches=launches,
        candidates=len(data.measured) + limits.more,
        hours=budget.hours if held else None,
    )


def open_or_create(
    space: Space,
    *,
    name: str | None,
    storage: str | None,
    limits: Limits,
    now: Mapping[str, Any],
    text: str = "",
    seed: int = DEFAULT_SEED,
    imports: Sequence[str] = (),
    place: Place | None = None,
    tell: Callable[[str], None] = lambda _sentence: None,
) -> StudyStore:
    """The study of this name (the space's, when None): continued when it exists and nothing has changed, else created.

    A new one takes from the studies in `imports` what still applies; `tell` is told what, and what not and why.

    Raises:
        UsageError: it exists and something has changed, or there is no study to import.
    """
    name = check_name(name or space.name)
    file_budget = Budget(**space.budget.model_dump())
    if not study_exists(name, storage):
        budget = Budget(
            launches=limits.launches or file_budget.launches,
            candidates=limits.candidates or file_budget.candidates,
            hours=limits.hours or file_budget.hours,
        )
        if limits.more:
            budget = replace(budget, launches=budget.launches + limits.more, candidates=budget.candidates + limits.more)
        # What a calibration says now is kept with the study: a later one must not change what is under way.
        pairs = known_pairs(space, now)
        told = {**now, "pairs": pairs} if pairs else now
        sources = [read_source(source, storage) for source in imports]
        store = create_study(
            name, space=space, space_text=text, fingerprint=told, seed=seed, budget=budget, storage=storage
        )
        if not imports and (offer := earlier_study(store, space, told, storage)):
            tell(offer)
        return _with_imports(store, sources, space, told, place, tell)
    store = open_study(name, storage)
    try:
        data = store.data()
        begun = any(launch.state != "imported" for launch in data.launches)
        strange = [source for source in imports if not taken_from(data, source)]
        if begun and strange:
            raise UsageError(
                f"the study '{name}' exists, has launches of its own, and was begun without {', '.join(strange)}; only "
                f"a new study takes from others. Nothing was started; begin one with --study {name}-2 --import …, or "
                "run it without --import"
            )
        refuse_changes(data, space, now)
        if imports and not begun:
            # It was only begun to be made, or has not run yet.
            sources = [read_source(source, storage) for source in imports]
            _with_imports(store, sources, space, now, place, tell)
            data = store.data()
        # The file's totals count when they were edited since; else those that the study has come to have.
        edited = space.budget != data.space.budget
        _apply(store, data, new_budget(data, limits, file_budget if edited else data.budget))
        if _without_devices(space) != _without_devices(data.space):
            store.set_space(space, text)
    except BaseException:
        store.close()
        raise
    return store


def _without_devices(space: Space) -> dict[str, Any]:
    """The space as all workers of a study share it."""
    found = space.to_dict()
    return {**found, "engine": {**found["engine"], "devices": None}}


def here(space: Space, devices: Sequence[str] = ()) -> Place:
    """Where a worker on this host launches servers: with these devices, or the space's."""
    return Place(hostname(), tuple(devices) or space.devices)


def named_devices(text: str | None) -> tuple[str, ...]:
    """The devices that an option names.

    Raises:
        UsageError: it names none.
    """
    try:
        return device_names(text)
    except ValueError as error:
        raise UsageError(f"--devices: {error}") from None


def earlier_study(new: StudyStore, space: Space, now: Mapping[str, Any], storage: str | None) -> str:
    """The study that has most of a new one measured already, and how to take it up, in a sentence; "" where none has.

    Studies in the same database are looked at, or else those in ./studies.
    """
    most, best = 0, ""
    names = study_names(new.engine) if storage is not None else local_studies()
    for other in [name for name in names if name != new.name][-MOST_EARLIER:]:
        try:
            with closing(open_study(other, storage)) as store:
                if changes_since(store.outline(), space, now):
                    continue
                taken = len(inherit(store.data(), space, now).of("taken"))
        except (UsageError, EnvironmentBroken):
            continue  # of another version, or unreadable: then it has nothing for this one
        if taken > most:
            most, best = taken, other
    if not most:
        return ""
    candidates = "1 candidate" if most == 1 else f"{most} candidates"
    return (
        f"study '{best}' has measured {candidates} of this space as they would be measured here: --import {best} takes "
        "them, and nothing of the budget (also now, before the first launch)"
    )


def read_source(name: str, storage: str | None) -> StudyData:
    """The records of a study to import: in the same database, or else in ./studies.

    Raises:
        UsageError: there is none of this name.
    """
    where = storage
    if storage is not None and not study_exists(name, storage) and name in local_studies():
        where = None
    with closing(open_study(check_name(name), where)) as store:
        return store.data()


def _with_imports(
    store: StudyStore,
    sources: Sequence[StudyData],
    space: Space,
    now: Mapping[str, Any],
    place: Place | None,
    tell: Callable[[str], None],
) -> StudyStore:
    try:
        for source in sources:
            for sentence in import_study(store, source, space, now, place or here(space)):
                tell(sentence)
    except BaseException:
        store.close()
        raise
    return store


def reopen(name: str, *, storage: str | None, limits: Limits, devices: Sequence[str] = ()) -> StudyStore:
    """An existing study, to be continued as it was begun.

    Raises:
        UsageError: there is none, or the engine or machine has changed.
    """
    store = open_study(check_name(name), storage)
    try:
        data = store.data()
        refuse_changes(data, data.space, current_fingerprint(data.space, devices))
        _apply(store, data, new_budget(data, limits, data.budget))
    except BaseException:
        store.close()
        raise
    return store


def _apply(store: StudyStore, data: StudyData, budget: Budget) -> None:
    if budget != data.budget:
        store.set_budget(budget, f"{budget.launches} launches, {budget.candidates} candidates, hours {budget.hours}")


def current_fingerprint(space: Space, devices: Sequence[str] = ()) -> dict[str, Any]:
    """The fingerprint that a study of this space would have here and now, with these devices or the space's.

    Raises:
        UsageError, EnvironmentBroken: what a launch needs is not here: a key, a container runtime, an image.
    """
    from tuner.engines.base import get_engine, version_of

    api_key(space)
    version = version_of(get_engine(space.kind), space.args, contained=space.container is not None)
    return fingerprint(space, version, hardware(tuple(devices) or space.devices), container_image(space))


def container_image(space: Space) -> str | None:
    """The image of the space's container, by digest; None without a container.

    Raises:
        EnvironmentBroken: its runtime or the image is not here.
        UsageError: a variable is to be unset that the image sets, which this runtime cannot do.
    """
    from tuner.launch import container

    if space.container is None:
        return None
    runtime = space.container.runtime
    found = container.image(runtime, space.container.image)
    removed = {name for name, value in space.env.items() if value is None}
    for parameter in space.parameters:
        if parameter.name.startswith("env.") and UNSET in (parameter.choices or ()):
            removed.add(parameter.name.removeprefix("env."))
    if runtime == "docker" and (stuck := sorted(removed & found.variables)):
        raise UsageError(
            f"{', '.join(stuck)}: is to be unset, but the image sets it, and docker cannot take a variable of an image "
            "away. Nothing was started; give it a value, use podman, or build an image without it"
        )
    return found.pinned


def run_study(
    store: StudyStore,
    *,
    observer: Observer,
    engine: StudyEngine | None = None,
    world: World | None = None,
    folder: Path | None = None,
    clock: Callable[[], float] | None = None,
    crashes: CrashMemory | None = None,
    place: Place | None = None,
) -> StudyData:
    """Works on a study to its end under a lease of its own; returns the finished records.

    `place` is where this worker launches servers: this host with the space's devices when None. Workers at other places
    may work on the same study.

    `crashes` is what other studies have learned to crash; None to try everything. The user's hook is called at the end,
    however it comes.

    Raises:
        UsageError: another tuner works on it.
        StudyStopped, EnvironmentBroken: it ended without an answer; it can be run again.
        Interrupted: a signal; the server is stopped and everything kept.
    """
    from tuner.engines.base import get_engine

    before = store.data()
    space = before.space
    interrupts = Interrupts()
    probe = quality_probe(space) if world is None and not virtual(space) else None
    lease_clock = clock or store.clock
    place = place or Place(hostname(), space.devices)
    if world is None and virtual(space):
        passing = clock if isinstance(clock, Clock) else Clock(store.clock())
        seed = seed_of(before.seed, len(before.launches)) if place.host == hostname() else seed_at(before.seed, place)
        store.clock, world = passing, SimulatedWorld(space, seed, passing)

    if store.clock is time.time:  # a clock that is put right must not use up the budget's hours
        store.clock = steady()

    there = _database_file(store)
    for database in (store.engine, store.trials.engine):
        patient(database, lambda sentence: observer.event(Event("database", sentence)))

    def controlled(lease: Lease) -> Controller:
        def check() -> None:
            interrupts.check()
            _refuse_deleted(store, there)
            lease.check()

        waits = store.clock
        return Controller(
            store,
            engine or on_gpus(get_engine(space.kind), fabric_here(space, place.devices)),
            world or Machine(space, devices=place.devices, siblings=lease.sibling_pids, study={"study": before.uid}),
            policy=policy_of(before),
            folder=folder or study_folder(store.name),
            observer=observer,
            check=check,
            alert=interrupts.check,
            shield=interrupts.shield,
            crashes=crashes,
            probe=probe,
            place=place,
            others=lease.others,
            siblings=lambda: bool(lease.sibling_pids()),
            turn=lambda: turn(store.engine, store.name, check=interrupts.check),
            pause=(lambda _s: waits.wait(VIRTUAL_WAIT_S)) if isinstance(waits, Clock) else time.sleep,
        )

    with interrupts.installed():
        try:
            with hold(store.engine, store.name, lease_clock, place) as lease, _alone(store, space, place) as other:
                if not lease.others():
                    store.adopt(place.name)
                _warn(store, observer, "shared_machine", other)
                _warn(store, observer, "storage", _unsafe_storage(store))
                _warn(store, observer, "secret", kept_secret(space))
                data = _run(store, controlled(lease), lease)
                _refuse_deleted(store, there)
        except UsageError:
            raise  # nothing was started
        except BaseException as error:
            _tell(space, store, before, storage_problem(error) or error, observer)
            raise
        if before.state != "done" or before.blocks.keys() != data.blocks.keys():
            _tell(space, store, data, None, observer)
    return data


MOST_TOGETHER = 32
"""Answers of the output-quality gate that are asked for at once, at most."""


def quality_probe(space: Space) -> HttpProbe:
    """What asks the output-quality gate's prompts of a server: alone, and as many at once as the highest level has."""
    level = max(space.workload.concurrency)
    together = min(level, MOST_TOGETHER) if level > 1 else 0
    return HttpProbe(quality_prompts(space), space.quality.max_tokens, api_key(space), together=together)


def quality_prompts(space: Space) -> list[str]:
    """The output-quality gate's prompts: held-out ones of every kind in turn, the longest of each kind first, as a
    dialogue that any model goes on with.

    A model's own chat template would be nearer to its use, but only the server knows it, and likelihoods are asked for
    by plain text.
    """
    from tuner.bench.prompts import load_prompts, spread

    prompts = spread(load_prompts(space.workload.prompts, split="held_out"), space.quality.prompts)
    return [f"User: {prompt.text}\n\nAssistant:" for prompt in prompts]


def _warn(store: StudyStore, observer: Observer, kind: str, sentence: str | None) -> None:
    if sentence:
        store.event(kind, sentence)
        observer.event(Event(kind, sentence))


def _database_file(store: StudyStore) -> tuple[int, int] | None:
    """Which file the study's database is; None where it is none, or is not there."""
    file = store.engine.url.database if store.engine.dialect.name == "sqlite" else None
    try:
        found = os.stat(file) if file and file != ":memory:" else None
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found else None


def _refuse_deleted(store: StudyStore, there: tuple[int, int] | None) -> None:
    """Raises when the database is not the file any more that it was: what is written goes nowhere.

    Raises:
        EnvironmentBroken: it was deleted, moved or replaced.
    """
    if there is not None and _database_file(store) != there:
        raise EnvironmentBroken(
            f"the study's database {store.engine.url.database} is gone: it was deleted, moved or replaced while the "
            "study ran, and what was measured is lost with it. Put it back, or begin anew"
        )


def _unsafe_storage(store: StudyStore) -> str | None:
    file = store.engine.url.database if store.engine.dialect.name == "sqlite" else None
    kind = network_filesystem(Path(file)) if file and file != ":memory:" else None
    return kind and (
        f"{file} lies on a network file system ({kind}), where SQLite may lose or damage it; name a local file or a "
        "PostgreSQL database with --storage"
    )


def _run(store: StudyStore, controller: Controller, lease: Lease) -> StudyData:
    try:
        return controller.run()
    except KeyboardInterrupt:
        if lease.others():
            store.event("worker_interrupted", f"{lease.place.name}: interrupted; the others go on")
        else:
            store.set_state("interrupted", "interrupted; run the same again to go on")
        raise


def _alone(store: StudyStore, space: Space, place: Place) -> AbstractContextManager[str | None]:
    """Tells of another study that measures here; nothing is measured where the machine is simulated."""
    return nullcontext() if virtual(space) else measuring(store.name, devices=place.devices)


def seed_at(seed: int, place: Place) -> int:
    """The seed of the noise of one of several simulated places."""
    return int(short_hash({"seed": seed, "place": place.name})[:7], 16)


def _tell(space: Space, store: StudyStore, known: StudyData, error: BaseException | None, observer: Observer) -> None:
    """Calls the user's hook, where there is one; a hook that fails is reported, and changes nothing."""
    if space.notify is None:
        return
    try:
        known = store.data()
    except Exception as unreadable:
        if storage_problem(unreadable) is None:
            raise
    problem = notify(space.notify, message(known, error))
    if problem:
        observer.event(Event("hook", problem))
        try:
            store.event("hook", problem)
        except Exception as unwritable:
            if storage_problem(unwritable) is None:
                raise
