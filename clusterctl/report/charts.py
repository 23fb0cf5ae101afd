"""Draw charts as inline SVG: lines over steps, histograms, bars, a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from clusterctl.report.curve import Point, finite, thinned
from clusterctl.text import count

LEFT, TOP = 58, 12


@dataclass(frozen=True)
class Frame:
    """The size of a chart; the drawing area leaves room for the labels of its axes."""

    width: int
    height: int

    @property
    def right(self) -> int:
        return self.width - 12

    @property
    def bottom(self) -> int:
        return self.height - 28


# A chart as wide as the page, and one of two side by side.
WIDE, HALF = Frame(1100, 260), Frame(540, 210)
# Pixel columns for which a curve keeps points.
COLUMNS = 350
COLOURS = 6


@dataclass(frozen=True)
class Line:
    """One series of a chart; several lines of one name share a legend entry and a colour."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    faint: bool = False
    """Steps that were repeated later."""


def number(value: float) -> str:
    """Return a label of an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return count(value)
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between two values."""
    step = 10.0 ** math.floor(math.log10((high - low) / most or 1.0))
    while (high - low) / step > most:
        step *= 2.5 if math.isclose(step / 10 ** math.floor(math.log10(step) + 1e-9), 2.0) else 2.0
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, int(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Scale:
    """The values at the edges of a chart."""

    x0: float
    x1: float
    y0: float
    y1: float
    frame: Frame

    @classmethod
    def of(cls, points: Sequence[Point], frame: Frame, *, from_zero: bool) -> _Scale:
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        low, high = min(ys), max(ys)
        low = min(low, 0.0) if from_zero else low
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        bottom = low if from_zero and low == 0 else low - margin
        x0, x1 = min(xs), max(xs)
        return cls(x0, x1 if x1 > x0 else x0 + 1, bottom, high + margin, frame)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.frame.right - LEFT)

    def y(self, value: float) -> float:
        bottom = self.frame.bottom
        return bottom - (value - self.y0) / (self.y1 - self.y0) * (bottom - TOP)


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[float] = (),
    *,
    wide: bool = False,
    from_zero: bool = False,
) -> str:
    """Return a chart over steps; `marks` are the steps at which the run was started again. "" without points."""
    lines = [
        Line(line.name, known, line.colour, line.dots, line.faint)
        for line in lines
        if (known := finite(line.points))
    ]
    if not lines:
        return ""
    frame = WIDE if wide else HALF
    scale = _Scale.of([point for line in lines for point in line.points], frame, from_zero=from_zero)
    body = [*_grid(scale), *(_mark(scale, step) for step in marks), *(_drawn(scale, line) for line in lines)]
    body.append(f'<line class="cursor off" x1="0" x2="0" y1="{TOP}" y2="{frame.bottom}"/>')
    edges = {"x0": scale.x0, "x1": scale.x1, "y0": scale.y0, "y1": scale.y1}
    edges |= {"left": LEFT, "right": frame.right, "top": TOP, "bottom": frame.bottom}
    data = "".join(f' data-{name}="{value:.9g}"' for name, value in edges.items())
    names = {line.name: line.colour for line in lines}
    return _figure(title, frame, "".join(body), f' data-x="step"{data}', _legend(names), wide=wide)


def _figure(
    title: str, frame: Frame, body: str, data: str = "", legend: str = "", *, wide: bool = False
) -> str:
    label = escape(title, quote=True)
    return (
        f'<figure class="{"wide" if wide else "half"}"{data}><h3>{escape(title)}</h3>'
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{label}">{body}</svg>'
        f'{legend}<div class="tip"></div></figure>'
    )


def _legend(names: dict[str, int]) -> str:
    if len(names) < 2:
        return ""
    buttons = [
        f'<button type="button" aria-pressed="true" data-series="{escape(name, quote=True)}">'
        f'<i class="f{colour % COLOURS}"></i>{escape(name)}</button>'
        for name, colour in names.items()
    ]
    return f'<div class="legend">{"".join(buttons)}</div>'


