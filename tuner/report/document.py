"""What a report says, without a word about how it looks: sections of text, tables and charts.

Markdown and HTML are two renderings of the same document, so that both say the same figures. Text is never markup here:
each rendering escapes what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

NONE = "–"
"""In the place of a figure that is not known."""


@dataclass(frozen=True)
class Span:
    """A piece of text: plain, strong, or code (as it would be typed)."""

    text: str
    kind: Literal["plain", "strong", "code"] = "plain"


Line: TypeAlias = tuple[Span, ...]
"""Text on one line, or within one paragraph or cell."""

Words: TypeAlias = "str | Span | Line"


def line(*parts: Words) -> Line:
    """Text from pieces; a string is plain."""
    found: list[Span] = []
    for part in parts:
        if isinstance(part, str):
            found.append(Span(part))
        elif isinstance(part, Span):
            found.append(part)
        else:
            found.extend(part)
    return tuple(found)


def code(text: str) -> Span:
    """As it would be typed: settings, names, commands."""
    return Span(text, "code")


def strong(text: str) -> Span:
    """What the eye should find first."""
    return Span(text, "strong")


_UNPRINTABLE = {
    ord(c): "\ufffd"
    for low, high in (("\x00", "\x08"), ("\x0b", "\x1f"), ("\x7f", "\x9f"), ("\ud800", "\udfff"), ("\ufffe", "\uffff"))
    for c in map(chr, range(ord(low), ord(high) + 1))
} | dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")


def printable(text: str) -> str:
    """The text with a mark in place of what no file should hold: control characters, half characters, and those that
    turn the direction of what follows and so make a line read as something else."""
    return text.translate(_UNPRINTABLE)


def plain(text: Line) -> str:
    """The text alone, on one line."""
    return " ".join("".join(span.text for span in text).split())


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. The `lead` of a section is its answer in a sentence or two; the `verdict` is the report's."""

    text: Line
    role: Literal["text", "verdict", "lead", "note"] = "text"


@dataclass(frozen=True)
class Heading:
    """The head of a part of a section."""

    text: Line


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """A table. `align` has one letter per column: l or r. `caption` says what it shows to who cannot see the chart."""

    head: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    align: str
    caption: str = ""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a log, as they are."""

    text: str


@dataclass(frozen=True)
class Mark:
    """One figure in a `Forest`: a ratio with its interval, where it has one, over `n` of something.

    `dots` are the single values behind it. `firm` marks what a decision rests on; figures of the search are not.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    firm: bool = True
    dots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Forest:
    """Changes against the baseline, one above the other, on one logarithmic axis. Values are ratios, 1 is no change."""

    title: str
    marks: tuple[Mark, ...]
    better: Literal["more", "less"] = "more"
    """Whether a ratio above 1 is good (throughput) or bad (a latency)."""


@dataclass(frozen=True)
class Point:
    """A point of a curve, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """One series. `firm`: from a confirmation. `predicted`: from a model, drawn without points. Series of one number
    share a colour; without one it is the place among the curves."""

    name: str
    points: tuple[Point, ...]
    firm: bool = True
    predicted: bool = False
    series: int | None = None


@dataclass(frozen=True)
class Curves:
    """Series over a common axis. `change`: y are ratios, shown as a change in per cent; else y are shares of 1."""

    title: str
    x_name: str
    curves: tuple[Curve, ...]
    y: Literal["change", "share"] = "change"


@dataclass(frozen=True)
class Scatter:
    """Points in a plane of two logarithmic axes, those of one curve joined. A curve that is `firm` stands out."""

    title: str
    x_name: str
    y_name: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts, in the order of the chart's `parts`."""

    label: str
    values: tuple[float, ...]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars; `parts` names what each is made of, `unit` stands behind a value."""

    title: str
    parts: tuple[str, ...]
    bars: tuple[Bar, ...]
    unit: str = ""


Chart: TypeAlias = Forest | Curves | Scatter | Bars
Block: TypeAlias = Paragraph | Heading | Bullets | Table | Excerpt | Chart


@dataclass(frozen=True)
class Section:
    """A question of a person's, and its answer. `title` is a word for the contents, `question` what it answers."""

    title: str
    question: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report. `warnings` stand before everything else; `facts` are its circumstances in a few words."""

    title: Line
    warnings: tuple[Line, ...]
    facts: tuple[str, ...]
    sections: tuple[Section, ...]


def table(head: Sequence[str], rows: Iterable[Sequence[Words]], align: str, caption: str = "") -> Table:
    """A table from rows of words."""
    return Table(tuple(head), tuple(tuple(line(cell) for cell in row) for row in rows), align, caption)


def section(title: str, question: str, blocks: Iterable[Block | None]) -> Section:
    """A section without the blocks that are None."""
    return Section(title, question, tuple(block for block in blocks if block is not None))
