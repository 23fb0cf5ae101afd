"""Super pods of a table: their unknown keys, and what becomes of them in version 1.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import InputFaults
from clusterctl.ranktable.api import merge, parse
from clusterctl.ranktable.edit import (
    diff,
    diff_servers,
    slice_table,
    to_version,
)

GOOD = Path(__file__).parents[2] / "cases" / "ranktable" / "good-1.2.json"


def with_pods(version: str, pods: Any) -> dict[str, Any]:
    value = json.loads(GOOD.read_text())["table"]
    return {**value, "version": version, "super_pod_list": pods}


PODS = [
    {"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.1", "rack": "r1"}], "zone": {"row": 3}},
    {"super_pod_id": "1", "server_list": [{"server_id": "10.0.0.2"}]},
]


@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_unknown_keys_of_super_pods_and_of_their_servers_are_passed_through(version: str) -> None:
    value = with_pods(version, PODS)
    table = parse(json.dumps(value))
    assert json.loads(table.render()) == value
    first = json.loads(slice_table(table, servers=["10.0.0.1"]).render())
    assert first["super_pod_list"] == PODS[:1]
    parts = [(name, slice_table(table, servers=[name])) for name in ("10.0.0.1", "10.0.0.2")]
    assert merge(parts) == table


def test_super_pods_in_a_table_of_version_1_0_are_kept_and_serve_where_it_becomes_1_2() -> None:
    table = parse(json.dumps(with_pods("1.0", PODS)))
    assert json.loads(to_version(table, "1.2").render()) == with_pods("1.2", PODS)
    assert {row["super_pod"] for row in table.rows()} == {"0", "1"}


@pytest.mark.parametrize(
    "pods",
    [None, 7, [], [7], [{}], [{"super_pod_id": "0", "server_list": []}], [{"super_pod_id": 0, "server_list": [7]}],
     [{"super_pod_id": "0", "server_list": [{"server_id": "elsewhere"}]}], [PODS[0], PODS[0]]],
)  # fmt: skip
def test_super_pods_that_make_no_sense_pass_through_1_0_where_hccl_does_not_look(pods: Any) -> None:
    value = with_pods("1.0", pods)
    table = parse(json.dumps(value))
    assert not table.super_pods and json.loads(table.render()) == value
    assert (
        json.loads(to_version(table, "1.2", super_pod="9").render())["super_pod_list"][0]["super_pod_id"]
        == "9"
    )


def test_super_pods_of_some_servers_of_a_1_0_table_are_kept_and_shown() -> None:
    value = with_pods("1.0", PODS[:1])
    table = parse(json.dumps(value))
    assert json.loads(table.render()) == value
    assert [row["super_pod"] for row in table.rows()] == ["0", "0", None, None]
    with pytest.raises(InputFaults, match=r"super pod of 10\.0\.0\.2, which is unknown"):
        to_version(table, "1.2")


def test_a_server_that_changed_its_super_pod_is_a_difference_of_its_ranks() -> None:
    left = parse(json.dumps(with_pods("1.2", PODS)))
    moved = [PODS[0], {**PODS[1], "super_pod_id": "2"}]
    found = diff(left, parse(json.dumps(with_pods("1.2", moved))))
    assert [one.rank for one in found] == [2, 3]
    assert found[0].left == "10.0.0.2, device 0, 192.1.27.7, super pod 1"
    assert found[0].right == "10.0.0.2, device 0, 192.1.27.7, super pod 2"


def test_whatever_the_ranks_compare_is_a_difference() -> None:
    value = with_pods("1.2", PODS)
    value["server_list"][1]["device"][1]["device_port"] = "17000"
    value["server_list"][0]["host_ip"] = "10.9.0.1"
    found = diff(parse(json.dumps(with_pods("1.2", PODS))), parse(json.dumps(value)))
    assert [(one.rank, one.left.split(", ")[-1], one.right.split(", ")[-1]) for one in found] == [
        (0, "no server's host_ip", "server's host_ip 10.9.0.1"),
        (1, "no server's host_ip", "server's host_ip 10.9.0.1"),
        (3, "no device_port", "device_port 17000"),
    ]
    named = parse(json.dumps({**with_pods("1.2", PODS), "job": 7}))
    (one,) = diff(parse(json.dumps(with_pods("1.2", PODS))), named)
    assert (one.rank, one.left, one.right) == (None, "no job", "job 7")


def test_tables_are_compared_by_server_too() -> None:
    whole = parse(json.dumps(with_pods("1.2", PODS)))
    value = with_pods("1.2", PODS)
    value["server_list"][1]["device"][1]["device_ip"] = "192.2.27.99"
    assert diff_servers(whole, whole) == []
    (changed,) = diff_servers(whole, parse(json.dumps(value)))
    assert changed.server == "10.0.0.2"
    assert changed.left == changed.right == "ranks 2-3, devices 0-1, device 1 differs"
    (gone,) = diff_servers(whole, slice_table(whole, servers=["10.0.0.1"]))
    assert (gone.server, gone.left, gone.right) == ("10.0.0.2", "ranks 2-3, devices 0-1", "")
    moved = diff_servers(whole, slice_table(whole, servers=["10.0.0.2"]))
    assert [(one.server, one.left, one.right) for one in moved] == [
        ("10.0.0.1", "ranks 0-1, devices 0-1", ""),
        ("10.0.0.2", "ranks 2-3, devices 0-1", "ranks 0-1, devices 0-1"),
    ]
