"""The arithmetic behind bench/reach: the model finds the costs that made its points; verdicts name the best peer."""

from __future__ import annotations

import pytest

from bench.reach import __main__ as reach
from bench.reach.field import Sample
from bench.reach.figures import Measured, Sizes
from bench.reach.launches import Idle, Launched, limit, missed, modelled
from bench.reach.launches import report as launch_report
from bench.reach.model import (
    Point,
    fit,
    model_of,
    report,
)


def points(start: float, client: float, server: float, cores: int) -> list[Point]:
    return [
        Point(n, start + (client + server) * n / cores, 0.1 + client * n, server * n)
        for n in (8, 16, 64, 256)
    ]


def test_the_model_finds_what_a_node_costs_here_and_there() -> None:
    model = model_of(points(0.2, 0.004, 0.020, 2), 2)
    assert model.client.each == pytest.approx(0.004) and model.server.each == pytest.approx(0.020)
    assert model.here(128) == pytest.approx(0.2 + 0.024 * 128 / 2) and model.kept_busy == pytest.approx(1.0)
    assert model.flat(1000) == pytest.approx(0.2 + 4.0 + 0.020)


def test_idle_cores_count_into_the_models_seconds() -> None:
    waiting = [Point(one.nodes, 2 * one.wall, one.client, one.server) for one in points(0.2, 0.004, 0.020, 2)]
    model = model_of(waiting, 2)
    assert model.kept_busy == pytest.approx(0.5)
    assert model.here(256) == pytest.approx(waiting[-1].wall)


def test_a_tree_pays_for_many_nodes_and_not_for_few() -> None:
    model = model_of(points(0.2, 0.004, 0.020, 2), 2)
    assert model.best_tree(10_000)[1] < model.flat(10_000) / 10
    assert model.best_tree(16)[1] > model.flat(16)


def test_one_size_alone_is_a_cost_that_does_not_grow() -> None:
    assert fit([(8, 0.5)]).at(1000) == 0.5


def test_the_report_shows_how_far_off_the_model_is() -> None:
    rough = [*points(0.2, 0.004, 0.020, 2)[:-1], Point(256, 6.0, 1.2, 5.0)]
    said = report(rough, model_of(rough, 2))
    assert said.count("%") == 2 + len(rough) and "\n  10000" in said
    assert (
        "fitted without the largest size, the model predicts 3.27 s for 256 nodes, which took 6.00 s (-45%)"
        in said
    )


def test_the_report_ends_with_whether_flat_is_enough() -> None:
    fast, slow = (points(0.2, each, 0.020, 2) for each in (0.004, 0.040))
    assert (
        report(fast, model_of(fast, 2)).splitlines()[-1].startswith("flat is enough for 1,000 nodes: 4.2 s,")
    )
    assert (
        report(slow, model_of(slow, 2)).splitlines()[-1].startswith("flat is not enough for 1,000 nodes: 40.")
    )


def test_a_verdict_is_against_the_best_peer_that_reached_every_node() -> None:
    def took(tool: str, wall: float, failed: int = 0) -> Measured:
        return Measured("exec, cold", 64, tool, [Sample(wall, 0.1, failed)])

    found = [
        took("clusterctl", 1.0),
        took("pdsh, stock", 3.0),
        took("pdsh, fast", 0.5, failed=2),
        took("clush", 2.0),
    ]
    said = reach.judged(found, Sizes(nodes=(64,)))
    assert "clusterctl 0.50 of clush; at most 0.75: reached" in said
    assert "clusterctl 0.33 of pdsh, stock; at most 0.25: not reached" in said


def test_what_was_not_measured_says_why() -> None:
    shown = reach.table([Measured("push", 4, "rsync", missing="rsync is not installed (package rsync)")])
    assert shown.splitlines()[1].endswith("not measured: rsync is not installed (package rsync)")


def test_the_launch_row_extends_its_controllers_to_more_nodes_and_names_missed_targets() -> None:
    idle = [Idle(count, 0.01 * count, 0.0001 * count, 50 + 0.05 * count, 4, 8 + count) for count in (64, 256)]
    far = modelled(idle, 10_000)
    assert far.megabytes == pytest.approx(550) and far.cpu == pytest.approx(1.0) and far.threads == 4
    assert far.files == 10_008 and "at 10,000 nodes" in limit(idle)
    walls = {"exec": 1.0, "launch --no-checks": 3.5, "launch with checks": 4.0}
    ratios = {"launch --no-checks": 3.5, "launch with checks": 4.0}
    started = [Launched(256, walls, ratios, dict.fromkeys(walls, 0.02))]
    assert [text.split(" takes")[0].split(" has")[0].split(" uses")[0] for text in missed(started, idle)] == [
        "launch --no-checks on 256 nodes",
        "the idle controller of 256 nodes",
        "the idle controller of 256 nodes",
    ]
    assert "10000" in launch_report(started, idle)
