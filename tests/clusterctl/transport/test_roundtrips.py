"""What is written is read back as the same value, and what is taken apart goes together again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import ClusterctlError
from clusterctl.hostfile import (
    detect,
    formats,
    init,
    node_lists,
)
from clusterctl.hostfile.formats import Entry
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.inventory.nodeset import expand, fold
from clusterctl.ranktable.api import (
    Device,
    RankTable,
    Server,
    SuperPod,
    check,
    merge,
    parse,
    renumbered,
)
from clusterctl.ranktable.edit import diff, slice_table, to_version

thorough = settings(max_examples=60, deadline=None)

# -- rank tables of every version, in every way that HCCL takes them

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64).filter(
    lambda text: len(text.encode()) <= 64
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
extras = st.one_of(
    st.just({}),
    st.dictionaries(
        st.sampled_from(["hardware_type", "pod_name", "x y", 'quo"te', "ключ", "a/b~c"]), plain, max_size=3
    ),
)


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Servers with any of their devices in any order; ranks run along them."""
    version = draw(st.sampled_from(["1.0", "1.2"]))
    names = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    family, count = draw(st.sampled_from([4, 6])), draw(st.integers(1, 2))
    servers = []
    for place, name in enumerate(names):
        chosen = draw(st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True))
        devices = [
            Device(
                one,
                ",".join(_address(family, place, one, port) for port in range(count)),
                0,
                str(1000 * place + one) if version == "1.2" else None,
                draw(extras),
            )
            for one in chosen
        ]
        nic = draw(st.sampled_from(["reserve", None, "10.9.8.7"]))
        servers.append(Server(name, tuple(devices), nic, draw(extras)))
    pods = _pods(draw, names) if version == "1.2" else ()
    return RankTable(renumbered(servers), version, pods, extras=draw(extras))


def _address(family: int, server: int, device: int, port: int) -> str:
    return (
        f"192.{port}.{server}.{device}"
        if family == 4
        else f"2001:db8:{server + 1:x}:{port + 1:x}::{device + 1:x}"
    )


def _pods(draw: st.DrawFn, names: list[str]) -> tuple[SuperPod, ...]:
    """Neighbours in pods, in the servers' order."""
    first = draw(st.integers(1, len(names)))
    parts = [("0", names[:first]), ("pod 1", names[first:])]
    return tuple(
        SuperPod(pod, tuple(members), draw(extras), {members[0]: {"rack": 1}} if draw(st.booleans()) else {})
        for pod, members in parts
        if members
    )


