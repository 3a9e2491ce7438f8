"""A study's report as a document: the questions of a person who has to decide, in order, and their answers."""

from __future__ import annotations

from datetime import UTC, datetime

from tuner.report.document import Document, Line, Section, code, line, strong
from tuner.report.sections.certainty import certainty
from tuner.report.sections.circumstances import gates, machine, method, settings
from tuner.report.sections.decision import decision
from tuner.report.sections.failed import failed
from tuner.report.sections.following import following
from tuner.report.sections.latency import latency
from tuner.report.sections.leaderboard import leaderboard
from tuner.report.sections.mattered import mattered
from tuner.report.sections.tradeoff import tradeoff
from tuner.report.sections.traffic import traffic
from tuner.report.sections.why import why
from tuner.report.view import StudyView

SIMULATED = "SIMULATED: every figure comes from a model of a machine, not from a measurement."

SECTIONS = (
    decision,
    leaderboard,
    certainty,
    latency,
    traffic,
    tradeoff,
    why,
    mattered,
    failed,
    following,
    gates,
    settings,
    machine,
    method,
)


def report(view: StudyView) -> Document:
    """The report of any study, one in which everything failed included."""
    sections: list[Section | None] = [make(view) for make in SECTIONS]
    return Document(
        title=line(f"Study {view.name}"),
        warnings=tuple(_warnings(view)),
        facts=_facts(view),
        sections=tuple(each for each in sections if each is not None),
    )


def _warnings(view: StudyView) -> list[Line]:
    found = [line(strong(SIMULATED))] if view.simulated else []
    if view.state != "done":
        reason = f": {view.reason}" if view.reason else ""
        found.append(
            line(
                strong(f"The study is not done ({view.state}{reason})."),
                " This is what its records say so far. Go on: ",
                code(f"tuner resume {view.name}"),
            )
        )
    return found


def _facts(view: StudyView) -> tuple[str, ...]:
    cpu, gpus = view.machine.get("cpu"), view.machine.get("gpus") or []
    return (
        view.model,
        f"{view.engine} {view.engine_version}",
        "; ".join(map(str, gpus)) or str(cpu or "unknown machine"),
        f"{view.profile} profile",
        datetime.fromtimestamp(view.created_at, UTC).strftime("%Y-%m-%d"),
    )
