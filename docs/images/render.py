"""Draws the README's picture: a study's report as a terminal shows it.

python docs/images/render.py STUDY.db docs/images/report.svg
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from tuner.report.markdown import markdown
from tuner.report.view import study_view
from tuner.study.store import open_study

SHOWN = ("# ", "## Decision", "## Leaderboard")


def sections(text: str) -> str:
    """The title and the sections that fit into a picture."""
    parts = text.split("\n## ")
    kept = [parts[0]] + [part for part in parts[1:] if part.startswith(("Decision", "Leaderboard"))]
    return "\n## ".join(kept)


def main(database: Path, picture: Path) -> None:
    """Draw the study of `database` into `picture`."""
    name = database.parent.name
    with closing(open_study(name, f"sqlite:///{database}")) as store:
        text = markdown(study_view(store.data()))
    with picture.with_suffix(".tmp").open("w") as nowhere:
        console = Console(record=True, width=132, file=nowhere)
        console.print(Markdown(sections(text)))
    picture.with_suffix(".tmp").unlink()
    console.save_svg(str(picture), title=f"tuner report {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
