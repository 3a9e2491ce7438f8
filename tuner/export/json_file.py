"""`launch.json`: the launch record itself, with its provenance, for programs."""

from __future__ import annotations

import json
from pathlib import Path

from tuner.errors import UsageError
from tuner.export.provenance import Provenance, record_hash
from tuner.export.secrets import secret_variables, without_secrets
from tuner.records import LaunchRecord

FILE = "launch.json"
_FORMAT = "spec-tuner launch record"
_VERSION = 1


def render_json(record: LaunchRecord, provenance: Provenance) -> dict[str, str]:
    """File name → text. Secrets stand as `${VARIABLE}`, and `secrets` lists these variables."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "record": without_secrets(record).to_dict(),
        "secrets": secret_variables(record),
        "provenance": provenance.to_dict(),
    }
    return {FILE: json.dumps(document, indent=2, ensure_ascii=False) + "\n"}


def load_launch(path: Path | str) -> tuple[LaunchRecord, Provenance]:
    """The record and the provenance of a `launch.json`, or of the folder that holds one.

    Raises:
        UsageError: it is not there, not such a file, of a later version, or its record is not the one that was
            measured.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise UsageError(f"{file} was not written by `tuner export --format json`")
    if document.get("version") != _VERSION:
        raise UsageError(f"{file} has version {document.get('version')}; this tuner reads version {_VERSION}")
    try:
        record = LaunchRecord.from_dict(document["record"])
        provenance = Provenance.from_dict(document["provenance"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{file} is not complete: {error}") from error
    # The hash is over the record as it was launched, and cannot be checked where a secret was left out.
    if not document.get("secrets") and record_hash(record) != provenance.record_hash:
        raise UsageError(
            f"{file} was changed: its record has hash {record_hash(record)}, what was measured {provenance.record_hash}"
        )
    return record, provenance
