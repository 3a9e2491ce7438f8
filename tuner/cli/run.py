"""`tuner run`: creates a study, or continues it, and ends with the recommendation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.console import complain, duration, outlive_output, say
from tuner.errors import TunerError, UsageError

if TYPE_CHECKING:
    from tuner.cli.cluster import Asked
    from tuner.space import Space
    from tuner.study.data import StudyData
    from tuner.study.place import Place
    from tuner.study.session import Limits


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Space file, or the name of one that ships.")
    ] = None,
    space: Annotated[str | None, typer.Option("--space", metavar="FILE", help="The same, as an option.")] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Default: the name in the file.")] = None,
    launches: options.Launches = None,
    candidates: options.Candidates = None,
    more: options.More = None,
    hours: options.Hours = None,
    overrides: options.Overrides = None,
    profile: options.Profile = None,
    devices: options.Devices = None,
    workers: options.Workers = None,
    gpus: options.Gpus = None,
    cpus: options.Cpus = None,
    at_most: options.AtMost = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="STUDY",
            help="For a new study: take from an earlier one what still applies, and say what does not; repeatable.",
        ),
    ] = None,
    storage: options.Storage = None,
    no_crash_memory: options.NoCrashMemory = False,
    quiet: options.Quiet = False,
    json_log: options.JsonLog = False,
) -> None:
    """Tune: create the study of a space file, or continue it, and end with the recommendation."""
    from tuner.cli.cluster import Asked
    from tuner.space import find_space
    from tuner.study.preflight import require
    from tuner.study.session import Limits, current_fingerprint, here, open_or_create, read_space

    name = file or space
    if name is None or (file and space and file != space):
        raise UsageError("name one space file: tuner run FILE, for instance tuner run quickstart.yaml")
    limits = Limits(launches=launches, candidates=candidates, hours=hours, more=more)
    only = (f"engine.devices={devices}",) if devices else ()
    tuned = read_space(name, (*(overrides or ()), *only), profile)
    asked = Asked(workers, gpus, cpus, at_most, devices)
    if asked.ray:
        _on_ray(
            asked,
            tuned,
            find_space(name),
            study=study or tuned.name,
            limits=limits,
            overrides=overrides or (),
            profile=profile,
            imports=imports or (),
            storage=storage,
            no_crash_memory=no_crash_memory,
            quiet=quiet,
            json_log=json_log,
        )
        return
    require(tuned)
    now = current_fingerprint(tuned)
    place = here(tuned)
    store = open_or_create(
        tuned,
        name=study,
        storage=storage,
        limits=limits,
        now=now,
        text=Path(find_space(name)).read_text(encoding="utf-8"),
        imports=tuple(imports or ()),
        place=place,
        tell=complain if quiet or json_log else say,
    )
    carry_out(store, storage=storage, no_crash_memory=no_crash_memory, quiet=quiet, json_log=json_log, place=place)


def _on_ray(
    asked: Asked,
    space: Space,
    path: Path,
    *,
    study: str,
    limits: Limits,
    overrides: Sequence[str],
    profile: str | None,
    imports: Sequence[str],
    storage: str | None,
    no_crash_memory: bool,
    quiet: bool,
    json_log: bool,
) -> None:
    from tuner.cli.cluster import limit_options, local_files, run_on_ray
    from tuner.study.names import check_name, study_folder

    copy = study_folder(check_name(study)) / path.name
    later = ["run", str(copy), "--study", study]
    later += [word for setting in overrides for word in ("--set", setting)]
    later += ["--profile", profile] if profile else []
    later += ["--no-crash-memory"] if no_crash_memory else []
    run_on_ray(
        asked,
        study=study,
        space=space,
        first=[*later, *limit_options(limits), *(word for name in imports for word in ("--import", name))],
        later=later,
        copies={str(copy): path.read_text(encoding="utf-8")},
        files=local_files(space.workload.prompts),
        storage=storage,
        quiet=quiet,
        json_log=json_log,
    )


def carry_out(
    store: object,
    *,
    storage: str | None,
    no_crash_memory: bool = False,
    quiet: bool,
    json_log: bool,
    place: Place | None = None,
) -> None:
    """Runs a study to its end and prints the answer; says how to go on when it is interrupted."""
    from tuner.cli.watch import watching
    from tuner.study.address import option
    from tuner.study.crashes import CrashMemory
    from tuner.study.database import storage_problem
    from tuner.study.interrupt import Interrupted
    from tuner.study.session import run_study
    from tuner.study.store import StudyStore

    assert isinstance(store, StudyStore)
    output_lost = outlive_output()
    where = option(storage)
    before = store.data()
    observer, context = watching(quiet=quiet, json_log=json_log)
    try:
        with context:
            crashes = None if no_crash_memory else CrashMemory()
            data = run_study(store, observer=observer, crashes=crashes, place=place)
    except Interrupted as error:
        complain(
            f"\nInterrupted by {error}. The server is stopped and nothing measured is lost. "
            f"Go on with: tuner resume {store.name}{where}"
        )
        raise
    except Exception as error:
        problem = None if isinstance(error, TunerError) else storage_problem(error)
        if problem is None:
            raise
        raise type(problem)(f"{problem}: tuner resume {store.name}{where}") from error
    finally:
        store.close()
    conclude(
        data,
        storage=storage,
        quiet=quiet,
        json_log=json_log,
        nothing_new=before.state == "done" and len(data.launches) == len(before.launches),
        output_lost=output_lost,
    )


def conclude(
    data: StudyData,
    *,
    storage: str | None,
    quiet: bool,
    json_log: bool,
    nothing_new: bool = False,
    output_lost: Callable[[], str | None] = lambda: None,
) -> None:
    """Prints the answer of a study that has ended, and what to do with it; ends with 1 where there is none."""
    from tuner.judge.text import recommendation_dict, recommendation_lines
    from tuner.study.address import option
    from tuner.study.decide import pareto_set, recommendation
    from tuner.study.hot import saving
    from tuner.study.looks import looks_saved

    where = option(storage)
    found = recommendation(data)
    if json_log:
        say(json.dumps({"kind": "recommendation", **recommendation_dict(found)}, ensure_ascii=False))
    else:
        say()
        for line in recommendation_lines(found):
            say(line)
    if not (quiet or json_log):
        if nothing_new:
            say("\nThis study was complete: nothing was measured now. To begin anew, give it a new name with --study.")
        say(f"\nThe search ended because: {data.reason}. It took {duration(data.elapsed_s)} with a server in all.")
        for saved in filter(None, (saving(data).sentence, looks_saved(data).sentence)):
            say(saved)
        say(f"Every candidate:      tuner report {data.name}{where}")
        what = "the baseline:" if found.overall.winner is None else "the winner:"
        one = " --candidate ID" if data.space.objective.maximize == "pareto" and len(pareto_set(data)) > 1 else ""
        what = "one of the set:" if one else what
        marked = " --allow-simulated" if found.simulated else ""
        say(f"Deploy {what:<14} tuner export {data.name} --format shell --output DIR{one}{marked}{where}")
        if found.overall.winner is None:
            say(_search_on(data, where))
    if why := output_lost():
        complain(
            f"Standard output could not be written ({why}); the study was not harmed. Read it with: "
            f"tuner report {data.name}{where}"
        )
    if not data.pairs:
        none = f"None of {len(data.measured)} candidates could be compared with the baseline."
        complain(none if data.measured else f"No candidate was measured: {data.reason}.")
        raise typer.Exit(1)


def _search_on(data: StudyData, where: str) -> str:
    """How to go on where nobody has won: with more launches, or with more to try where all of it was tried."""
    from tuner.study.planner import EVERYTHING

    if not data.reason.startswith(EVERYTHING):
        return f"Search on:            tuner resume {data.name} --more 8{where}"
    return f"Search more:          tuner run FILE --study NEW --import {data.name}{where}, with more choices in FILE"
