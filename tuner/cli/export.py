"""`tuner export`: what was measured, as something to deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import complain, say


def command(
    study: options.Study,
    fmt: Annotated[
        str,
        typer.Option("--format", metavar="F", help="shell, systemd, compose, kubernetes, helm, env, json or engine."),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder to write into.")],
    candidate: Annotated[
        str | None, typer.Option("--candidate", metavar="ID", help="Another one than the recommended; or 'baseline'.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="Container image, where the launch ran on the host.")
    ] = None,
    allow_simulated: Annotated[
        bool, typer.Option("--allow-simulated", help="Write an artefact of a simulated study too.")
    ] = False,
    storage: options.Storage = None,
) -> None:
    """Write the recommended configuration as it was launched: the winner's, or the baseline's without one."""
    from contextlib import closing

    from tuner.export.artefact import export_artefact
    from tuner.export.choose import choose
    from tuner.export.place import notes, options_here
    from tuner.study.calibrate import known_pair_sd
    from tuner.study.names import check_name
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
    chosen = choose(data, candidate, pair_sd=known_pair_sd(data.space, data.fingerprint))
    here = options_here(chosen.record, image)
    paths = export_artefact(
        chosen.record,
        chosen.provenance,
        fmt,
        output,
        allow_simulated=allow_simulated,
        options=here,
        reference=chosen.reference,
    )
    if chosen.note:
        complain(chosen.note)
    for note in notes(chosen.record, data.name, fmt, here):
        complain(note)
    for path in paths:
        say(str(path))
