"""What mattered most?"""

from __future__ import annotations

from tuner.report.document import (
    Bar,
    Bars,
    Block,
    Forest,
    Heading,
    Mark,
    Paragraph,
    Section,
    Words,
    code,
    line,
    section,
    table,
)
from tuner.report.importance import LEAST_TRIALS
from tuner.report.view import StudyView
from tuner.report.words import change, count, value


def mattered(view: StudyView) -> Section:
    """The share of each setting in what sets good candidates apart, and what was seen with each value."""
    title, question = "Importance", "What mattered most?"
    if not view.effects:
        text = "No setting has been measured with more than one value."
        return section(title, question, [Paragraph(line(text), "lead")])
    blocks: list[Block | None] = [Paragraph(line(_lead(view)), "lead")]
    if view.importances:
        bars = tuple(Bar(each.name, (100 * each.share,), "") for each in view.importances)
        blocks += [
            Bars("Share of each setting in what sets the best candidates apart", ("share",), bars, "%"),
            table(
                ["Setting", "Share"],
                [[code(each.name), f"{100 * each.share:.0f} %"] for each in view.importances],
                "lr",
                f"PED-ANOVA over {count(_measured(view), 'measured candidate')}; no interval.",
            ),
        ]
    marks = tuple(
        Mark(
            f"{each.name} = {value(each.value)}",
            each.change.value,
            each.change.low,
            each.change.high,
            count(each.change.n, "candidate"),
            firm=each.change.low is not None,
        )
        for each in view.effects
    )
    rows: list[list[Words]] = [
        [code(each.name), code(value(each.value)), change(each.change, "candidate")] for each in view.effects
    ]
    return section(
        title,
        question,
        [
            *blocks,
            Heading(line("What was seen with each value")),
            Forest("Mean of the candidates of the search that have this value", marks),
            table(["Setting", "Value", "Mean change of throughput"], rows, "lll", "Over all levels, in the search."),
            Paragraph(line(_CAVEAT), "note"),
        ],
    )


_CAVEAT = (
    "Candidates are not drawn evenly: the search returns to what looked good, each is measured once there, and a value "
    "is seen only beside the others that it was tried with. So these say where to look, and decide nothing; a setting "
    "that was never varied has no share, however much it matters. Where settings act together, the shares depend on "
    "which of them is blamed."
)


def _measured(view: StudyView) -> int:
    return sum(c.overall is not None and c.id != view.baseline_id for c in view.candidates)


def _lead(view: StudyView) -> str:
    if not view.importances:
        return (
            f"{count(_measured(view), 'measured candidate')} say little about importance, which takes {LEAST_TRIALS} "
            "or more. What was seen with each value:"
        )
    first = view.importances[0]
    return (
        f"Most of what sets the best candidates apart lies in {first.name} ({100 * first.share:.0f} %), by "
        f"{count(_measured(view), 'measured candidate')}."
    )
