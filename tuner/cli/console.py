"""What all commands share: the two consoles, and how an error reaches the user."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from tuner.errors import TunerError

Function = TypeVar("Function", bound=Callable[..., Any])


def say(line: str = "") -> None:
    """A line of the answer, on standard output."""
    typer.echo(line)


def complain(line: str) -> None:
    """A line about what went wrong, on standard error."""
    typer.echo(line, err=True)


def say_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def friendly(function: Function) -> Function:
    """A command whose expected errors become a message and an exit code instead of a traceback."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        from tuner.study.interrupt import Interrupted

        try:
            return function(*args, **kwargs)
        except TunerError as error:
            complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except Interrupted as error:
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            # Whoever read our output has closed it, like `head` does. Nothing more can be said.
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            from tuner.study.database import storage_problem

            problem = storage_problem(error)
            if problem is None:
                raise  # a defect of ours: its traceback is wanted
            complain(str(problem))
            raise typer.Exit(problem.exit_code) from None

    return command  # type: ignore[return-value]


def duration(seconds: float | None) -> str:
    """Seconds as a person says them: `45 s`, `7 min`, `2.5 h`."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
