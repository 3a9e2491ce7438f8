"""Charts as SVG, drawn here: no script, no font and nothing from a network is needed to look at them.

Colours are classes that the page's style sheet gives a value in light and in dark. Text is 1:1 with the page's where
the picture is shown at its own width, so each chart is drawn twice, for a wide and for a narrow page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from tuner.judge.recommend import percent
from tuner.judge.verdict import PRACTICAL
from tuner.report.document import Bars, Chart, Curve, Curves, Forest, Mark, Scatter
from tuner.report.words import short

WIDE, NARROW = 820, 316
"""Widths in pixels; a phone of 360 leaves the narrow one."""

EDGE = 10
CHARACTER = 6.7
"""Mean width of a character at 12 pixels, rather too wide than too narrow."""

FURTHEST = 5.0
"""Ratios beyond this, and below its inverse, are drawn at the edge."""

LEAST_WIDE = 500
FIGURE = 62
"""Room for a change such as +136.9 %, in pixels."""

STEPS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 400)
SERIES = 4
"""Colours and shapes of series; a fifth one begins again."""


@dataclass
class Drawing:
    """SVG elements in order, with everything escaped."""

    width: int
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, text: str | None = None, hint: str = "", **attributes: object) -> None:
        """One element. `hint` is shown when the pointer rests on it; `_` in a name stands for `-`, `cls` for class."""
        told = "".join(
            f' {"class" if name == "cls" else name.replace("_", "-")}="{escape(_plain(of))}"'
            for name, of in attributes.items()
        )
        inner = (f"<title>{escape(hint)}</title>" if hint else "") + (escape(text) if text is not None else "")
        self.parts.append(f"<{tag}{told}>{inner}</{tag}>" if inner else f"<{tag}{told}/>")

    def text(
        self, x: float, y: float, words: str, cls: str = "", room: float = math.inf, anchor: str = "start"
    ) -> None:
        """Words that are cut where the room ends; the whole is their hint."""
        fits = max(4, int(room / CHARACTER)) if math.isfinite(room) else len(words)
        cut = short(words, fits)
        self.add("text", cut, words if cut != words else "", x=x, y=y, cls=cls, text_anchor=anchor)

    def svg(self, height: float, label: str) -> str:
        """The whole picture; `label` is read out in its place."""
        return (
            f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {self.width} {_plain(height)}" '
            f'width="{self.width}" height="{_plain(height)}" xmlns="http://www.w3.org/2000/svg">'
            f"{''.join(self.parts)}</svg>"
        )


def _plain(value: object) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def draw(chart: Chart, width: int = WIDE) -> str:
    """The chart as an SVG element of this width."""
    if isinstance(chart, Forest):
        return _forest(chart, width)
    if isinstance(chart, Curves):
        return _curves(chart, width)
    if isinstance(chart, Scatter):
        return _scatter(chart, width)
    return _bars(chart, width)


def _label(chart: Chart) -> str:
    return f"{chart.title}. The table that follows has the figures."


# -- changes, one above the other ------------------------------------------------------------------------------------


def _forest(chart: Forest, width: int) -> str:
    """Wide: a label, its track and its figure beside each other. Narrow: one below the other."""
    drawing = Drawing(width)
    wide = width >= LEAST_WIDE
    row, track, begins, ends = 60, 46, float(EDGE + 4), float(width - EDGE - 4)
    if wide:
        row, track = 34, 20
        begins += min(0.36 * width, CHARACTER * max(len(mark.label) for mark in chart.marks))
        ends -= 24 + FIGURE + min(0.3 * width, CHARACTER * max(len(mark.note) for mark in chart.marks))
    values = [v for m in chart.marks for v in (m.value, m.low, m.high, *m.dots) if v is not None]
    low, high = _span(values)
    at = _scale(math.log(low), math.log(high), begins, ends)

    def x(ratio: float) -> float:
        return at(math.log(min(max(ratio, low), high)))

    bottom = len(chart.marks) * row + 4
    for tick in _ticks(low, high, max(3, int((ends - begins) / 64))):
        drawing.add("line", x1=x(tick), x2=x(tick), y1=4, y2=bottom, cls="zero" if tick == 1 else "grid")
        drawing.text(
            x(tick), bottom + 16, percent(tick).replace(".0", "") if tick != 1 else "0 %", "tick", anchor="middle"
        )
    for i, mark in enumerate(chart.marks):
        top, figure = i * row, percent(mark.value) if mark.value is not None else ""
        line = top + (24 if wide else 16)
        drawing.text(EDGE, line, mark.label, "label", room=begins - EDGE if wide else width - 2 * EDGE)
        left, below = (ends + 14, line) if wide else (float(EDGE), line + 17)
        drawing.text(left, below, figure, "figure")
        drawing.text(left + FIGURE, below, mark.note, "aside", room=width - left - FIGURE)
        _mark(drawing, chart, mark, x, top + track, (low, high))
    return drawing.svg(bottom + 24, _label(chart))


def _mark(
    drawing: Drawing, chart: Forest, mark: Mark, x: Callable[[float], float], y: float, ends: tuple[float, float]
) -> None:
    kind = _kind(chart, mark)
    hint = f"{mark.label}: {percent(mark.value)}"
    if mark.low is not None and mark.high is not None:
        hint += f" ({percent(mark.low)} to {percent(mark.high)})"
        drawing.add("line", None, hint, x1=x(mark.low), x2=x(mark.high), y1=y, y2=y, cls=f"interval {kind}")
    told = [v for v in (mark.value, mark.low, mark.high) if v is not None]
    for side in _beyond(told, ends):
        at = x(ends[0] if side < 0 else ends[1])
        _arrow(drawing, [(at + 6 * side, y), (at, y - 5), (at, y + 5)], kind, f"{hint}: beyond the axis")
    for dot in mark.dots:
        drawing.add("circle", None, percent(dot), cx=x(dot), cy=y + 8, r=2.5, cls="dot")
    if mark.value is not None:
        drawing.add("circle", None, hint, cx=x(mark.value), cy=y, r=5, cls=f"mark {kind}")


def _beyond(values: Sequence[float], ends: tuple[float, float]) -> list[int]:
    """The sides, -1 and 1, at which a mark or its interval runs off the axis and is cut."""
    off = {-1: min(values, default=ends[0]) < ends[0], 1: max(values, default=ends[1]) > ends[1]}
    return [side for side, runs in off.items() if runs]


def _arrow(drawing: Drawing, corners: Sequence[tuple[float, float]], kind: str, hint: str) -> None:
    points = " ".join(f"{_plain(a)},{_plain(b)}" for a, b in corners)
    drawing.add("polygon", None, hint, points=points, cls=f"beyond {kind}")


def _kind(chart: Forest, mark: Mark) -> str:
    if not mark.firm or mark.low is None or mark.high is None:
        return "search"
    up, down = mark.low > 1 + PRACTICAL, mark.high < 1 / (1 + PRACTICAL)
    good, bad = (up, down) if chart.better == "more" else (down, up)
    return "good" if good else "bad" if bad else "unsure"


# -- series over an axis -----------------------------------------------------------------------------------------------


def _curves(chart: Curves, width: int) -> str:
    drawing = Drawing(width)
    legend = 20 * len(chart.curves) + 6
    height, left = (220, 54) if width >= LEAST_WIDE else (190, 48)
    top, bottom = legend + 6, legend + 6 + height
    points = [point for curve in chart.curves for point in curve.points]
    xs = sorted({point.x for point in points})
    across = math.log if chart.y == "change" else float
    margin = 22.0
    over = _scale(across(xs[0]), across(xs[-1]), left + margin, width - EDGE - margin)
    ys = [v for point in points for v in (point.y, point.low, point.high) if v is not None]
    if chart.y == "change":
        low, high = _span(ys)
        rise = _scale(math.log(low), math.log(high), bottom - 6, top + 6)
        ticks = [(tick, percent(tick).replace(".0", "") if tick != 1 else "0 %") for tick in _ticks(low, high, 6)]
    else:
        low, high = 0.0, 1.0
        rise = _scale(low, high, bottom, top + 6)
        ticks = [(share / 4, f"{25 * share} %") for share in range(5)]
    onto = math.log if chart.y == "change" else float

    def y(value: float) -> float:
        return rise(onto(min(max(value, low), high)))

    for tick, words in ticks:
        cls = "zero" if chart.y == "change" and tick == 1 else "grid"
        drawing.add("line", x1=left, x2=width - EDGE, y1=y(tick), y2=y(tick), cls=cls)
        drawing.text(left - 6, y(tick) + 4, words, "tick", anchor="end")
    for value in xs:
        drawing.text(over(across(value)), bottom + 18, f"{value:g}", "tick", anchor="middle")
    drawing.text((left + width - EDGE) / 2, bottom + 36, chart.x_name, "tick", anchor="middle")
    for i, curve in enumerate(chart.curves):
        shift = (i - (len(chart.curves) - 1) / 2) * 5
        series = i if curve.series is None else curve.series
        _legend(drawing, curve, i, series, width)
        _curve(drawing, chart, curve, series, lambda v, s=shift: over(across(v)) + s, y, (low, high))  # type: ignore[misc]
    return drawing.svg(bottom + 44, _label(chart))


def _curve(
    drawing: Drawing,
    chart: Curves,
    curve: Curve,
    i: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
    ends: tuple[float, float],
) -> None:
    path = " ".join(f"{_plain(x(p.x))},{_plain(y(p.y))}" for p in curve.points)
    dashed = " dashed" if curve.predicted or not curve.firm else ""
    drawing.add("polyline", points=path, cls=f"curve c{i % SERIES}{dashed}")
    for point in curve.points:
        said = percent(point.y) if chart.y == "change" else f"{100 * point.y:.0f} %"
        if point.low is not None and point.high is not None:
            at = x(point.x)
            drawing.add("line", x1=at, x2=at, y1=y(point.low), y2=y(point.high), cls=f"whisker c{i % SERIES}")
        for side in _beyond([v for v in (point.y, point.low, point.high) if v is not None], ends):
            at, edge = x(point.x), y(ends[0] if side < 0 else ends[1])
            hint = f"{curve.name}, at {point.x:g}: beyond the axis"
            _arrow(drawing, [(at, edge - 6 * side), (at - 5, edge), (at + 5, edge)], f"c{i % SERIES}", hint)
        if not curve.predicted:
            _shape(drawing, i, x(point.x), y(point.y), f"{curve.name}, at {point.x:g}: {said}", curve.firm)


def _shape(drawing: Drawing, i: int, x: float, y: float, hint: str, firm: bool) -> None:
    cls = f"shape c{i % SERIES}{'' if firm else ' hollow'}"
    if i % SERIES == 0:
        drawing.add("circle", None, hint, cx=x, cy=y, r=4.5, cls=cls)
        return
    if i % SERIES == 1:
        corners = [(x - 4, y - 4), (x + 4, y - 4), (x + 4, y + 4), (x - 4, y + 4)]
    elif i % SERIES == 2:
        corners = [(x, y - 5.5), (x + 5, y + 4), (x - 5, y + 4)]
    else:
        corners = [(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)]
    drawing.add("polygon", None, hint, points=" ".join(f"{_plain(a)},{_plain(b)}" for a, b in corners), cls=cls)


def _legend(drawing: Drawing, curve: Curve, row: int, i: int, width: int) -> None:
    y = 14 + 20 * row
    dashed = " dashed" if curve.predicted or not curve.firm else ""
    drawing.add("line", x1=EDGE, x2=EDGE + 26, y1=y - 4, y2=y - 4, cls=f"curve c{i % SERIES}{dashed}")
    if not curve.predicted:
        _shape(drawing, i, EDGE + 13, y - 4, curve.name, curve.firm)
    search = "" if curve.firm or curve.predicted else " (search)"
    drawing.text(EDGE + 34, y, curve.name + search, "label", room=width - EDGE - 44)


# -- points in a plane -----------------------------------------------------------------------------------------------


def _scatter(chart: Scatter, width: int) -> str:
    drawing = Drawing(width)
    legend = 20 * len(chart.curves) + 6
    height, left = (300, 60) if width >= LEAST_WIDE else (240, 52)
    top, bottom = legend + 22, legend + 22 + height
    points = [point for curve in chart.curves for point in curve.points]
    over, xs = _decades([point.x for point in points], left + 14, width - EDGE - 14, 5)
    rates = [p.y for p in points]
    lowest, highest = min(rates) / FURTHEST, max(rates) * FURTHEST

    def cut(rate: float) -> float:
        return min(max(rate, lowest), highest)

    rise, ys = _decades([cut(v) for p in points for v in (p.y, p.low, p.high) if v], bottom - 8, top + 8, 6)
    drawing.text(EDGE, legend + 12, chart.y_name, "tick")
    for tick in ys:
        drawing.add("line", x1=left, x2=width - EDGE, y1=rise(tick), y2=rise(tick), cls="grid")
        drawing.text(left - 6, rise(tick) + 4, f"{tick:,.4g}", "tick", anchor="end")
    for tick in xs:
        drawing.add("line", x1=over(tick), x2=over(tick), y1=top, y2=bottom, cls="grid")
        drawing.text(over(tick), bottom + 18, f"{tick:,.4g}", "tick", anchor="middle")
    drawing.text((left + width - EDGE) / 2, bottom + 36, chart.x_name, "tick", anchor="middle")
    for i, curve in enumerate(chart.curves):
        y, dashed = 14 + 20 * i, "" if curve.firm else " dashed"
        drawing.add("line", x1=EDGE, x2=EDGE + 26, y1=y - 4, y2=y - 4, cls=f"curve c{i % SERIES}{dashed}")
        _shape(drawing, i, EDGE + 13, y - 4, curve.name, curve.firm)
        drawing.text(EDGE + 34, y, curve.name + " (in the set)" * curve.firm, "label", room=width - EDGE - 44)
        path = " ".join(f"{_plain(over(p.x))},{_plain(rise(p.y))}" for p in curve.points)
        drawing.add("polyline", points=path, cls=f"curve c{i % SERIES}{dashed}")
        for p in curve.points:
            if p.low and p.high:
                at = over(p.x)
                ends = cut(p.low), cut(p.high)
                drawing.add("line", x1=at, x2=at, y1=rise(ends[0]), y2=rise(ends[1]), cls=f"whisker c{i % SERIES}")
                for side in _beyond([p.low, p.high], ends):
                    edge = rise(ends[0] if side < 0 else ends[1])
                    corners = [(at, edge - 6 * side), (at - 5, edge), (at + 5, edge)]
                    _arrow(drawing, corners, f"c{i % SERIES}", f"{curve.name}: {p.low:.1f} to {p.high:.1f}")
            _shape(drawing, i, over(p.x), rise(p.y), f"{curve.name}: {p.y:.1f} at {p.x:.1f}", curve.firm)
    return drawing.svg(bottom + 44, _label(chart))


def _decades(
    values: Sequence[float], start: float, end: float, most: int
) -> tuple[Callable[[float], float], list[float]]:
    """A logarithmic scale over values above 0, with a little room, and round ticks on it."""
    low, high = min(values) / 1.05, max(values) * 1.05
    at = _scale(math.log(low), math.log(high), start, end)
    magnitudes = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [d * 10.0**m for m in magnitudes for d in digits if low <= d * 10.0**m <= high]
        if len(ticks) <= most:
            break
    return (lambda value: at(math.log(value))), ticks or sorted({min(values), max(values)})


# -- bars --------------------------------------------------------------------------------------------------------------


def _bars(chart: Bars, width: int) -> str:
    drawing = Drawing(width)
    top = 0
    if len(chart.parts) > 1:
        x = float(EDGE)
        for i, part in enumerate(chart.parts):
            drawing.add("rect", x=x, y=4, width=12, height=12, rx=2, cls=f"bar c{i % SERIES}")
            drawing.text(x + 17, 14, part, "tick")
            x += 30 + CHARACTER * len(part)
        top = 26
    longest = max(sum(bar.values) for bar in chart.bars) or 1.0
    room = width - 2 * EDGE
    for i, bar in enumerate(chart.bars):
        y = top + 42 * i
        total = math.fsum(bar.values)
        unit = f" {chart.unit}" if chart.unit else ""
        said = f"{total:.0f}{unit}" if chart.unit in ("", "%") else f"{total:.2f}{unit}"
        note = f"{said}{', ' if bar.note else ''}{bar.note}"
        drawing.text(EDGE, y + 14, bar.label, "label", room=room - CHARACTER * len(note) - 8)
        drawing.text(width - EDGE, y + 14, note, "figure", anchor="end")
        start = float(EDGE)
        for j, value in enumerate(bar.values):
            length = room * value / longest
            hint = f"{bar.label}, {chart.parts[j]}: {value:.3g}{unit}"
            drawing.add("rect", None, hint, x=start, y=y + 21, width=length, height=12, cls=f"bar c{j % SERIES}")
            start += length
    return drawing.svg(top + 42 * len(chart.bars) + 4, _label(chart))


# -- axes ------------------------------------------------------------------------------------------------------------


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if high <= low:
        return lambda _value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _span(ratios: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis of ratios: 1 lies within, a little room is left, and nothing goes beyond `FURTHEST`."""
    low = max(min([*ratios, 1 / 1.03]), 1 / FURTHEST)
    high = min(max([*ratios, 1.03]), FURTHEST)
    room = (high / low) ** 0.05
    return low / room, high * room


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round changes within an axis, no change among them, as ratios."""
    for step in STEPS:
        first, last = math.ceil(100 * (low - 1) / step), math.floor(100 * (high - 1) / step)
        if last - first + 1 <= most:
            return [1 + step * i / 100 for i in range(first, last + 1)]
    return [1.0]
