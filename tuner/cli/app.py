"""`tuner`: the commands by name. Each one lives in a module of its own, imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from tuner.cli.console import friendly

COMMANDS = {
    "run": "run",
    "resume": "resume",
    "list": "list_studies",
    "status": "status",
    "logs": "logs",
    "report": "report",
    "recommend": "recommend",
    "export": "export",
    "verify": "verify",
    "drift": "drift",
    "remeasure": "remeasure",
    "recompute": "recompute",
    "pack": "pack",
    "bench": "bench",
    "check": "check",
    "plan": "plan",
    "calibrate": "calibrate",
    "doctor": "doctor",
}
"""Command → module of `tuner.cli` that holds its function `command`."""


class Commands(TyperGroup):
    """The commands, made when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of a user's way through them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None when there is none."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"tuner.cli.{COMMANDS[cmd_name]}")
            single = typer.Typer(add_completion=False)
            single.command(name=cmd_name)(friendly(module.command))
            self.commands[cmd_name] = typer.main.get_command(single)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As usual; an unknown name is answered with the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"Did you mean '{close[0]}'?" if close else f"Commands: {', '.join(COMMANDS)}"
            ctx.fail(f"there is no command '{args[0]}'. {meant}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Measures which speculative-decoding settings are fastest on your machine, for your traffic, and proves it.",
)


def version(show: bool) -> None:
    """Prints the version and ends."""
    if show:
        from importlib.metadata import version as installed

        typer.echo(installed("spec-tuner"))
        raise typer.Exit


@app.callback()
def root(
    show: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version and exit."),
) -> None:
    """Measures which speculative-decoding settings are fastest on your machine, for your traffic, and proves it."""


def main() -> None:
    """The console script `tuner`."""
    app()
