"""A document as Markdown: the decision record to keep. Charts are left to HTML; their figures stand in the tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tuner.report.document import (
    Block,
    Bullets,
    Document,
    Excerpt,
    Heading,
    Line,
    Paragraph,
    Section,
    Span,
    Table,
    printable,
)

EVIDENCE_LINES = 16

_MARKUP = re.compile(r"[\\`*\[\]<>#&~]|(?<![^\W_])_|_(?![^\W_])")
"""What could be markup; an underscore between letters is none."""

_MARKER = re.compile(r"^(\d*)([-+=.)])")


def markdown(document: Document) -> str:
    """The document, ending in a newline. Whatever its text holds, none of it is markup."""
    parts = [f"# {_line(document.title)}", *(_begun(_line(warning)) for warning in document.warnings)]
    parts += [_section(section) for section in document.sections]
    return printable("\n\n".join(parts) + "\n")


def _section(section: Section) -> str:
    blocks = (text for block in section.blocks if (text := _block(block)))
    return "\n\n".join([f"## {_escaped(section.title)}", *blocks])


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        text = _begun(_line(block.text))
        return f"**{text}**" if block.role == "verdict" else text
    if isinstance(block, Heading):
        return f"### {_line(block.text)}"
    if isinstance(block, Bullets):
        return "\n".join(f"- {_begun(_line(item))}" for item in block.items)
    if isinstance(block, Table):
        return "\n".join(_table(block.head, block.rows, block.align))
    if isinstance(block, Excerpt):
        return _fenced(block.text)
    return ""


def _line(text: Line) -> str:
    return "".join(_span(span) for span in text).strip()


def _begun(text: str) -> str:
    """A line whose beginning is no mark of a list, a rule or a heading."""
    return _MARKER.sub(r"\g<1>\\\g<2>", text)


def _span(span: Span) -> str:
    if span.kind == "code":
        return _code(span.text)
    text = _escaped(span.text)
    return f"**{text.strip()}**" if span.kind == "strong" and text.strip() else text


def _table(head: Sequence[str], rows: Iterable[Sequence[Line]], align: str) -> list[str]:
    marks = {"l": ":--", "r": "--:"}
    lines = [f"| {' | '.join(_cell(_escaped(cell)) for cell in head)} |", f"| {' | '.join(marks[a] for a in align)} |"]
    return lines + [f"| {' | '.join(_cell(_line(cell)) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "


def _escaped(text: str) -> str:
    """Text that may hold anything, on one line, in which nothing is markup."""
    first, last = text[:1].isspace(), text[-1:].isspace()
    text = " ".join(text.split())
    text = _MARKUP.sub(r"\\\g<0>", text)
    return f"{' ' if first else ''}{text}{' ' if last and text else ''}"


def _code(text: str) -> str:
    """Text as code, on one line; backticks inside are held by a longer row of them."""
    text = " ".join(text.split())
    if not text:
        return "` `"
    longest = max((len(run) for run in _runs(text)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _runs(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split(" ") if run]


def _fenced(text: str) -> str:
    """Lines of a log as they are, in a fence that none of them can close."""
    lines = excerpt(text)
    fence = "```"
    while any(fence in one for one in lines):
        fence += "`"
    return "\n".join([fence + "text", *lines, fence])


def excerpt(text: str) -> list[str]:
    """The first and last lines of a log."""
    lines = text.rstrip().splitlines()
    if len(lines) <= EVIDENCE_LINES:
        return lines
    half = EVIDENCE_LINES // 2
    return [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
