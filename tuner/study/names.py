"""Names of studies and where they are kept."""

from __future__ import annotations

import re
from pathlib import Path

from tuner.errors import UsageError

STUDIES = Path("studies")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: it could leave the folder of studies, or hide in it.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is not usable as a study's name: letters, digits, '.', '_', '-', at most 64 of them"
        )
    return name


def study_folder(name: str) -> Path:
    """Where a study's database, logs and per-request records lie."""
    return STUDIES / check_name(name)


def storage_url(name: str, storage: str | None) -> str:
    """The database of a study: `storage` when given, else `sqlite:///studies/NAME/study.db`."""
    return storage or f"sqlite:///{(study_folder(name) / 'study.db').as_posix()}"


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for another database or one in memory.

    Raises:
        UsageError: it is no database URL.
    """
    from tuner.study.address import parsed

    address = parsed(url)
    in_memory = not address.database or address.database == ":memory:"
    return None if in_memory or address.get_backend_name() != "sqlite" else Path(str(address.database))


def local_studies() -> list[str]:
    """Names of the studies in the folder of studies."""
    return sorted(path.parent.name for path in STUDIES.glob("*/study.db"))


def unknown_study(name: str, known: list[str], where: str) -> UsageError:
    """There is no such study: with the nearest name."""
    from tuner.space import nearest

    close = nearest(name, known)
    hint = f" Did you mean '{close}'?" if close else f" There: {', '.join(known)}." if known else ""
    return UsageError(f"there is no study '{name}' in {where}.{hint}")
