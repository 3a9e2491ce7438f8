"""From a file name to a space: finding it, overrides from the command line, every problem at once."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.space.check import Checker, Outside
from tuner.space.document import Document, parse_scalar, read_document
from tuner.space.problems import SpaceProblems, nearest
from tuner.space.space import Space

SHARE = "share/spec-tuner/search_spaces"
"""Where a wheel puts the spaces that ship, below the data folder of the installation."""


def shipped_folder() -> Path | None:
    """The folder of the spaces that ship: beside the package in a checkout, else where the wheel installed them."""
    root = Path(__file__).resolve().parents[2]
    return next((folder for folder in (root / "search_spaces", *_installed(root)) if folder.is_dir()), None)


def _installed(root: Path) -> Iterator[Path]:
    """Where an installation may have put them: what it says itself, then where such data usually goes."""
    try:
        files = metadata.files("spec-tuner") or ()
    except metadata.PackageNotFoundError:
        files = ()
    yield from (Path(str(f.locate())).resolve().parent for f in files if SHARE in f.as_posix())
    yield Path(sysconfig.get_path("data")) / SHARE
    yield root / SHARE


def shipped() -> dict[str, Path]:
    """File name → path of every space that ships."""
    folder = shipped_folder()
    return {path.name: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find_space(path_or_name: str | Path) -> Path:
    """The file: as given, or, for a bare name (".yaml" may be left out), among the spaces that ship.

    Raises:
        UsageError: there is none, or it is a folder.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a space file in it")
    ships = shipped()
    if path.parent == Path("."):
        for name in (path.name, f"{path.name}.yaml"):
            if Path(name).is_file():
                return Path(name)
            if name in ships:
                return ships[name]
    close = nearest(path.name, ships)
    meant = f"; did you mean '{close}'?" if close else "."
    raise UsageError(f"there is no space file {path}{meant} Shipped: {', '.join(ships)}")


def load_space(path_or_name: str | Path, overrides: Sequence[str] = (), outside: Outside | None = None) -> Space:
    """The space in a file, with `a.b=c` overrides applied, held against `outside` (engines, prompts) when given.

    Raises:
        UsageError: no such file, or a malformed override.
        SpaceProblems: everything wrong with the file, at once.
    """
    path = find_space(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return parse_space(text, source=path.name, overrides=overrides, outside=outside)


def parse_space(
    text: str, *, source: str = "space", overrides: Sequence[str] = (), outside: Outside | None = None
) -> Space:
    """As `load_space`, from the text itself."""
    document = read_document(text, source)
    for override in overrides:
        apply_override(document, override)
    checker = Checker(document)
    file = checker.shape()
    if file is not None:
        checker.meaning(file, outside or Outside())
    if checker.problems or file is None:
        raise SpaceProblems(source, checker.problems)
    return Space(file)


def apply_override(document: Document, override: str) -> None:
    """Sets one value: `workload.max_tokens=64`, `workload.concurrency=[1, 8]`, `parameters.topk.choices=[1, 4]`.

    A key with a dot of its own (`env.NAME`) is found where the file has it.

    Raises:
        UsageError: not of the form a.b=c, or it leads through something that holds no keys.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {override}: write it as a.b=c, for instance --set workload.max_tokens=64")
    value = read_document(text, f"--set {key}").value if text.strip() else parse_scalar(text)
    if not isinstance(document.value, dict):
        document.value = {}
    place: Any = document.value
    parts = key.strip().split(".")
    path: tuple[str | int, ...] = ()
    while True:
        if not isinstance(place, dict):
            raise UsageError(f"--set {override}: {'.'.join(map(str, path))} holds no keys")
        name, parts = _next_key(place, parts)
        path = (*path, name)
        if not parts:
            break
        place = place.setdefault(name, {})
    place[name] = value
    for known in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[known]  # a problem there is the command line's, not of a line of the file
    document.lines[path] = 0


def _next_key(place: dict[str, Any], parts: list[str]) -> tuple[str, list[str]]:
    if parts[0] == "env" and len(parts) > 1 and not isinstance(place.get("env"), dict):
        return f"env.{parts[1]}", parts[2:]
    return parts[0], parts[1:]
