"""Writes an artefact, whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from pathlib import Path

from tuner.errors import TunerError, UsageError
from tuner.export.json_file import render_json
from tuner.export.provenance import Provenance, record_hash
from tuner.export.shell import render_shell
from tuner.files import write_whole
from tuner.records import LaunchRecord

FORMATS: dict[str, Callable[[LaunchRecord, Provenance], dict[str, str]]] = {
    "shell": render_shell,
    "json": render_json,
}
"""Format → what renders a record to files (name → text)."""

_MARKS = ("Written by `tuner export`", '"format": "spec-tuner launch record"')


def export_artefact(
    record: LaunchRecord,
    provenance: Provenance,
    fmt: str,
    output_dir: Path | str,
    *,
    allow_simulated: bool = False,
) -> list[Path]:
    """Renders a record and writes its files into `output_dir`, which is made when missing; returns their paths.

    Each file appears complete or not at all, and an earlier export in the same place is replaced.

    Raises:
        UsageError: unknown format, a simulated record without `allow_simulated`, a record that cannot be expressed,
            or an `output_dir` that is in use by something else.
        TunerError: the record is not the one that the provenance speaks of.
    """
    if fmt not in FORMATS:
        close = difflib.get_close_matches(fmt, FORMATS, n=1)
        meant = f"; did you mean '{close[0]}'?" if close else "."
        raise UsageError(f"'{fmt}' is not a format{meant} Valid: {', '.join(FORMATS)}. Nothing was written.")
    if record.simulated and not allow_simulated:
        raise UsageError(
            "this launch was simulated: its figures come from a model of a machine. Nothing was written; to look at "
            "the artefact all the same, add --allow-simulated."
        )
    if record_hash(record) != provenance.record_hash:
        raise TunerError(
            f"the launch record (hash {record_hash(record)}) is not the one that was measured "
            f"({provenance.record_hash}). Nothing was written."
        )
    texts = FORMATS[fmt](record, provenance)
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in texts:
            _refuse_foreign(folder / name)
        write_whole({folder / name: text for name, text in texts.items()})
    except FileExistsError as error:
        raise UsageError(f"{folder} is a file; give a folder. Nothing was written.") from error
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}. Nothing was written.") from error
    return [folder / name for name in texts]


def _refuse_foreign(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
        if any(mark in path.read_text(encoding="utf-8") for mark in _MARKS):
            return
    raise UsageError(f"{path} exists and was not written by `tuner export`; it is left as it is. Nothing was written.")
