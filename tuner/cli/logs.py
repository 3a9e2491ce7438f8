"""`tuner logs`: what the server of a launch wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options

if TYPE_CHECKING:
    from tuner.study.store import StudyStore

_POLL_S = 0.3


def command(
    study: options.Study,
    launch: Annotated[int | None, typer.Argument(metavar="LAUNCH", help="Number of a launch; the latest one.")] = None,
    storage: options.Storage = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the launch has ended.")] = False,
) -> None:
    """Print the log of a launch: of the latest one, or of the one that is named."""
    import time
    from contextlib import closing

    from tuner.errors import UsageError
    from tuner.launch import logs, pump
    from tuner.study.names import check_name
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        number, path = _found(store, study, launch)
        if not path.is_file():
            raise UsageError(f"launch {number} of '{study}' has no log at {path}; it failed before its server started")
        at = 0
        while True:
            running = follow and _running(store, number)
            end = pump.size(path)
            typer.echo(logs.read_bytes(path, at, end), nl=False)
            at = end
            if not running:
                return
            time.sleep(_POLL_S)


def _found(store: StudyStore, study: str, launch: int | None) -> tuple[int, Path]:
    from tuner.errors import UsageError

    launches = {stored.id: stored.log_path for stored in store.data().launches if stored.log_path}
    if not launches:
        raise UsageError(f"the study '{study}' has not launched a server yet, so there is no log")
    number = max(launches) if launch is None else launch
    if number not in launches:
        raise UsageError(f"'{study}' has no log of a launch {launch}; it has {', '.join(map(str, sorted(launches)))}")
    return number, Path(launches[number])


def _running(store: StudyStore, launch: int) -> bool:
    from tuner.study.lease import holder

    state = next(stored.state for stored in store.data().launches if stored.id == launch)
    return state == "running" and holder(store.engine, store.name) is not None
