"""A document as one HTML page: no script, no network, readable in light, in dark and on a phone."""

from __future__ import annotations

from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from tuner.report.document import Bars, Chart, Curves, Document, Forest, Line, Scatter, Table, plain, printable
from tuner.report.markdown import excerpt
from tuner.report.svg import NARROW, WIDE, draw


def html(document: Document) -> str:
    """The page. Whatever the document's text holds, none of it is markup."""
    return printable(_environment().get_template("report.html.j2").render(document=document))


class Picture:
    """A chart for a notebook, which shows what `_repr_html_` returns."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart

    def _repr_html_(self) -> str:
        title = escape(self.chart.title)
        return printable(f"<style>{_file('charts.css')}</style><p><b>{title}</b></p>{draw(self.chart, WIDE)}")


def pictures(document: Document, title: str) -> list[Picture]:
    """The charts of the section of this title."""
    blocks = [block for section in document.sections if section.title == title for block in section.blocks]
    return [Picture(block) for block in blocks if isinstance(block, (Forest, Curves, Scatter, Bars))]


@cache
def _environment() -> Environment:
    found = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, loader=FunctionLoader(_file)
    )
    found.globals.update(wide=_picture(WIDE), narrow=_picture(NARROW), style=_style, groups=_groups)
    found.filters.update(kind=lambda block: type(block).__name__.lower(), plain=plain, excerpt=_excerpt, slug=_slug)
    return found


def _file(name: str) -> str:
    return (resources.files("tuner.report") / "page" / name).read_text(encoding="utf-8")


def _style() -> Markup:
    return Markup(_file("charts.css") + _file("report.css"))


def _picture(width: int) -> Any:
    return lambda chart: Markup(draw(chart, width))


def _excerpt(text: str) -> str:
    return "\n".join(excerpt(text))


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _groups(table: Table) -> list[tuple[tuple[Line, ...], bool]]:
    """Rows, and whether each begins a group: where the first cell is not left empty for the one above."""
    firsts = [bool(plain(row[0])) for row in table.rows]
    grouped = any(a and not b for a, b in pairwise(firsts))
    return [(row, grouped and first) for row, first in zip(table.rows, firsts, strict=True)]
