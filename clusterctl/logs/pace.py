"""Measure how long the steps of a program take from the times of its reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

# Ratio of a duration to the resolution of its clock from which it counts: the error is then at most 5 %.
EXACT = 20
# Seconds: when the last bytes of a file were written, as its node's kernel records it.
ARRIVAL = 0.01
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{3,6}))?")
# First characters of a line in which a time of day is searched.
STAMPED = 100
_EPOCH = datetime(1970, 1, 1)


@dataclass
class Pace:
    """The seconds of a step, measured by one clock."""

    seconds: float | None = None
    """The last measured value; None before there are two moments that are far enough apart."""
    _moment: float = 0.0
    _step: int = -1

    def note(self, moment: float, step: int, resolution: float) -> None:
        """Record the moment at which a step was complete, by a clock with this resolution in seconds."""
        passed = moment - self._moment
        if self._step < 0 or step <= self._step or passed < 0:
            self._moment, self._step = moment, step
        elif passed >= EXACT * resolution:
            self.seconds = passed / (step - self._step)
            self._moment, self._step = moment, step


def stamp_of(line: str) -> tuple[float, float] | None:
    """Return the time that a program wrote into its line, and its resolution in seconds; None if there is none."""
    match = _STAMP.search(line, 0, STAMPED)
    if match is None:
        return None
    fraction = match[3] or ""
    try:
        whole = datetime.fromisoformat(f"{match[1]} {match[2]}")
    except ValueError:
        return None
    return (whole - _EPOCH).total_seconds() + float(f"0.{fraction or 0}"), 10.0 ** -len(fraction)