@st.composite
def flat_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Version 2.0, as the JSON that its reader takes."""
    ranks = []
    for rank in range(draw(st.integers(1, 6))):
        addresses = [{"addr_type": "IPV4", "addr": f"223.0.{rank}.10", "ports": ["0/0"]}]
        level = {"net_layer": 0, "net_instance_id": "rack0", "net_type": "CLOS", "net_attr": draw(words)}
        device = {"rank_id": rank, "local_id": rank, "device_id": rank}
        ranks.append({**device, "level_list": [{**level, "rank_addr_list": addresses}], **draw(extras)})
    ranks = draw(st.permutations(ranks))
    return {"version": "2.0", "rank_count": len(ranks), "status": "completed", "rank_list": ranks}


@given(tables())
@thorough
def test_a_table_is_read_back_as_it_was_written_and_checks_clean(table: RankTable) -> None:
    text = table.render()
    assert check(text) == []
    assert parse(text) == table
    # White space means nothing.
    assert parse(json.dumps(json.loads(text), separators=(",", ":"))) == table
    assert text == json.dumps(table.as_json(), indent=4) + "\n"


@given(flat_tables())
@thorough
def test_a_table_of_version_2_0_is_read_back_with_its_numbers(value: dict[str, Any]) -> None:
    table = parse(json.dumps(value))
    again = json.loads(table.render())
    assert parse(table.render()) == table and check(table.render()) == []
    assert again == {**value, "rank_list": sorted(value["rank_list"], key=lambda one: one["rank_id"])}


@given(tables(), st.randoms(use_true_random=False))
@thorough
def test_a_table_with_its_ranks_anywhere_is_read_back_too(table: RankTable, random: Any) -> None:
    ranks = list(range(table.ranks))
    random.shuffle(ranks)
    servers = [
        replace(server, devices=tuple(replace(one, rank_id=ranks[one.rank_id]) for one in server.devices))
        for server in table.servers
    ]
    scattered = replace(table, servers=tuple(servers))
    assert parse(scattered.render()) == scattered
    assert bool(diff(table, scattered)) == (ranks != sorted(ranks))


@given(tables(), st.data())
@thorough
def test_slices_merge_to_the_whole(table: RankTable, data: st.DataObject) -> None:
    names = [server.server_id for server in table.servers]
    at = data.draw(st.integers(1, len(names)))
    parts = [slice_table(table, servers=part) for part in (names[:at], names[at:]) if part]
    assert merge([(f"{place}.json", part) for place, part in enumerate(parts)]) == table
    assert merge([(name, slice_table(table, servers=[name])) for name in names]) == table
    assert slice_table(table, drop=names[at:]) == parts[0]
    assert slice_table(table, ranks=range(parts[0].ranks)) == parts[0]


@given(tables())
@thorough
def test_a_1_2_table_turned_into_1_0_turns_back_with_its_own_facts(table: RankTable) -> None:
    older = to_version(table, "1.0")
    assert older.version == "1.0" and not older.super_pods
    assert to_version(older, table.version, facts=table) == table


# -- hostfiles

hosts = st.from_regex(r"[a-z][a-z0-9.-]{0,8}[0-9]{0,3}|10\.0\.[0-9]\.[1-9]|fe80::[1-9a-f]", fullmatch=True)
entries = st.lists(
    st.builds(Entry, hosts, st.none() | st.integers(1, 64), st.none() | st.sampled_from(["root", "ma"])),
    min_size=1,
    max_size=12,
    unique_by=lambda entry: entry.address,
)


def said(found: list[Entry], user: bool = True) -> list[tuple[str, int | None, str | None]]:
    return [(entry.address, entry.slots, entry.user if user else None) for entry in found]


@given(entries, st.sampled_from(formats.FORMATS))
@thorough
def test_a_hostfile_is_read_back_as_it_was_written_or_refused(nodes: list[Entry], form: str) -> None:
    try:
        text = formats.render_entries(nodes, form)
    except ClusterctlError as error:
        assert form == "mpich" and any(":" in entry.address for entry in nodes), error
        return
    assert said(formats.parse(text)) == said(nodes, user=form != "deepspeed")
    assert said(formats.parse("# ours\n\n" + text.replace("\n", " # it\r\n"))) == said(formats.parse(text))


@given(entries)
@thorough
def test_a_slurm_list_keeps_names_order_and_counts(nodes: list[Entry]) -> None:
    nodes = [replace(entry, user=None) for entry in nodes if ":" not in entry.address]
    if nodes:
        again, faults = node_lists.inspect_text(node_lists.render(nodes), "list")
        counted = all(entry.slots is not None for entry in nodes)
        assert not faults
        assert said(again) == (said(nodes) if counted else [(entry.address, None, None) for entry in nodes])


@given(entries)
@settings(max_examples=25, deadline=None)
def test_any_hostfile_becomes_an_inventory_and_the_same_hostfile_again(nodes: list[Entry]) -> None:
    nodes = [replace(entry, slots=entry.slots or 1) for entry in nodes]
    cluster = detect.from_entries(nodes, "hosts")
    assert said(list(detect.entries_of(cluster))) == said(nodes)
    for text in (init.cluster_text(cluster), init.commented(cluster, "hosts")):
        assert inventory_cluster.parse(text, Path("cluster.yaml")).nodes == cluster.nodes


# -- node sets

names = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,4}){0,3}[a-z]?", fullmatch=True)


@given(st.lists(names, max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_folded_set_expands_to_the_names_once_each_and_folds_to_itself(some: list[str]) -> None:
    folded = fold(some)
    assert set(expand(folded)) == set(some) and len(expand(folded)) == len(set(some))
    assert fold(expand(folded)) == folded
    assert expand(fold(expand(folded))) == expand(",".join(some))


@given(st.sets(names, min_size=1, max_size=20), st.sets(names, min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_operators_are_those_of_sets(one: set[str], other: set[str]) -> None:
    left, right = fold(one), fold(other)
    assert set(expand(f"{left},{right}")) == one | other
    groups = {"left": left, "right": right}
    assert set(expand("@left!@right", groups)) == one - other
    assert set(expand("@left&@right", groups)) == one & other
    assert set(expand("@left^@right", groups)) == one ^ other
