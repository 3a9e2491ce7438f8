"""A study in one file to hand on: configuration, database, logs and facts of the machine, without secrets."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuner.errors import EnvironmentBroken, UsageError
from tuner.secrets import LEFT_OUT, is_secret, redacted, without_secrets
from tuner.study.data import StudyData
from tuner.study.decide import recommendation
from tuner.study.hardware import hardware
from tuner.study.store import StudyStore

SHORTEST = 6
"""Characters: a shorter value of a secret variable stands in too many places that mean something else."""

LOG_BYTES = 8 << 20
"""Of one log, beginning and end."""

_TEXTS = (".log", ".jsonl", ".json", ".md", ".yaml", ".txt", ".cid")

_PACKAGES = ("spec-tuner", "optuna", "sqlalchemy", "numpy", "scipy", "torch", "vllm", "sglang")


class Secrets:
    """What must not be in a pack: values of variables that are secrets by their name, and what looks like one."""

    def __init__(self, environment: Mapping[str, str], also: str | None = None) -> None:
        named = {value for name, value in environment.items() if is_secret(name) or name == also}
        self.values = sorted((value for value in named if len(value) >= SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """A text without them."""
        for value in self.values:
            text = text.replace(value, LEFT_OUT)
        return redacted(text)

    def json(self, value: Any) -> Any:
        """A JSON value without them."""
        return self._values(without_secrets(value))

    def _values(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._values(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._values(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def stored(self, text: str) -> str:
        """What a database keeps as text: JSON stays JSON."""
        if text[:1] in "{[":
            try:
                value = json.loads(text)
            except ValueError:
                return self.text(text)
            clean = self.json(value)
            return text if clean == value else json.dumps(clean, ensure_ascii=False)
        return self.text(text)

    def within(self, content: bytes) -> bool:
        """Whether one of the values is there after all."""
        return any(value.encode() in content for value in self.values)


def pack(store: StudyStore, data: StudyData, folder: Path, output: Path, report: str) -> list[str]:
    """Writes the pack to `output` (.tar.gz), whole or not at all; returns the names of what is in it.

    Per-request records are left out: they hold the prompts and answers of whoever's traffic it was.

    Raises:
        UsageError: the output exists, or cannot be written.
        EnvironmentBroken: a secret would still be in it.
    """
    if output.exists():
        raise UsageError(f"{output} exists; it is left as it is. Nothing was written; name another with --output")
    secrets = Secrets(os.environ, data.space.api_key_env)
    members = dict(_members(store, data, folder, report, secrets))
    leaking = [name for name, content in members.items() if secrets.within(content)]
    if leaking:
        raise EnvironmentBroken(f"the value of a secret variable is still in {leaking[0]}; nothing was written")
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    manifest = {"what": f"tuner pack of {data.name}", "study": data.name, "state": data.state, "sha256": sums}
    members["manifest.json"] = _json(manifest)
    try:
        _write(output, data.name, members)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}. Nothing was written.") from error
    return sorted(members)


def _members(
    store: StudyStore, data: StudyData, folder: Path, report: str, secrets: Secrets
) -> Iterator[tuple[str, bytes]]:
    yield "space.json", _json(secrets.json(data.space.to_dict()))
    yield "report.md", secrets.text(report).encode()
    yield "recommendation.json", _json(secrets.json(_plain(recommendation(data))))
    yield "host.json", _json(secrets.json(_host(data)))
    yield from _database(store, data, secrets)
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_symlink() or not path.is_file() or name.parts[0] == "requests" or path.suffix not in _TEXTS:
            continue
        text = _read(path)
        if path.suffix == ".jsonl":
            text = "\n".join(secrets.stored(row) for row in text.split("\n"))
        else:
            text = secrets.stored(text)
        yield f"files/{name.as_posix()}", text.encode()


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            if size <= LOG_BYTES:
                return file.read().decode(errors="replace")
            beginning = file.read(LOG_BYTES // 2)
            file.seek(size - LOG_BYTES // 2)
            cut = f"\n… {size - LOG_BYTES} bytes left out …\n".encode()
            return (beginning + cut + file.read()).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"


def _plain(value: Any) -> Any:
    from dataclasses import asdict

    return asdict(value)


def _host(data: StudyData) -> dict[str, Any]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "measured_on": dict(data.fingerprint),
        "packed_on": {**hardware(), "system": platform.platform(), "python": platform.python_version()},
        "packages": found,
    }


def _database(store: StudyStore, data: StudyData, secrets: Secrets) -> Iterator[tuple[str, bytes]]:
    """SQLite as a database, another one as the rows of this study."""
    if store.engine.dialect.name == "sqlite" and store.engine.url.database not in (None, "", ":memory:"):
        yield "study.db", _sqlite(str(store.engine.url.database), secrets)
        return
    from tuner.study import tables as t

    rows: dict[str, list[Any]] = {}
    with store.engine.connect() as connection:
        there = set(sa.inspect(connection).get_table_names())
        for table in t.metadata.sorted_tables:
            if table.name not in there:
                continue  # it comes with its first row
            if "study" in table.c:
                found = connection.execute(table.select().where(table.c.study == data.name)).mappings()
            elif "name" in table.c:
                found = connection.execute(table.select().where(table.c.name == data.name)).mappings()
            else:
                continue
            rows[table.name] = [json.loads(json.dumps(dict(row), default=str)) for row in found]
    yield "study.json", _json(secrets.json(rows))


def _sqlite(file: str, secrets: Secrets) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "study.db"
        source = sqlite3.connect(f"file:{Path(file).resolve().as_posix()}?mode=ro", uri=True)
        target = sqlite3.connect(copy)
        try:
            source.backup(target)
            _clean(target, secrets)
            target.commit()
            # What was overwritten must not stay in free pages.
            target.execute("pragma journal_mode = delete")
            target.execute("vacuum")
        finally:
            source.close()
            target.close()
        return copy.read_bytes()


def _clean(connection: sqlite3.Connection, secrets: Secrets) -> None:
    named = "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'"
    for (table,) in connection.execute(named).fetchall():
        columns = [row[1] for row in connection.execute(f'pragma table_info("{table}")')]
        for column in columns:
            rows = connection.execute(f'select rowid, "{column}" from "{table}" where typeof("{column}") = \'text\'')
            changed = [(clean, row) for row, text in rows.fetchall() if (clean := secrets.stored(text)) != text]
            connection.executemany(f'update "{table}" set "{column}" = ? where rowid = ?', changed)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _write(output: Path, study: str, members: Mapping[str, bytes]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with open(handle, "wb") as file:
            with (
                gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w") as tar,
            ):
                for name, content in members.items():
                    info = tarfile.TarInfo(f"{study}/{name}")
                    info.size, info.mode = len(content), 0o644
                    tar.addfile(info, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
