"""What to try next?"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line
from tuner.report.document import Bullets, Line, Paragraph, Section, code, line, section
from tuner.report.view import StudyView
from tuner.report.words import value

MOST_VALUES = 6


def following(view: StudyView) -> Section:
    """What would make the answer firmer or better, and what to heed; each from what the study has and lacks."""
    items = tuple(_items(view))
    blocks = [Bullets(items) if items else Paragraph(line("Nothing: this study leaves no question open."), "lead")]
    return section("Next", "What to try next?", blocks)


def _items(view: StudyView) -> Iterator[Line]:
    if view.state != "done":
        yield line("The study is not done. Go on with ", code(f"tuner resume {view.name}"), ".")
    if view.recommendation.overall.winner is not None and view.state == "done":
        yield line(
            "Deploy the winner as it was measured: ",
            code(f"tuner export {view.name} --format shell --output out"),
            ".",
        )
    yield from (line(note) for note in view.recommendation.advice)
    yield from _unconfirmed(view)
    yield from _edges(view)
    yield from _holes(view)
    if any(found.failure.blame == "environment" for found in view.failures):
        yield line("Some launches failed by the machine's fault, not the candidates'; see to it and go on.")
    if view.invalid and not all(bad.repeated for bad in view.invalid):
        yield line("Some blocks never passed their gates, so that a figure is missing; a quieter machine gives it.")


def _unconfirmed(view: StudyView) -> Iterator[Line]:
    """What was faster in the search than the best finalist turned out to be."""
    best = view.recommendation.overall.verdict
    for candidate in view.candidates:
        if candidate.standing != "screened" or candidate.overall is None or best is None or best.speedup is None:
            continue
        if candidate.overall > best.speedup > 0 and candidate.overall > 1:
            yield line(
                code(settings_line(candidate.settings)),
                f" was at {percent(candidate.overall)} in the search, above what the best finalist confirmed "
                f"({percent(best.speedup)}), and was not confirmed itself. A study with a larger ",
                code("budget.launches"),
                " confirms more finalists.",
            )
            return


def _edges(view: StudyView) -> Iterator[Line]:
    """Values of the best candidate at the end of a range."""
    best = next((view.candidate(candidate_id) for candidate_id in view.shown), None)
    for name, (low, high) in view.ranges.items():
        mine = best.settings.get(name) if best is not None else None
        if mine is not None and mine in (low, high) and low != high:
            end = "highest" if mine == high else "lowest"
            yield line(
                "The best candidate has the ",
                f"{end} ",
                code(name),
                f" that the space allows ({value(mine)}); widen it.",
            )


def _holes(view: StudyView) -> Iterator[Line]:
    for name, values in view.untried.items():
        listed = ", ".join(value(each) for each in values[:MOST_VALUES])
        more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
        yield line("Never measured: ", code(name), f" at {listed}{more}.")
