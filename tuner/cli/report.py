"""`tuner report`: a study for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.console import say

if TYPE_CHECKING:
    from tuner.report.document import Document
    from tuner.report.view import StudyView


def command(
    study: options.Study,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write Markdown there.")] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page with charts there."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="OTHER", help="Hold the study against another one.")
    ] = None,
    compare_storage: Annotated[
        str | None,
        typer.Option("--compare-storage", metavar="URL", help="Database of the other study. Default: as of the study."),
    ] = None,
    storage: options.Storage = None,
) -> None:
    """Show the decision and the leaderboard of every candidate; Markdown when it is not a terminal."""
    from tuner.report.compare import comparison
    from tuner.report.content import report

    view = _view(study, storage)
    if compare is None:
        document = report(view)
    else:
        document = comparison(view, _view(compare, compare_storage or storage))
    if output is None and html is None:
        _show(document)
    else:
        _write(document, output, html)


def _view(study: str, storage: str | None) -> StudyView:
    from contextlib import closing

    from tuner.report.view import study_view
    from tuner.study.names import check_name
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        return study_view(store.data())


def _show(document: Document) -> None:
    from tuner.report.markdown import markdown

    text = markdown(document)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        say(text.rstrip("\n"))


def _write(document: Document, output: Path | None, page: Path | None) -> None:
    """Both files, or none of them."""
    from tuner.errors import UsageError
    from tuner.files import write_whole
    from tuner.report.html import html
    from tuner.report.markdown import markdown

    if output is not None and page is not None and output.absolute() == page.absolute():
        raise UsageError(f"--output and --html both name {output}; give two files. Nothing was written.")
    texts = {output: markdown(document)} if output is not None else {}
    if page is not None:
        texts[page] = html(document)
    try:
        write_whole({path: text for path, text in texts.items() if path is not None})
    except OSError as error:
        named = " and ".join(str(path) for path in texts)
        raise UsageError(f"cannot write {named}: {error.strerror or error}. Nothing was written.") from error
    for path in texts:
        say(str(path))
