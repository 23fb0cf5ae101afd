"""cluster.yaml as users write it, and every way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory import cluster as inventory_cluster


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


FOUR = """
name: lab
defaults: {user: alice, devices: "[0,8)", kind: npu, python: /opt/py/bin/python}
known_hosts: keys/known
nodes:
  node[1-3]: {host: "10.0.0.{n}", port: 2222}
  big: {host: 10.0.1.1, devices: [0, 2], address: 192.168.0.9, env: {NCCL_DEBUG: INFO, X: 1}}
groups: {left: "node[1-2]", all4: "@left,node3,big"}
"""


def test_defaults_patterns_and_own_keys_come_together(tmp_path: Path) -> None:
    cluster = inventory_cluster.load(written(tmp_path, FOUR))
    assert cluster.names == ["node1", "node2", "node3", "big"]
    node2, big = cluster.node("node2"), cluster.node("big")
    assert (node2.host, node2.port, node2.user, node2.devices) == ("10.0.0.2", 2222, "alice", tuple(range(8)))
    assert (node2.address, node2.server_id) == ("10.0.0.2", "10.0.0.2")
    assert (big.address, big.server_id, big.devices, big.env) == (
        "192.168.0.9",
        "192.168.0.9",
        (0, 2),
        {"NCCL_DEBUG": "INFO", "X": "1"},
    )
    assert cluster.known_hosts == str(tmp_path / "keys" / "known")


def test_a_selection_keeps_the_order_of_the_inventory(tmp_path: Path) -> None:
    cluster = inventory_cluster.load(written(tmp_path, FOUR))
    assert cluster.select("big,@left").names == ["node1", "node2", "big"]
    assert cluster.select(None, "node[1-2]").names == ["node3", "big"]
    with pytest.raises(UsageError, match="column 1: no node 'node9'"):
        cluster.select("node9")
    with pytest.raises(UsageError, match="matches no node"):
        cluster.select("node1", "node1")


def test_all_faults_come_at_once_with_line_key_and_remedy(tmp_path: Path) -> None:
    text = """
nodes:
  node1: {hots: 10.0.0.1}
  node2: {host: "-oProxyCommand=x", port: 99999, devices: "[0,4]"}
  node3: {host: "a;b", kind: gpu, device_ips: [1.2.3.4]}
"""
    with pytest.raises(InputFaults) as caught:
        inventory_cluster.load(written(tmp_path, text))
    said = str(caught.value)
    for part in (
        "cluster.yaml:3 nodes.node1.hots: unknown key 'hots' (did you mean 'host'?)",
        "cluster.yaml:4 nodes.node2.host: '-oProxyCommand=x' can't be a host",
        "99999 is too large",
        "[0,4] is read differently by different tools",
        "unknown 'gpu'",
        "'a;b' can't be a host",
    ):
        assert part in said, said


def test_two_names_for_one_machine_and_a_name_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFaults, match=r"both at 10\.0\.0\.1:22"):
        inventory_cluster.load(written(tmp_path, "nodes: {a: {host: 10.0.0.1}, b: {host: 10.0.0.1}}"))
    with pytest.raises(InputFaults, match="listed twice"):
        inventory_cluster.load(written(tmp_path, 'nodes: {"node[1-2]": {}, node2: {host: x}}'))


def test_a_missing_key_file_is_found_before_any_connection(tmp_path: Path) -> None:
    with pytest.raises(InputFaults, match="no identity file"):
        inventory_cluster.load(written(tmp_path, "defaults: {key: nowhere}\nnodes: {a: {}}"))


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (3, (0, 1, 2)),
        ("[0,2)", (0, 1)),
        ("[ 4 , 8 )", (4, 5, 6, 7)),
        ([7, 1], (7, 1)),
        ("0,3", (0, 3)),
        (0, ()),
    ],
)
def test_devices_are_a_count_a_half_open_range_or_a_list(value: object, ids: tuple[int, ...]) -> None:
    assert inventory_cluster.parse_devices(value) == ids


@pytest.mark.parametrize(
    "value", ["[0,8]", "[2,2)", "[3,1)", [0, 0], [-1], [1.5], 65, -1, "x", True, {"a": 1}, [True]]
)
def test_other_devices_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"devices|device ids|is empty|read differently"):
        inventory_cluster.parse_devices(value)


def test_on_a_command_line_a_number_alone_counts_devices() -> None:
    assert inventory_cluster.named_devices("2") == (0, 1) and inventory_cluster.named_devices("2,0") == (2, 0)
    for text in ("", "²", "٣", "[٠,٣)", "1,٣", "1000"):
        with pytest.raises(UsageError, match="is not a choice of devices"):
            inventory_cluster.named_devices(text)


@pytest.mark.parametrize(
    "gateway",
    [
        "gate",
        "me@gate",
        "me@gate:2222",
        "[::1]:22",
        "fd00::1",
        "ssh://me@gate:22",
        "one, me@two:22",
        "_alias",
    ],
)
def test_a_gateway_is_a_place_or_several(tmp_path: Path, gateway: str) -> None:
    text = f'nodes: {{a: {{host: b, gateway: "{gateway}"}}}}'
    assert inventory_cluster.load(written(tmp_path, text)).nodes[0].gateway == gateway


@pytest.mark.parametrize(
    "gateway", ["-oProxyCommand=x", "a;touch x;@gate", "$(x)", "me@-x", "a b", "gate\\nHost *", "`x`"]
)
def test_a_gateway_that_is_an_option_or_a_command_is_refused(tmp_path: Path, gateway: str) -> None:
    with pytest.raises(InputFaults, match="can't be a gateway"):
        inventory_cluster.load(written(tmp_path, f'nodes: {{a: {{host: b, gateway: "{gateway}"}}}}'))


@pytest.mark.parametrize("workdir", ["~other/x", "~other", "x", "./x"])
def test_a_work_folder_is_below_the_logins_own_home_or_a_full_path(tmp_path: Path, workdir: str) -> None:
    for right in ("~", "~/x", "/x"):
        inventory_cluster.load(written(tmp_path, f"nodes: {{a: {{host: b, workdir: {right!r}}}}}"))
    with pytest.raises(InputFaults, match="not a full path in this login's home"):
        inventory_cluster.load(written(tmp_path, f"nodes: {{a: {{host: b, workdir: {workdir!r}}}}}"))


def test_a_name_that_no_resolver_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFaults, match="too long for a name"):
        inventory_cluster.load(written(tmp_path, f"nodes: {{a: {{host: {'x' * 64}.example}}}}"))
