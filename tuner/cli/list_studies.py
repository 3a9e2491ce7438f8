"""`tuner list`: the studies that there are."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from tuner.cli import options
from tuner.cli.console import complain, say
from tuner.cli.status import FEW_BLOCKS

if TYPE_CHECKING:
    from tuner.study.data import StudyData


def command(storage: options.Storage = None) -> None:
    """List the studies in ./studies, or in the database of --storage."""
    from rich.console import Console
    from rich.table import Table

    from tuner.errors import UsageError
    from tuner.records import mark
    from tuner.study.database import open_database
    from tuner.study.lease import holder
    from tuner.study.names import local_studies
    from tuner.study.store import open_study, study_names
    from tuner.study.summary import summary

    if storage:
        engine = open_database(storage, create=False)
        names = study_names(engine)
        engine.dispose()
    else:
        names = local_studies()
    if not names:
        say("no studies here; begin one with: tuner run quickstart.yaml")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("study", "state", "launches", "candidates", "model", "best in the search", "decision"):
        table.add_column(column, no_wrap=True)
    for name in names:
        try:
            with closing(open_study(name, storage)) as store:
                data = store.data()
                working = holder(store.engine, store.name)
        except UsageError as error:
            complain(f"{name}: {error}")
            continue
        found = summary(data)
        best = found.incumbent
        table.add_row(
            name,
            "killed" if data.state == "running" and working is None else data.state,
            f"{found.launches_used}/{data.budget.launches}",
            str(len(data.measured)),
            data.space.model + mark(data.simulated),
            _best(best.value) if best else "–",
            _decision(data),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def _decision(data: StudyData) -> str:
    """What was confirmed, of a study that has ended."""
    from tuner.judge.recommend import percent
    from tuner.study.decide import pareto_set, recommendation

    if data.state != "done":
        return "–"
    if len(data.blocks) > FEW_BLOCKS:
        return f"tuner recommend {data.name}"
    if data.space.objective.maximize == "pareto":
        return f"{len(pareto_set(data))} in the Pareto set"
    found = recommendation(data)
    overall = found.overall
    if overall.winner is not None and overall.verdict is not None:
        return f"{percent(overall.verdict.speedup)}, confirmed"
    levels = [str(each.concurrency) for each in found.per_concurrency if each.winner is not None]
    return f"confirmed at concurrency {', '.join(levels)} alone" if levels else "keep the baseline"


def _best(value: float) -> str:
    from tuner.study.words import change

    return change(value)
