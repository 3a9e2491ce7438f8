"""Opening a study's database: SQLite or any other that SQLAlchemy knows, checked before it is trusted."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError

from tuner.errors import UsageError
from tuner.study import tables
from tuner.study.names import sqlite_file

LOCK_TIMEOUT_S = 60.0
"""How long to wait for another reader or writer of a SQLite file, a dashboard for instance."""


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


def open_database(url: str, *, create: bool) -> Engine:
    """The engine of a database with our tables in it.

    Raises:
        UsageError: it does not exist (and is not to be created), is not a database of ours, is damaged, is of another
            schema version, or cannot be reached. It is left as it was.
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        if not create:
            raise UsageError(f"there is no database {file}")
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        engine = _engine(url)
        _check(engine, create=create, where=str(file or engine.url.render_as_string(hide_password=True)))
    except OperationalError as error:
        if "locked" in str(error):
            raise UsageError(
                f"the database {file} is locked by another program; close it and run the same again"
            ) from error
        raise UsageError(f"the database cannot be opened: {error.orig}") from error
    except SQLAlchemyError as error:
        raise UsageError(f"the database cannot be opened: {getattr(error, 'orig', error)}") from error
    return engine


def _engine(url: str) -> Engine:
    sqlite = sqlite_file(url) is not None
    arguments = {"timeout": LOCK_TIMEOUT_S} if sqlite else {}
    try:
        engine = sa.create_engine(url, connect_args=arguments, json_serializer=dumps)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UsageError(f"the driver of this database is not installed: {error}") from None
    if sqlite:
        sa.event.listen(engine, "connect", _configure_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")  # readers and the writer do not wait for one another
    connection.execute("PRAGMA synchronous=FULL")  # a committed block survives a power cut
    connection.execute("PRAGMA foreign_keys=ON")


def _check(engine: Engine, *, create: bool, where: str) -> None:
    try:
        names = set(sa.inspect(engine).get_table_names())
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
                f"{where} has schema version {version}, this tuner writes {tables.SCHEMA_VERSION}. It was left as it "
                "is: continue it with the version that made it, or begin a new study with --study NAME"
            )
        if engine.dialect.name == "sqlite":
            answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if answer != "ok":
                raise UsageError(f"{where} is damaged ({answer}); restore a copy, or begin a new study")


def _create(engine: Engine) -> None:
    with engine.begin() as connection:
        tables.metadata.create_all(connection)
        if connection.execute(sa.select(tables.schema.c.version)).first() is None:
            connection.execute(sa.insert(tables.schema).values(version=tables.SCHEMA_VERSION))
