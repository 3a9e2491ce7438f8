"""Writes an artefact, whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from tuner.errors import TunerError, UsageError
from tuner.export.head import MARK, PLAIN, Options
from tuner.export.json_file import FILE as RECORD
from tuner.export.json_file import FORMAT, files_of, render_json
from tuner.export.provenance import Provenance, record_hash
from tuner.export.reference import Reference
from tuner.export.secrets import refuse_secrets
from tuner.files import write_whole
from tuner.records import LaunchRecord

_NEEDED = ("engine", "model", "host", "port", "served_model")
"""Parts of a launch record without which nothing can be started or reached; its command is looked at by each format."""

Render = Callable[[LaunchRecord, Provenance, Options], dict[str, str]]


class _Formats(Mapping[str, Render]):
    """Format → what renders a record to files (name → text); imported when it is asked for."""

    _FOUND: ClassVar[Mapping[str, str]] = {
        "shell": "shell:render_shell",
        "systemd": "systemd:render_systemd",
        "compose": "compose:render_compose",
        "kubernetes": "kubernetes:render_kubernetes",
        "helm": "helm:render_helm",
        "env": "env_file:render_env",
        "json": "json_file:render_json",
        "engine": "engine_config:render_engine",
        "vllm": "engine_config:render_vllm",
        "sglang": "engine_config:render_sglang",
    }

    def __getitem__(self, name: str) -> Render:
        module, _, function = self._FOUND[name].partition(":")
        render: Render = getattr(importlib.import_module(f"tuner.export.{module}"), function)
        return render

    def __iter__(self) -> Iterator[str]:
        return iter(self._FOUND)

    def __len__(self) -> int:
        return len(self._FOUND)


FORMATS = _Formats()

_MARKS = (MARK, f'"format": "{FORMAT}"')


def export_artefact(
    record: LaunchRecord,
    provenance: Provenance,
    fmt: str,
    output_dir: Path | str,
    *,
    allow_simulated: bool = False,
    options: Options = PLAIN,
    reference: Reference | None = None,
) -> list[Path]:
    """Renders a record and writes its files into `output_dir`, which is made when missing; returns their paths.

    `launch.json` is always among them, the last one: `tuner verify` holds a server against it. Each file appears
    complete or not at all, and an earlier export in the same place is replaced.

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
    if missing := [name for name in _NEEDED if not getattr(record, name)]:
        raise UsageError(
            f"the launch record is not complete: it has no {', '.join(missing)}, and what cannot be started cannot be "
            "deployed. Nothing was written."
        )
    refuse_secrets(record)
    folder = Path(output_dir)
    texts = {} if fmt == "json" else FORMATS[fmt](record, provenance, options)
    texts |= render_json(record, provenance, options, files=[*texts, RECORD], reference=reference)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = files_of(folder)
        for name, text in texts.items():
            if name not in earlier:
                _refuse_foreign(folder / name, text)
        write_whole({folder / name: text for name, text in texts.items()})
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{folder} is a file; give a folder. Nothing was written.") from error
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}. Nothing was written.") from error
    return [folder / name for name in texts]


def _refuse_foreign(path: Path, text: str) -> None:
    if not path.exists() and not path.is_symlink():
        return
    with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
        there = path.read_text(encoding="utf-8")
        if there == text or any(mark in there for mark in _MARKS):
            return
    raise UsageError(f"{path} exists and was not written by `tuner export`; it is left as it is. Nothing was written.")
