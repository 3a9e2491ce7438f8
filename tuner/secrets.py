"""Which names hold secrets: their values are written nowhere, not in a database, a log, a report or an artefact."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(?:^|[_-])(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|"
    r"auth|authorization)(?:$|[_-](?!.*(?:file|path)$))",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret. A path to one (`…_FILE`) is none."""
    return _SECRET.search(name.lstrip("-")) is not None
