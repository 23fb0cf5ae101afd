"""A short campaign of faults on real nodes: one of each that no other test here strikes with, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults.__main__ import Campaign
from bench.faults.draw import CHECKPOINT, RUNNING, Fault
from bench.faults.judge import judge
from clusterctl.sandbox import namespaces

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

FAULTS = [
    Fault(1, "launcher cut off", RUNNING, 2, 8, 0.0, False),
    Fault(2, "link cut briefly", RUNNING, 1, 8, 0.0, False),
    Fault(3, "disk full", CHECKPOINT, 0, 8, 0.0, False),
    Fault(4, "children left behind", RUNNING, 3, 8, 0.0, False),
    Fault(5, "clock skewed", RUNNING, 2, 8, 0.0, False),
    Fault(6, "connection dropped", RUNNING, 0, 8, 0.0, False),
]


def test_runs_come_through_faults_with_the_right_cause_and_leave_nothing(tmp_path: Path) -> None:
    missing = namespaces.why_not()
    if missing:
        pytest.skip(missing)
    campaign = Campaign(FAULTS, tmp_path, lanes=3)
    stories = campaign.play()
    assert not campaign.problems
    assert len(stories) == len(FAULTS)
    for story in stories:
        verdict = judge(story)
        assert verdict.well, (str(story.fault), verdict.broken, story.output)
        assert verdict.cause is not False, (str(story.fault), story.reasons, story.output)
        assert not story.left, str(story.fault)
