"""The project's tables, beside Optuna's in one database. Their names begin with `tuner_`, for Optuna has `studies`."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA_VERSION = 1

metadata = MetaData()

schema = Table("tuner_schema", metadata, Column("version", Integer, primary_key=True))

studies = Table(
    "tuner_studies",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("uid", String(32), nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("seed", Integer, nullable=False),
    Column("space", JSON, nullable=False),
    Column("space_text", Text, nullable=False),
    Column("fingerprint", JSON, nullable=False),
    Column("fingerprint_hash", String(12), nullable=False),
    Column("sampler", JSON, nullable=False),
    Column("budget", JSON, nullable=False),
)


def _study() -> Column[str]:
    return Column("study", String(64), nullable=False)


candidates = Table(
    "tuner_candidates",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("id", String(12), primary_key=True),
    Column("settings", JSON, nullable=False),
)

launches = Table(
    "tuner_launches",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _study(),
    Column("candidate", String(12), nullable=False),
    Column("role", String(16), nullable=False),
    Column("repetition", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("marker", String(200), nullable=False, default=""),
    Column("log_path", Text, nullable=False, default=""),
    Column("record", JSON),
    Column("pid", Integer),
    Column("started_at", Float, nullable=False),
    Column("ready_at", Float),
    Column("ended_at", Float),
    Column("effective", JSON),
    Column("exit_status", Integer),
    Column("stop_mode", String(32)),
    Column("failure", JSON),
    Column("forgiven", Boolean, nullable=False, default=False),
    ForeignKeyConstraint(["study", "candidate"], ["tuner_candidates.study", "tuner_candidates.id"]),
    sqlite_autoincrement=True,
)

blocks = Table(
    "tuner_blocks",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _study(),
    Column("candidate", String(12), nullable=False),
    Column("launch", Integer, nullable=False),
    Column("concurrency", Integer, nullable=False),
    Column("role", String(16), nullable=False),
    Column("repetition", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("valid", Boolean, nullable=False),
    Column("ended_at", Float, nullable=False),
    Column("block", JSON, nullable=False),
    ForeignKeyConstraint(["study", "candidate"], ["tuner_candidates.study", "tuner_candidates.id"]),
    ForeignKeyConstraint(["launch"], ["tuner_launches.id"]),
    UniqueConstraint("study", "candidate", "concurrency", "role", "repetition", "attempt", name="tuner_block_attempt"),
    sqlite_autoincrement=True,
)

# However a double measurement came about (two tuners, a bug): the database refuses the second one.
Index(
    "tuner_block_once",
    blocks.c.study,
    blocks.c.candidate,
    blocks.c.concurrency,
    blocks.c.role,
    blocks.c.repetition,
    unique=True,
    sqlite_where=text("valid = 1"),
    postgresql_where=text("valid"),
)

confirmations = Table(
    "tuner_confirmations",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("finalists", JSON, nullable=False),
    Column("first_repetition", Integer, nullable=False),
    Column("pairs", Integer, nullable=False),
    Column("spares", Integer, nullable=False),
)

pairs = Table(
    "tuner_pairs",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("candidate", String(12), primary_key=True),
    Column("concurrency", Integer, primary_key=True),
    Column("role", String(16), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("baseline_block", Integer, nullable=False),
    Column("candidate_block", Integer, nullable=False),
    Column("log_ratio", Float, nullable=False),
    ForeignKeyConstraint(["baseline_block"], ["tuner_blocks.id"]),
    ForeignKeyConstraint(["candidate_block"], ["tuner_blocks.id"]),
)

quality = Table(
    "tuner_quality",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("candidate", String(12), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("launch", Integer, nullable=False),
    Column("facts", JSON, nullable=False),
)
reconfigurations = Table(
    "tuner_reconfigurations",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _study(),
    Column("launch", Integer, nullable=False),
    Column("candidate", String(12), nullable=False),
    Column("role", String(16), nullable=False),
    Column("repetition", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("changes", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("effective", JSON),
    Column("failure", JSON),
    Column("forgiven", Boolean, nullable=False, default=False),
    ForeignKeyConstraint(["study", "candidate"], ["tuner_candidates.study", "tuner_candidates.id"]),
    ForeignKeyConstraint(["launch"], ["tuner_launches.id"]),
    sqlite_autoincrement=True,
)

YOUNGER = (quality, reconfigurations)
"""Tables that databases of this schema version may lack; each gets them with the first fact."""

verdicts = Table(
    "tuner_verdicts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _study(),
    Column("candidate", String(12), nullable=False),
    Column("concurrency", Integer),
    Column("verdict", JSON, nullable=False),
)

events = Table(
    "tuner_events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _study(),
    Column("at", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("message", Text, nullable=False),
)

event_facts = Table(
    "tuner_event_facts",
    metadata,
    Column("event", Integer, primary_key=True, autoincrement=False),
    _study(),
    Column("facts", JSON, nullable=False),
)
"""What of an event a study decides by, so that its message may be reworded; most have none."""

workers = Table(
    "tuner_workers",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("place", String(255), primary_key=True),
    Column("token", String(32), nullable=False),
    Column("host", String(255), nullable=False),
    Column("devices", Text, nullable=False),
    Column("boot", String(64), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", String(32), nullable=False),
    Column("renewed_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)
"""Whoever works on a study, with its lease."""

launch_places = Table(
    "tuner_launch_places",
    metadata,
    Column("launch", Integer, primary_key=True, autoincrement=False),
    _study(),
    Column("place", String(255), nullable=False),
)
"""Where a launch ran. One of a study that never noted it ran at the place of no name."""

abandoned = Table(
    "tuner_abandoned",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("repetition", Integer, primary_key=True),
    Column("why", Text, nullable=False),
)
"""Pairs of a confirmation whose worker is gone before they were whole; others were measured in their place."""

imports = Table(
    "tuner_imports",
    metadata,
    Column("study", String(64), primary_key=True),
    Column("source", String(64), primary_key=True),
    Column("candidate", String(12), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("why", Text, nullable=False),
    Column("value", Float),
)
"""What earlier studies knew of candidates when a study began: taken, stale, or left out, and why."""

MADE_WHEN_NEEDED = (quality, event_facts, workers, launch_places, abandoned, imports)
"""Tables that a database of this version may lack: they come with their first row, and reading does without them."""
