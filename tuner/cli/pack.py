"""`tuner pack`: a study in one file, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import say


def command(
    study: options.Study,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to. Default: STUDY.tar.gz here.")
    ] = None,
    storage: options.Storage = None,
) -> None:
    """Bundle configuration, database, logs and facts of the machine, without secrets; per-request records stay here."""
    from contextlib import closing

    from tuner.export.pack import pack
    from tuner.report.content import report
    from tuner.report.markdown import markdown
    from tuner.report.view import study_view
    from tuner.study.names import check_name, study_folder
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
        path = output or Path(f"{data.name}.tar.gz")
        names = pack(store, data, study_folder(data.name), path, markdown(report(study_view(data))))
    say(f"{path}: {len(names)} files ({', '.join(name for name in names if '/' not in name)} and logs)")
