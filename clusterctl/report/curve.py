"""Reduce long curves to the points that a screen or a page can show, and draw them in a line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
# For terminals without Unicode.
PLAIN = "_.-~=+*#"

Point = tuple[float, float]


def thinned(points: Sequence[Point], columns: int) -> list[Point]:
    """Return the points that `columns` pixel columns need: the first, lowest, highest and last of each column."""
    if len(points) <= 4 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    chosen: list[Point] = []
    begin = 0
    while begin < len(points):
        end = begin
        column = int((points[begin][0] - first) / width)
        while end < len(points) and int((points[end][0] - first) / width) == column:
            end += 1
        end = max(end, begin + 1)
        part = points[begin:end]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        chosen += dict.fromkeys(sorted((part[0], low, high, part[-1])))
        begin = end
    return chosen


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points whose value is a finite number."""
    return [point for point in points if math.isfinite(point[1])]


def means(values: Sequence[float], columns: int) -> list[float]:
    """Return the means of `values` in `columns` equal parts; fewer values are returned as they are."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) <= columns:
        return known
    edges = [len(known) * column // columns for column in range(columns + 1)]
    return [math.fsum(known[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], columns: int = 32, *, unicode: bool = True) -> str:
    """Return the values as one line of text; "" for fewer than two values."""
    shown = means(values, columns)
    if len(shown) < 2:
        return ""
    letters = BLOCKS if unicode else PLAIN
    low, high = min(shown), max(shown)
    step = (high - low) / (len(letters) - 1) or 1.0
    return "".join(letters[round((value - low) / step)] for value in shown)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
