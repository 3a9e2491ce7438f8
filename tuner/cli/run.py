"""`tuner run`: creates a study, or continues it, and ends with the recommendation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.console import complain, outlive_output, say
from tuner.errors import TunerError, UsageError

if TYPE_CHECKING:
    from tuner.study.place import Place


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
    from tuner.space import find_space
    from tuner.study.preflight import require
    from tuner.study.session import Limits, current_fingerprint, here, open_or_create, read_space

    name = file or space
    if name is None or (file and space and file != space):
        raise UsageError("name one space file: tuner run FILE, for instance tuner run quickstart.yaml")
    limits = Limits(launches=launches, candidates=candidates, hours=hours, more=more)
    only = (f"engine.devices={devices}",) if devices else ()
    tuned = read_space(name, (*(overrides or ()), *only), profile)
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
    from tuner.judge.text import recommendation_dict, recommendation_lines
    from tuner.study.address import option
    from tuner.study.crashes import CrashMemory
    from tuner.study.database import storage_problem
    from tuner.study.decide import recommendation
    from tuner.study.hot import saving
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
    found = recommendation(data)
    if json_log:
        say(json.dumps({"kind": "recommendation", **recommendation_dict(found)}, ensure_ascii=False))
    else:
        say()
        for line in recommendation_lines(found):
            say(line)
    if not (quiet or json_log):
        if before.state == "done" and len(data.launches) == len(before.launches):
            say("\nThis study was complete: nothing was measured now. To begin anew, give it a new name with --study.")
        say(f"\nThe search ended because: {data.reason}.")
        if saved := saving(data).sentence:
            say(saved)
        say(f"Every candidate:      tuner report {data.name}{where}")
        what = "the baseline:" if found.overall.winner is None else "the winner:"
        say(f"Deploy {what:<14} tuner export {data.name} --format shell --output DIR{where}")
        if found.overall.winner is None:
            say(f"Search on:            tuner resume {data.name} --more 8{where}")
    if why := output_lost():
        complain(
            f"Standard output could not be written ({why}); the study was not harmed. Read it with: "
            f"tuner report {data.name}{where}"
        )
    if not data.pairs:
        complain(f"None of {len(data.measured)} candidates could be compared with the baseline.")
        raise typer.Exit(1)
