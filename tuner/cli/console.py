"""What all commands share: the two consoles, and how an error reaches the user."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import typer

from tuner.errors import TunerError

Function = TypeVar("Function", bound=Callable[..., Any])


class _OutputLost(TunerError):
    """Standard output cannot be written."""

    exit_code = 3

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"standard output cannot be written: {error.strerror or error}. What was to stand there is lost, and "
            "nothing else: direct it elsewhere and run it again"
        )


def _flush() -> None:
    """Raises `_OutputLost` where standard output cannot take what was said; a reader that left is none of it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputLost(error) from error
    except ValueError:
        return  # closed, by whoever runs this


def _output_lost() -> _OutputLost | None:
    """Why nothing can be written to standard output; None where a line break can."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:  # also where there is no such file
        return None if isinstance(error, io.UnsupportedOperation) else _OutputLost(error)
    return None


def say(line: str = "") -> None:
    """A line of the answer, on standard output."""
    try:
        typer.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputLost(error) from error


def complain(line: str) -> None:
    """A line about what went wrong, on standard error."""
    typer.echo(line, err=True)


def say_json(value: Any) -> None:
    """One JSON document on standard output."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


class _Outlived(io.FileIO):
    """An output that may go away: what cannot be written is dropped, and the first reason remembered."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes what can be written; says that all was."""
        try:
            written = super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            written = None
        # None is also what a pipe says that is full and must not be waited for.
        return memoryview(data).nbytes if written is None else written


def outlive_output() -> Callable[[], str | None]:
    """From now on output that cannot be written (a closed pipe, a dead terminal, a full disk) costs the display alone.

    For commands whose work matters more than what they say about it.

    Returns:
        What tells why standard output was lost; None as long as it is not.
    """
    files = {name: _outlived(name) for name in ("stdout", "stderr")}

    def lost() -> str | None:
        sys.stdout.flush()
        file = files["stdout"]
        return None if file is None or file.lost is None else file.lost.strerror or str(file.lost)

    return lost


def _outlived(name: str) -> _Outlived | None:
    stream = getattr(sys, name)
    if stream is None or stream is not getattr(sys, f"__{name}__"):
        return None  # somebody else's already
    with contextlib.suppress(OSError):
        stream.flush()
    file = _Outlived(stream.fileno(), "wb", closefd=False)
    text = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or name == "stderr",
    )
    setattr(sys, name, text)
    return file


def friendly(function: Function) -> Function:
    """A command whose expected errors become a message and an exit code instead of a traceback."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        from tuner.study.interrupt import Interrupted

        try:
            try:
                return function(*args, **kwargs)
            finally:
                _flush()
        except _OutputLost as error:
            complain(str(error))
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.close()  # what is still in it would be tried once more at the interpreter's end
            raise typer.Exit(error.exit_code) from None
        except TunerError as error:
            complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except Interrupted as error:
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            if isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Outlived):
                raise  # it is not our output that broke
            # Whoever read our output has closed it, like `head` does. Nothing more can be said.
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            from tuner.study.database import storage_problem

            nameless = isinstance(error, OSError) and error.filename is None
            problem = (_output_lost() if nameless else None) or storage_problem(error)
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


def by_the_clock(seconds: float, now: float | None = None) -> str:
    """When something ends that takes so long, by this machine's clock; `now` in seconds since 1970."""
    began = datetime.fromtimestamp(time.time() if now is None else now)
    ends = began + timedelta(seconds=seconds)
    if ends.date() == began.date():
        return f"{ends:%H:%M}"
    return f"{ends:%A %H:%M}" if seconds < 6 * 86400 else f"{ends:%Y-%m-%d %H:%M}"


def remaining(seconds: float, *, virtual: bool = False) -> str:
    """How long something still takes, and when that is; a virtual clock says no time of day."""
    end = " on its virtual clock" if virtual else f", ends about {by_the_clock(seconds)}"
    return f"about {duration(seconds)} left{end}"
