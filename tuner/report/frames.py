"""A study as pandas frames, for questions that no report answers.

    study = load_study("quickstart", "sqlite:///studies/reference/quickstart/study.db")
    study.blocks.groupby(["candidate", "concurrency"]).tokens_per_s.mean()

Frames are copies of what is stored: what is done to them changes no study.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tuner.judge.text import settings_line
from tuner.records import Percentiles
from tuner.report.view import StudyView, study_view
from tuner.study.data import StudyData
from tuner.study.names import check_name
from tuner.study.store import open_study


@dataclass(frozen=True)
class StudyFrames:
    """One study. Latencies are in milliseconds, times in seconds since the epoch, ratios are candidate / baseline.

    Args:
        view: what the report is made of.
        candidates: by id: `settings` in a line, each setting as `set.NAME`, `standing`, `overall` (a ratio).
        blocks: one row per measured block, valid or not: `candidate`, `concurrency`, `role`, `repetition`, `launch`,
            `valid`, `tokens_per_s`, latencies as `ttft_p50_ms`, `e2e_mean_ms`, …, `accept_length`, `simulated`, and the
            counters.
        pairs: one row per pair: `candidate`, `concurrency`, `role`, `index`, `ratio`, `log_ratio`, `simulated` and both
            blocks' ids.
        launches: one row per server start: `candidate`, `role`, `state`, `ready_s`, `duration_s`, `failure`.
        trials: Optuna's trials by number: `candidate`, `kind`, `value` (a log ratio), `feasible`.
    """

    view: StudyView
    candidates: pd.DataFrame
    blocks: pd.DataFrame
    pairs: pd.DataFrame
    launches: pd.DataFrame
    trials: pd.DataFrame


def load_study(name: str, storage: str | None = None) -> StudyFrames:
    """The study of this name, from `studies/NAME/study.db` of the folder one is in, or from the database `storage`.

    Raises:
        UsageError: there is none, or its database cannot be used.
    """
    with closing(open_study(check_name(name), storage)) as store:
        return frames(store.data())


def frames(data: StudyData) -> StudyFrames:
    """The frames of a study's records."""
    view = study_view(data)
    return StudyFrames(view, _candidates(view), _blocks(data), _pairs(data), _launches(data), _trials(data))


def _frame(rows: list[dict[str, Any]], index: str, columns: tuple[str, ...]) -> pd.DataFrame:
    """A frame that has its columns also where there is no row."""
    found = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[index, *columns])
    return found.set_index(index)


def _candidates(view: StudyView) -> pd.DataFrame:
    rows = [
        {
            "candidate": candidate.id,
            "standing": candidate.standing,
            "settings": settings_line(candidate.settings),
            "overall": candidate.overall,
            **{f"set.{name}": value for name, value in candidate.settings.items()},
        }
        for candidate in view.candidates
    ]
    return _frame(rows, "candidate", ("standing", "settings", "overall"))


def _latency(name: str, found: Percentiles) -> dict[str, float | None]:
    told: Mapping[str, float | None] = {"mean": found.mean, "p50": found.p50, "p90": found.p90, "p99": found.p99}
    return {f"{name}_{which}_ms": value for which, value in told.items()}


def _blocks(data: StudyData) -> pd.DataFrame:
    rows = []
    for stored in sorted(data.blocks.values(), key=lambda stored: stored.order):
        block = stored.block
        rows.append(
            {
                "block": stored.id,
                "candidate": stored.candidate_id,
                "concurrency": stored.concurrency,
                "role": stored.role,
                "repetition": stored.repetition,
                "launch": stored.launch_id,
                "started_at": block.started_at,
                "valid": block.valid,
                "tokens_per_s": block.tokens_per_s,
                "window_s": block.window_s,
                "requests": block.requests,
                "failed_requests": block.failed_requests,
                "accept_length": block.accept_length,
                **_latency("ttft", block.ttft_ms),
                **_latency("tpot", block.tpot_ms),
                **_latency("e2e", block.e2e_ms),
                **block.counters,
                "simulated": data.simulated,
            }
        )
    return _frame(rows, "block", ("candidate", "concurrency", "role", "valid", "tokens_per_s"))


def _pairs(data: StudyData) -> pd.DataFrame:
    rows = [
        {
            "candidate": pair.candidate_id,
            "concurrency": pair.concurrency,
            "role": pair.role,
            "index": pair.index,
            "log_ratio": pair.log_ratio,
            "baseline_block": pair.baseline_block,
            "candidate_block": pair.candidate_block,
            "simulated": data.simulated,
        }
        for pair in data.pairs
    ]
    columns = ["candidate", "concurrency", "role", "index", "log_ratio", "baseline_block", "candidate_block"]
    columns.append("simulated")
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(ratio=found.log_ratio.map(_exp))


def _exp(log: float) -> float:
    import math

    return math.exp(log)


def _launches(data: StudyData) -> pd.DataFrame:
    rows = [
        {
            "launch": launch.id,
            "candidate": launch.slot.candidate_id,
            "role": launch.slot.role,
            "state": launch.state,
            "started_at": launch.started_at,
            "ready_s": launch.ready_at - launch.started_at if launch.ready_at is not None else None,
            "duration_s": launch.duration_s,
            "failure": launch.failure.kind if launch.failure else None,
        }
        for launch in data.launches
    ]
    return _frame(rows, "launch", ("candidate", "role", "state", "failure"))


def _trials(data: StudyData) -> pd.DataFrame:
    rows = [
        {
            "trial": trial.number,
            "candidate": trial.candidate_id,
            "kind": trial.kind,
            "value": trial.value,
            "feasible": trial.feasible,
        }
        for trial in data.trials
    ]
    return _frame(rows, "trial", ("candidate", "kind", "value", "feasible"))
