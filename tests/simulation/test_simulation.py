"""Thousands of runs with faults under a virtual clock: what must always hold, and bugs that must be found."""

from __future__ import annotations

from random import SystemRandom

import pytest

from tests.simulation.planted import BUGS, FOUND_BY
from tests.simulation.play import Fault, Plan, planned, play, smallest

# Runs of one test, so that many processes share them; all but the first are left to `make test`.
RUNS = 250
SHARDS = [pytest.param(number, marks=pytest.mark.slow if number else ()) for number in range(8)]


@pytest.mark.parametrize("number", SHARDS)
def test_no_run_breaks_a_rule(number: int) -> None:
    first = SystemRandom().randrange(1 << 40)
    print(f"seeds {first} to {first + RUNS - 1}")
    for seed in range(first, first + RUNS):
        plan = planned(seed)
        played = play(plan)
        assert not played.broken, play(smallest(plan)).timeline()


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(100, 130):
        assert play(planned(seed)).timeline() == play(planned(seed)).timeline()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    plan = planned(FOUND_BY[name])
    assert play(plan, BUGS[name]).broken
    assert not play(plan).broken


def test_the_smallest_plan_has_only_faults_that_matter() -> None:
    name = "a request to stop leaves the ranks of a dead supervisor"
    needed = Fault(20.0, "supervisor dies", 0, 1.0)
    others = (Fault(30.0, "disk full", 1, 5.0), Fault(31.0, "connection reset", 1, 1.0))
    plan = planned(1)
    plan = Plan(1, 2, 0, plan.policy, (others[0], needed, others[1]))
    small = smallest(plan, BUGS[name])
    assert small.faults == (needed,)
    lines = play(small, BUGS[name]).timeline().splitlines()
    assert lines[0].startswith("seed 1: 2 nodes, 0 spares")
    assert "* supervisor dies node1 for 1.0 s" in lines[2] and "BROKEN: " in lines[-1]
