from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import InputFaults
from clusterctl.ranktable.api import (
    RankTable,
    check,
    load,
    parse,
)
from clusterctl.ranktable.plan import load_plan, plan_table, render_plan

EXAMPLES = Path(__file__).parents[3] / "rank_tables"
CASES = Path(__file__).parents[2] / "cases" / "ranktable"


def parse_plan(text: str) -> RankTable:
    return plan_table(parse_document(text, "plan"))


def case(name: str) -> RankTable:
    return parse(json.dumps(json.loads((CASES / f"{name}.json").read_text())["table"]))


def faults_of(text: str) -> list[str]:
    with pytest.raises(InputFaults) as caught:
        parse_plan(text)
    return [f"{one.where}: {one.what}" for one in caught.value.faults]


def test_the_example_plan_is_the_example_table() -> None:
    assert load_plan(EXAMPLES / "plan.yaml") == load(EXAMPLES / "hccl_4s_32p.json")


@pytest.mark.parametrize(
    "name", ["good-1.0", "good-1.2", "good-2.0", "good-ipv6", "good-one-super-pod-without-addresses"]
)
def test_a_table_survives_as_a_plan(name: str) -> None:
    assert parse_plan(render_plan(case(name))) == case(name)


@pytest.mark.parametrize("server_id", ["127.0.0.1", "localhost", "::1"])
def test_a_table_of_this_machine_alone_survives_as_a_plan(server_id: str) -> None:
    device = {"device_id": "0", "device_ip": "192.1.0.1", "rank_id": "0"}
    server = {"server_id": server_id, "device": [device], "host_nic_ip": "reserve"}
    whole = {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}
    table = parse(json.dumps(whole))
    assert parse_plan(render_plan(table)).rows() == table.rows()
    assert "means every node itself" in str(
        faults_of(f'nodes:\n  a: {{server_id: "{server_id}", devices: 1}}\n  b: {{devices: 1}}\n')
    )


def test_a_plan_of_a3_counts_super_device_ids() -> None:
    table = parse_plan(
        "for: a3\nnodes:\n  n[1-2]:\n    server_id: 10.0.0.{n}\n    super_pod: p\n"
        "    devices: [3, 1]\n    super_device_ids: ['{65536n+7}', '{65536n+5}']\n"
    )
    assert check(table.render()) == [] and table.version == "1.2"
    assert [device.super_device_id for _, device in table.by_rank()] == ["65543", "65541", "131079", "131077"]
    assert [device.device_id for _, device in table.by_rank()] == [3, 1, 3, 1]


def test_all_faults_of_a_plan_come_with_their_lines() -> None:
    found = faults_of(
        "for: a3\nnodes:\n  a[1-2]:\n    server_id: 10.0.0.{n}\n    device_ips: [1.2.3.4]\n    bad: 1\n"
        "    super_pod: x\n  b:\n    server_id: localhost\n    devices: '[0,2]'\n"
    )
    for part in (
        "plan:3 nodes.a[1-2].super_device_ids: 'super_device_ids' is missing",
        "plan:6 nodes.a[1-2].bad: unknown key 'bad'",
        "plan:9 nodes.b.server_id: localhost",
        "plan:10 nodes.b.devices: [0,2] is read differently",
        "plan:8 nodes.b.super_pod: 'super_pod' is missing",
    ):
        assert any(one.startswith(part) for one in found), (part, found)


def test_a_fault_of_a_plan_is_said_once_and_brings_no_others() -> None:
    found = faults_of(
        "nodes:\n  a[1-9]:\n    server_id: localhost\n    devices: '[0,4]'\n    device_ips: [1.1.1.1]\n"
    )
    assert [one.split(":")[1].split()[1] for one in found] == [
        "nodes.a[1-9].devices",
        "nodes.a[1-9].server_id",
    ]


def test_what_hccl_would_refuse_is_told_at_the_plans_line_once() -> None:
    found = faults_of(
        "nodes:\n  a[1-2]:\n    server_id: 10.0.0.{n}\n    device_ips: [1.2.3.400, '4.4.4.{n}']\n"
        "  c:\n    server_id: 10.0.0.1\n    device_ips:\n      - 1.1.1.1\n      - 4.4.4.1\n"
    )
    assert [one.split(": ")[0] for one in found] == [
        "plan:4 nodes.a[1-2].device_ips.0", "plan:6 nodes.c.server_id", "plan:9 nodes.c.device_ips.1",
    ]  # fmt: skip


def test_levels_of_a5_are_checked_at_their_line() -> None:
    text = render_plan(case("good-2.0")).replace(
        '"IPV4", "addr": "223.0.0.11"', '"IPV4", "addr": "223.0.0.311"'
    )
    (found,) = faults_of(text)
    assert found.startswith("plan:9 nodes.node0.levels.1.0.rank_addr_list.0.addr:"), found


@pytest.mark.parametrize(
    "text",
    [
        "", "nodes:", "for: b9\nnodes: {a: {device_ips: [1.1.1.1]}}", "nodes: {'a[1-': {device_ips: [1.1.1.1]}}",
        "nodes: {a: {device_ips: 7}}", "nodes: {'a[1-60000]': {devices: 1}}", "nodes: {a: {devices: []}}",
        "for: a5\nnodes: {a: {levels: [7]}}", "for: a5\nnodes: {a: {levels: [[7]]}}", "nodes: [a]", "7",
        "for: a5\nnodes: {a: {levels: [[{}]], local_ids: [x]}}", "nodes: {a: 7}",
        "nodes: {a: {devices: 1}, 'a[b]': {devices: 2}}",
    ],
)  # fmt: skip
def test_no_plan_is_a_traceback(text: str) -> None:
    assert faults_of(text)


def test_what_a_plan_can_not_hold_is_refused_by_name() -> None:
    with pytest.raises(InputFaults, match="hardware_type"):
        render_plan(case("good-operator-keys"))
    assert "hardware_type" not in render_plan(case("good-operator-keys"), lossy=True)


def test_the_other_place_of_a_fault_is_named_by_its_line_too() -> None:
    (found,) = faults_of("nodes:\n  a:\n    device_ips: [1.1.1.1]\n  b:\n    device_ips: [1.1.1.1]\n")
    assert found == (
        "plan:5 nodes.b.device_ips.0: the address '1.1.1.1' is also at plan:3 nodes.a.device_ips.0"
    )


@pytest.mark.parametrize(
    "name", ["is at /server_list/99/device/0", "is at /server_list/0/device/z/device_ip", "x /rank_list/7"]
)
def test_a_name_that_looks_like_a_pointer_is_no_place(name: str) -> None:
    found = faults_of(f"nodes: {{'n[1-2]': {{server_id: '{name}', device_ips: ['1.1.1.{{n}}']}}}}")
    assert any(name[:20] in one for one in found)
