"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Study = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study; `tuner list` shows them.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="TUNER_STORAGE",
        show_envvar=True,
        help="Database of the study. Default: sqlite:///studies/NAME/study.db",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a value of the space file; repeatable.")
]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="short|full", help="Override the profile of the space file.")
]
Launches = Annotated[int | None, typer.Option("--launches", metavar="N", help="Server starts in total.")]
Candidates = Annotated[int | None, typer.Option("--candidates", metavar="N", help="Candidates in total.")]
More = Annotated[
    int | None,
    typer.Option(
        "--more", metavar="N", help="So many candidates more, with the launches that they and a confirmation take."
    ),
]
Hours = Annotated[float | None, typer.Option("--hours", metavar="H", help="Hours with a server, in total.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="0,1",
        help="The only devices that this worker's servers use (0,1 or 0-3 or ids); overrides engine.devices.",
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="ray", help="Run the study's workers on a Ray cluster: as many as there is room for."
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", help="With --workers: GPUs of one launch. Default: as the space says."),
]
Cpus = Annotated[
    int | None,
    typer.Option("--cpus", metavar="N", help="With --workers: cores of one launch. Default: its share of the node's."),
]
AtMost = Annotated[int | None, typer.Option("--at-most", metavar="N", help="With --workers: no more than so many.")]
NoCrashMemory = Annotated[
    bool, typer.Option("--no-crash-memory", help="Launch also what is known to crash from other studies.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the recommendation.")]
JsonLog = Annotated[bool, typer.Option("--json-log", help="Print one JSON object a line instead of text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
