"""The drills of stops: which of them have a fault."""

from __future__ import annotations

from collections import Counter

from bench.runs.stops import CODES, FAULTS, draw


def test_each_fault_comes_as_often() -> None:
    assert Counter(draw(200, 50, 1)) == {"none": 150, "cut": 17, "disk": 17, "killed": 16}
    assert draw(200, 50, 1) == draw(200, 50, 1) != draw(200, 50, 2)
    assert set(CODES) == {"none", *FAULTS}
