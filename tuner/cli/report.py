"""`tuner report`: a study for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import say


def command(
    study: options.Study,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write Markdown there.")] = None,
    storage: options.Storage = None,
) -> None:
    """Show the decision and the leaderboard of every candidate; Markdown when it is not a terminal."""
    from contextlib import closing

    from tuner.errors import UsageError
    from tuner.files import write_whole
    from tuner.report.markdown import markdown
    from tuner.report.view import study_view
    from tuner.study.names import check_name
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
    text = markdown(study_view(data))
    if output is not None:
        try:
            write_whole({output: text})
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror or error}. Nothing was written.") from error
        say(str(output))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        say(text.rstrip("\n"))