def _grid(scale: _Scale) -> list[str]:
    parts = []
    for value in ticks(scale.y0, scale.y1):
        y = scale.y(value)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{scale.frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in ticks(scale.x0, scale.x1, 7):
        at = f'x="{scale.x(value):.1f}" y="{scale.frame.bottom + 18}"'
        parts.append(f'<text {at} text-anchor="middle">{number(value)}</text>')
    return parts


def _mark(scale: _Scale, step: float) -> str:
    x = scale.x(min(max(step, scale.x0), scale.x1))
    title = f"<title>started again after step {step:g}</title>"
    return f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{scale.frame.bottom}">{title}</line>'


def _drawn(scale: _Scale, line: Line) -> str:
    shown = [(scale.x(x), scale.y(y)) for x, y in thinned(line.points, COLUMNS)]
    name, colour = escape(line.name, quote=True), line.colour % COLOURS
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
    faint = " faint" if line.faint else ""
    drawn = f'<polyline class="series c{colour}{faint}" data-name="{name}" points="{text}"/>'
    if line.dots or len(shown) == 1:
        circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in shown[:COLUMNS])
        drawn += f'<g class="f{colour}" data-name="{name}">{circles}</g>'
    return drawn


def histogram(title: str, values: Sequence[float], unit: str, bins: int = 50) -> str:
    """Return a histogram whose last bar holds everything above the 99.5th percentile. "" for fewer than two values."""
    known = sorted(value for value in values if math.isfinite(value))
    if len(known) < 2:
        return ""
    low, high = known[0], known[min(len(known) - 1, int(len(known) * 0.995))]
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in known:
        counts[min(int((value - low) / width), bins - 1)] += 1
    top, step, bottom = max(counts), (HALF.right - LEFT) / bins, HALF.bottom
    body = []
    for index, steps in enumerate(counts):
        tall = (bottom - TOP) * steps / top
        beyond = index == bins - 1 and high < known[-1]
        above = f"{low + index * width:.4g} {unit}{' and more' if beyond else ''}: {steps}"
        body.append(
            f'<rect class="f{1 if beyond else 0}" x="{LEFT + index * step:.1f}" y="{bottom - tall:.1f}"'
            f' width="{step - 1:.1f}" height="{tall:.1f}"><title>{escape(above)}</title></rect>'
        )
    for value in ticks(low, high if high > low else low + bins, 6):
        x = LEFT + (value - low) / width * step
        body.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number(value)}</text>')
    body.append(f'<text x="{LEFT - 6}" y="{TOP + 10}" text-anchor="end">{count(top)}</text>')
    return _figure(f"{title} ({unit})", HALF, "".join(body))


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value, and what was expected."""

    label: str
    value: float
    text: str
    expected: float = 0.0
    colour: str = "f0"


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return horizontal bars; the expected value is a wider bar behind each. "" without rows."""
    if not rows:
        return ""
    most = max(max(row.value, row.expected) for row in rows) or 1.0
    left, frame = 130, Frame(HALF.width, 22 * len(rows) + 8)
    body = []
    for index, row in enumerate(rows):
        y, room = 4 + 22 * index, frame.width - left - 100
        if row.expected:
            body.append(
                f'<rect class="fplan" x="{left}" y="{y}" width="{room * row.expected / most:.1f}" height="18"/>'
            )
        body.append(
            f'<rect class="{row.colour}" x="{left}" y="{y + 4}" width="{room * row.value / most:.1f}" height="10"/>'
        )
        body.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row.label)}</text>')
        longest = room * max(row.value, row.expected) / most
        body.append(f'<text x="{left + longest + 6:.1f}" y="{y + 13}">{escape(row.text)}</text>')
    return _figure(title, frame, "".join(body))


@dataclass(frozen=True)
class Span:
    """One attempt on the timeline."""

    began: float
    ended: float
    label: str
    colour: str
    """good, bad or warn."""


def timeline(title: str, spans: Sequence[Span]) -> str:
    """Return the attempts of a run as bars over time. "" without attempts."""
    if not spans:
        return ""
    first, last = min(span.began for span in spans), max(span.ended for span in spans)
    scale = (WIDE.width - 24) / ((last - first) or 1.0)
    body = []
    for span in spans:
        x, wide = 12 + (span.began - first) * scale, max((span.ended - span.began) * scale, 2.0)
        body.append(
            f'<rect class="f{span.colour}" x="{x:.1f}" y="6" width="{wide:.1f}" height="24" rx="3">'
            f"<title>{escape(span.label)}</title></rect>"
        )
    return _figure(title, Frame(WIDE.width, 36), "".join(body), wide=True)
