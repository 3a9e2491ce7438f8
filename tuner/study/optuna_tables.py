"""Optuna's tables, read in a handful of statements: its own way builds twelve objects for every trial.

Only of the version that is written down here; `Trials` asks Optuna itself about any other one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from tuner.study.data import StoredTrial

VERSION = "v3.2.0.a"
"""Of Optuna's tables, as its migrations number them."""

MOST_NAMED = 200
"""Trials that a statement names one by one; of more it reads all."""

FINISHED = ("COMPLETE", "PRUNED", "FAIL")
CONSTRAINT = "constraints:"

_version = sa.table("alembic_version", sa.column("version_num"))
_studies = sa.table("studies", sa.column("study_id"), sa.column("study_name"))
_trials = sa.table("trials", *map(sa.column, ("trial_id", "number", "study_id", "state")))
_values = sa.table("trial_values", *map(sa.column, ("trial_id", "objective", "value", "value_type")))
_user = sa.table("trial_user_attributes", *map(sa.column, ("trial_id", "key", "value_json")))
_system = sa.table("trial_system_attributes", *map(sa.column, ("trial_id", "key", "value_json")))
_params = sa.table(
    "trial_params", *map(sa.column, ("param_id", "trial_id", "param_name", "param_value", "distribution_json"))
)


def known(connection: sa.Connection, study: str) -> bool:
    """Whether the tables are of the version that is read here, with this study among them."""
    there = set(sa.inspect(connection).get_table_names())
    if not {_version.name, _studies.name} <= there:
        return False
    if connection.execute(sa.select(_version.c.version_num)).scalars().all() != [VERSION]:
        return False
    return connection.execute(sa.select(_studies.c.study_id).where(_studies.c.study_name == study)).first() is not None


def read(
    connection: sa.Connection, study: str, before: Mapping[int, StoredTrial] | None = None, *, params: bool = True
) -> tuple[StoredTrial, ...]:
    """All trials of a study, by number.

    Args:
        connection: to the database.
        study: its name.
        before: trials by number, as an earlier call has read them: a finished one never changes.
        params: whether to read their parameters, which are most of the rows.
    """
    ours = sa.select(_studies.c.study_id).where(_studies.c.study_name == study).scalar_subquery()
    of_study = sa.select(_trials.c.trial_id, _trials.c.number, _trials.c.state).where(_trials.c.study_id == ours)
    rows = connection.execute(of_study).all()
    found = {number: trial for number, trial in (before or {}).items() if not trial.running}
    new = {row.trial_id: row for row in rows if row.number not in found}
    if new:
        every = sa.select(_trials.c.trial_id).where(_trials.c.study_id == ours)
        details = _details(connection, list(new) if len(new) <= MOST_NAMED else every, params)
        for trial_id, row in new.items():
            found[row.number] = _stored(row.number, row.state not in FINISHED, *details(trial_id))
    return tuple(found[row.number] for row in sorted(rows, key=lambda row: row.number))


_Details = tuple[dict[str, Any], dict[str, float], "float | None", dict[str, Any]]


def _details(connection: sa.Connection, named: Any, params: bool) -> Callable[[int], _Details]:
    """Of a trial's id: its attributes, constraints, value and parameters."""
    attributes: dict[int, dict[str, Any]] = {}
    for trial, key, text in connection.execute(sa.select(*_user.c).where(_user.c.trial_id.in_(named))):
        attributes.setdefault(trial, {})[key] = _parsed(text)
    constraints: dict[int, dict[str, float]] = {}
    wanted = (_system.c.trial_id.in_(named), _system.c.key.startswith(CONSTRAINT))
    for trial, key, text in connection.execute(sa.select(*_system.c).where(*wanted)):
        constraints.setdefault(trial, {})[key.removeprefix(CONSTRAINT)] = float(_parsed(text))
    of_first = sa.select(_values.c.trial_id, _values.c.value, _values.c.value_type).where(
        _values.c.trial_id.in_(named), _values.c.objective == 0
    )
    values = {trial: _number(value, kind) for trial, value, kind in connection.execute(of_first)}
    chosen: dict[int, dict[str, Any]] = {}
    if params:
        in_order = sa.select(*_params.c).where(_params.c.trial_id.in_(named)).order_by(_params.c.param_id)
        for _, trial, name, value, distribution in connection.execute(in_order):
            chosen.setdefault(trial, {})[name] = _external(distribution)(value)
    return lambda i: (attributes.get(i, {}), constraints.get(i, {}), values.get(i), chosen.get(i, {}))


def _stored(
    number: int,
    running: bool,
    attributes: Mapping[str, Any],
    constraints: Mapping[str, float],
    value: float | None,
    params: Mapping[str, Any],
) -> StoredTrial:
    place, repetition = attributes.get("at", ("", 0))
    return StoredTrial(
        number=number,
        candidate_id=attributes["candidate"],
        kind=attributes["kind"],
        running=running,
        params=params,
        value=value,
        constraints=constraints,
        why=attributes.get("why", ""),
        place=place,
        repetition=repetition,
    )


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    return json.loads(text)


def _number(value: float | None, kind: str) -> float | None:
    return {"INF_POS": math.inf, "INF_NEG": -math.inf}.get(kind, value)


@lru_cache(maxsize=1024)
def _external(distribution: str) -> Callable[[float], Any]:
    """What a parameter's number stands for."""
    told = json.loads(distribution)
    if told["name"] == "CategoricalDistribution":
        choices = told["attributes"]["choices"]
        return lambda value: choices[int(value)]
    return int if told["name"] == "IntDistribution" else float
