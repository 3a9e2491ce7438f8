"""`tuner verify`: whether what was exported still does what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.console import complain, outlive_output, say, say_json

if TYPE_CHECKING:
    from tuner.export.verify import Verified

Target = Annotated[str, typer.Argument(metavar="DIR|URL", help="An export to start, or the URL of a running server.")]
Record = Annotated[
    Path | None, typer.Option("--record", metavar="DIR", help="With a URL: the export that it is held against.")
]
Port = Annotated[int | None, typer.Option("--port", metavar="N", help="Start it there instead of its own port.")]
Launches = Annotated[int, typer.Option("--launches", metavar="N", help="Fresh starts to measure.")]
AllowSimulated = Annotated[bool, typer.Option("--allow-simulated", help="Take an export of a simulated study too.")]


def command(
    target: Target,
    record: Record = None,
    port: Port = None,
    launches: Launches = 1,
    allow_simulated: AllowSimulated = False,
    as_json: options.AsJson = False,
) -> None:
    """Start an export and hold it against its record; ends with 0 holds, 1 does not hold, 3 different machine."""
    folder, verified = run(target, record, port, launches, allow_simulated, quiet=as_json)
    if as_json:
        say_json(verified.to_dict())
    else:
        show(verified)
    finish(folder, verified)


def run(
    target: str, record: Path | None, port: int | None, launches: int, allow_simulated: bool, *, quiet: bool
) -> tuple[Path, Verified]:
    """The folder of the export, and what came of it.

    Raises:
        UsageError, EnvironmentBroken: see `tuner.export.verify`.
    """
    from tuner.errors import UsageError
    from tuner.export.verify import load, verify
    from tuner.study.interrupt import Interrupts
    from tuner.study.place import measuring

    url = target if "://" in target else None
    if url is not None and record is None:
        raise UsageError("a server is held against a record: name an export with --record DIR. Nothing was started.")
    if url is None and record is not None:
        raise UsageError("--record goes with a URL; an export is held against itself. Nothing was started.")
    if launches < 1:
        raise UsageError(f"--launches {launches}: must be at least 1")
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"--port {port}: must lie between 1 and 65535")
    if url is not None and (port is not None or launches != 1):
        raise UsageError("--port and --launches are for an export that is started, not for a running server")
    folder = record if record is not None else Path(target)
    exported = load(folder, allow_simulated=allow_simulated)
    outlive_output()
    with Interrupts().installed(), measuring(f"verification of {exported.provenance.study}") as other:
        if other:
            complain(other)
        found = verify(
            exported,
            folder,
            url=url,
            port=port,
            launches=launches,
            say=(lambda _line: None) if quiet else complain,
        )
    return folder if folder.is_dir() else folder.parent, found


def show(verified: Verified, before: dict[str, Any] | None = None) -> None:
    """The answer, for a person; `before` is an earlier verification."""
    from tuner.judge.holds import WITHIN
    from tuner.records import mark

    say(f"{verified.outcome.capitalize()}: {verified.what}, record {verified.record_hash}{mark(verified.simulated)}")
    earlier = {row["concurrency"]: row["measured"] for row in (before or {}).get("levels", ())}
    for each in verified.levels:
        since = ""
        if then := earlier.get(each.concurrency):
            since = f", {100 * (each.measured / then - 1):+.1f} % since the last time"
        say(
            f"  concurrency {each.concurrency}: {each.measured:.1f} tokens/s, recorded {each.recorded:.1f} "
            f"({100 * (each.ratio - 1):+.1f} %, within {100 * each.tolerance:.1f} %: {each.outcome}){since}"
        )
    if verified.levels:
        say(f"  {WITHIN}")
    if verified.quality is not None:
        say(f"  answers: {verified.quality.outcome} ({verified.quality.why})")
    for sentence in verified.different:
        say(f"  different: {sentence}")
    for sentence in verified.wrong:
        say(f"  does not hold: {sentence}")
    for sentence in verified.unknown:
        say(f"  not checked: {sentence}")


def finish(folder: Path, verified: Verified) -> None:
    """Keeps the record of it, and ends with the exit code of the outcome."""
    from tuner.export.verify import EXIT, keep

    try:
        keep(folder, verified)
    except OSError as error:
        complain(f"this verification could not be kept in {folder}: {error.strerror or error}")
    if code := EXIT[verified.outcome]:
        raise typer.Exit(code)
