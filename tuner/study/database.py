"""Opening a study's database: SQLite or any other that SQLAlchemy knows, checked before it is trusted."""

from __future__ import annotations

import errno
import json
import math
import sqlite3
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError

from tuner.errors import EnvironmentBroken, TunerError, UsageError
from tuner.study import tables
from tuner.study.address import parsed, shown, without_secrets
from tuner.study.names import sqlite_file
from tuner.study.postgres import CONNECT_S, of_postgres, postgres_problem
from tuner.study.turn import making_tables

LOCK_TIMEOUT_S = 60.0
"""How long to wait for another reader or writer of a SQLite file, a dashboard for instance."""
WAIT_S = 0.01
"""Between two attempts to give a new file its write-ahead log."""


def _plain(value: Any) -> Any:
    """NumPy scalars as plain numbers; they come from metrics."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored")


def dumps(value: Any) -> str:
    """JSON text. NaN and infinities are refused: a database that holds them poisons whatever is fitted to it."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)


def finite(value: Any) -> Any:
    """The same data with None for every number that is not finite, for what others report about themselves."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
BROKEN_DISK = (errno.EIO, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


def storage_problem(error: BaseException) -> TunerError | None:
    """What went wrong with a study's database or files, for a person; None when the error is of another kind.

    What was said first counts: an `EnvironmentBroken` in whose wake the storage failed again says more.
    """
    found: TunerError | None = None
    seen: BaseException | None = error
    while seen is not None:
        if found is not None and isinstance(seen, EnvironmentBroken):
            return seen
        if found is None and isinstance(seen, (SQLAlchemyError, sqlite3.Error)):
            found = _database_problem(seen)
        if found is None and isinstance(seen, OSError) and seen.errno in (*FULL, *FORBIDDEN, *BROKEN_DISK):
            found = _file_problem(seen)
        seen = seen.__cause__ or seen.__context__
    return found


def _database_problem(error: Exception) -> TunerError | None:
    if of_postgres(error):
        return postgres_problem(error)
    said = str(getattr(error, "orig", None) or error)
    low = said.lower()
    kept = "Everything measured is kept; run the same again"
    if "locked" in low or "busy" in low:
        return EnvironmentBroken(f"the study's database is locked: another program holds it. {kept} once it lets go")
    if "readonly" in low or "read-only" in low:
        return EnvironmentBroken(f"the study's database cannot be written ({said}). {kept} once it may be written to")
    if "full" in low or "disk i/o" in low:
        return EnvironmentBroken(f"the disk of the study's database is full or broken ({said}). {kept} with room on it")
    if "malformed" in low or "not a database" in low:
        return UsageError(f"the study's database is damaged ({said}). It was left as it is; restore a copy of it")
    if "no such column" in low or "no such table" in low or "has no column" in low:
        return UsageError(f"{OTHER_VERSION} ({said}). {ADVICE}")
    if isinstance(error, (OperationalError, sqlite3.OperationalError)):
        return EnvironmentBroken(f"the study's database cannot be read or written ({said}). {kept} once it can")
    return None


def _file_problem(error: OSError) -> TunerError:
    where = error.filename or "a file of the study"
    kept = "Everything measured is kept; run the same again once that is mended"
    if error.errno in FULL:
        return EnvironmentBroken(f"{where} cannot be written: the disk, or what may be used of it, is full. {kept}")
    return EnvironmentBroken(f"{where} cannot be written: {error.strerror}. {kept}")


OTHER_VERSION = "this study was made by another version of the tuner"
ADVICE = (
    "It was left as it is: continue it with the version that made it, or begin a new study with --study NAME (or a new "
    "--storage)"
)


def open_database(url: str, *, create: bool) -> Engine:
    """The engine of a database with our tables in it.

    Raises:
        UsageError: it does not exist (and is not to be created), is not a database of ours, is damaged or of another
            version. It is left as it was.
        EnvironmentBroken: it is locked, cannot be reached, or cannot be written.
    """
    file = sqlite_file(url)
    try:
        if file is not None and file.exists() and not file.is_file():
            raise UsageError(f"{file} is no file, so no database: move it away, and put the study's own back")
        if file is not None and not file.exists():
            if not create:
                raise UsageError(f"there is no database {file}")
            file.parent.mkdir(parents=True, exist_ok=True)
        engine = engine_of(url)
        _check(engine, create=create, where=str(file or shown(url)))
    except OSError as error:
        raise EnvironmentBroken(f"the folder of {file} cannot be made or read: {error.strerror}") from error
    except SQLAlchemyError as error:
        # The cause is not chained: what it shows of the connection is the address, password and all.
        known = storage_problem(error) if isinstance(error, OperationalError) or of_postgres(error) else None
        said = without_secrets(str(getattr(error, "orig", None) or error), url)
        raise (known or UsageError(f"the database cannot be opened: {said}")) from None
    return engine


def engine_of(url: str) -> Engine:
    """The engine of a database, which nobody has looked into yet."""
    sqlite = sqlite_file(url) is not None
    arguments = {"connect_args": {"timeout": LOCK_TIMEOUT_S}} if sqlite else network_arguments(url)
    try:
        engine = sa.create_engine(url, json_serializer=dumps, **arguments)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        hint = " Install it with: pip install 'spec-tuner[postgres]'" if "psycopg" in str(error) else ""
        raise UsageError(f"the driver of this database is not installed: {error}.{hint}") from None
    if sqlite:
        sa.event.listen(engine, "connect", _configure_sqlite)
    return engine


def network_arguments(url: str) -> dict[str, Any]:
    """How engines of a database behind a network are made: no connection is trusted, none is waited for for ever."""
    timeouts = {"connect_timeout": CONNECT_S} if parsed(url).get_backend_name() == "postgresql" else {}
    return {"pool_pre_ping": True, "connect_args": timeouts}


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous=FULL")  # a committed block survives a power cut
    connection.execute("PRAGMA foreign_keys=ON")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Readers and the writer do not wait for one another.

    Of several that turn a new file into one with a write-ahead log, SQLite tells all but one at once that it is locked,
    whatever the timeout of the connection: two that wait for one another would wait for ever.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(WAIT_S)


def _check(engine: Engine, *, create: bool, where: str) -> None:
    try:
        names = set(sa.inspect(engine).get_table_names())
    except OperationalError:
        raise  # locked, or out of reach: nothing is known against the file
    except DatabaseError as error:
        raise UsageError(f"{where} is not a database, or is damaged ({error.orig}); it was left as it is") from None
    if tables.schema.name not in names:
        foreign = {name for name in names if not name.startswith(("tuner_", "sqlite_"))}
        if foreign and not create:
            raise UsageError(f"{where} holds no study of this tuner")
        if foreign and engine.dialect.name == "sqlite":
            raise UsageError(
                f"{where} belongs to another program ({', '.join(sorted(foreign)[:3])}, …); name another file"
            )
        if not create:
            raise UsageError(f"{where} holds no study")
        _create(engine)
        return
    with engine.connect() as connection:
        version = connection.execute(sa.select(tables.schema.c.version)).scalar()
    if version is None and create:
        _create(engine)  # a tuner was killed while it created the tables
        return
    with engine.connect() as connection:
        if version != tables.SCHEMA_VERSION:
            raise UsageError(
                f"{OTHER_VERSION}: {where} has schema version {version}, this one writes {tables.SCHEMA_VERSION}. "
                + ADVICE
            )
        if lacking := _lacking(engine):
            raise UsageError(f"{OTHER_VERSION}: {where} has no {', no '.join(lacking)}. {ADVICE}")
        if engine.dialect.name == "sqlite":
            answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if answer != "ok":
                raise UsageError(f"{where} is damaged ({answer}); restore a copy, or begin a new study")


def _lacking(engine: Engine) -> list[str]:
    """Tables and columns of ours that the database does not have: a version may change them and forget its number."""
    inspector = sa.inspect(engine)
    there = set(inspector.get_table_names())
    found = []
    for table in tables.metadata.sorted_tables:
        if table.name not in there and table in tables.YOUNGER:
            continue
        if table.name not in there:
            if table not in tables.MADE_WHEN_NEEDED:
                found.append(f"table {table.name}")
            continue
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        found += [f"column {table.name}.{name}" for name in table.columns.keys() if name not in columns]  # noqa: SIM118
    return found


def _create(engine: Engine) -> None:
    with making_tables(engine), engine.begin() as connection:
        tables.metadata.create_all(connection)
        if connection.execute(sa.select(tables.schema.c.version)).first() is None:
            connection.execute(sa.insert(tables.schema).values(version=tables.SCHEMA_VERSION))
