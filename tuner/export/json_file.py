"""`launch.json`: the launch record itself with its provenance, for programs, and for `tuner verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.export.head import PLAIN, Options
from tuner.export.provenance import Provenance, record_hash
from tuner.export.reference import Reference
from tuner.export.secrets import secret_variables, without_secrets
from tuner.records import LaunchRecord

FILE = "launch.json"
FORMAT = "spec-tuner launch record"
_VERSION = 1


@dataclass(frozen=True)
class Exported:
    """What an export says of itself. `files` are the names of all that it wrote, `secrets` the variables it wants."""

    record: LaunchRecord
    provenance: Provenance
    reference: Reference | None
    files: tuple[str, ...]
    secrets: tuple[str, ...]


def render_json(
    record: LaunchRecord,
    provenance: Provenance,
    options: Options = PLAIN,
    *,
    files: Sequence[str] = (FILE,),
    reference: Reference | None = None,
) -> dict[str, str]:
    """File name → text. Secrets stand as `${VARIABLE}`, and `secrets` lists these variables."""
    document = {
        "format": FORMAT,
        "version": _VERSION,
        "record": without_secrets(record).to_dict(),
        "secrets": secret_variables(record),
        "provenance": provenance.to_dict(),
        "files": list(files),
        "reference": None if reference is None else reference.to_dict(),
    }
    return {FILE: json.dumps(document, indent=2, ensure_ascii=False) + "\n"}


def load_launch(path: Path | str) -> tuple[LaunchRecord, Provenance]:
    """The record and the provenance of a `launch.json`, or of the folder that holds one.

    Raises:
        UsageError: see `load_export`.
    """
    found = load_export(path)
    return found.record, found.provenance


def load_export(path: Path | str) -> Exported:
    """All that a `launch.json` holds, or that of the folder it lies in.

    Raises:
        UsageError: it is not there, not such a file, of a later version, or its record is not the one that was
            measured.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    document = _read(file)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{file} was not written by `tuner export`")
    if document.get("version") != _VERSION:
        raise UsageError(f"{file} has version {document.get('version')}; this tuner reads version {_VERSION}")
    try:
        record = LaunchRecord.from_dict(document["record"])
        provenance = Provenance.from_dict(document["provenance"])
        reference = document.get("reference")
        found = Exported(
            record,
            provenance,
            None if reference is None else Reference.from_dict(reference),
            tuple(document.get("files", (FILE,))),
            tuple(document.get("secrets", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{file} is not complete: {error}; export the study again") from error
    # The hash is over the record as it was launched, and cannot be checked where a secret was left out.
    if not found.secrets and record_hash(record) != provenance.record_hash:
        raise UsageError(
            f"{file} was changed: its record has hash {record_hash(record)}, what was measured {provenance.record_hash}"
        )
    return found


def files_of(folder: Path) -> frozenset[str]:
    """Names of the files of an earlier export in a folder; none where there is none."""
    try:
        document = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return frozenset()
    return frozenset(name for name in document.get("files", ()) if isinstance(name, str) and ".json" in name)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
