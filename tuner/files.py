"""Writing files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_whole(texts: Mapping[Path, str | bytes]) -> None:
    """Writes every text (UTF-8, or bytes as they are) to its path; scripts (`#!`) become executable, folders are made.

    All texts are on disk beside their places before the first is moved there: what fails half-way, a full disk for
    one, has replaced nothing.

    Raises:
        OSError: of the system. What was there before is still there.
    """
    staged: list[tuple[str, Path]] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged.append((temporary, path))
            data = text.encode() if isinstance(text, str) else text
            with open(handle, "wb") as file:
                os.fchmod(file.fileno(), 0o755 if data.startswith(b"#!") else 0o644)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in staged:
            os.replace(temporary, path)
    except BaseException:
        for temporary, _ in staged:
            Path(temporary).unlink(missing_ok=True)
        raise
