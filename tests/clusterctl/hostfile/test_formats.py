from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import InputFaults, UsageError
from clusterctl.files import save_new
from clusterctl.hostfile.formats import (
    Entry,
    deepspeed,
    dialect,
    inspect,
    parse,
    render,
    render_entries,
)
from clusterctl.inventory.cluster import Cluster, Node


def cluster(*devices: int) -> Cluster:
    nodes = [
        Node(f"node{place}", host="ssh.example", address=f"10.0.0.{place}", devices=tuple(range(count)))
        for place, count in enumerate(devices, 1)
    ]
    return Cluster("test", tuple(nodes))


def test_a_cluster_is_written_with_the_address_that_ranks_use() -> None:
    assert deepspeed(cluster(8, 4)) == "10.0.0.1 slots=8\n10.0.0.2 slots=4\n"
    assert render(cluster(8), "openmpi") == "10.0.0.1 slots=8\n"
    assert render(cluster(8, 4), "mpich") == "10.0.0.1:8\n10.0.0.2:4\n"


def test_slots_are_the_jobs_where_it_says_them() -> None:
    assert deepspeed(cluster(8, 8), {"node1": 2}) == "10.0.0.1 slots=2\n10.0.0.2 slots=8\n"


def test_a_node_without_ranks_has_no_line_and_one_without_devices_has_one_slot() -> None:
    assert deepspeed(cluster(8, 8), {"node1": 0}) == "10.0.0.2 slots=8\n"
    assert deepspeed(cluster(0)) == "10.0.0.1 slots=1\n"


def test_two_nodes_at_one_address_make_no_hostfile() -> None:
    twins = Cluster(
        "test", (Node("a", host="h", address="10.0.0.1"), Node("b", host="h", address="10.0.0.1"))
    )
    with pytest.raises(InputFaults, match="is on line 1 too"):
        deepspeed(twins)


def test_an_unknown_format_names_the_near_miss() -> None:
    with pytest.raises(UsageError) as caught:
        render(cluster(1), "deepsped")
    assert "deepspeed" in caught.value.hint


def test_every_format_is_read() -> None:
    text = "# ours\r\n\r\n10.0.0.1\tslots=8 max_slots=9 # first\r\nroot@node2 slots=4\r\nnode3\r\nfe80::1\r\n"
    assert parse(text) == [
        Entry("10.0.0.1", 8, None, 3, max_slots=9, form="slots"),
        Entry("node2", 4, "root", 4, form="slots"),
        Entry("node3", None, None, 5),
        Entry("fe80::1", None, None, 6),
    ]
    assert parse("node3:2\nnode4:8 user=root # MPICH\nnode5\n") == [
        Entry("node3", 2, None, 1, form="colon"),
        Entry("node4", 8, "root", 2, form="colon"),
        Entry("node5", None, None, 3),
    ]


# What mpirun 4.1 of Open MPI counts: its --display-allocation.
@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a max_slots=4\nb slots=2\n", {"a": 4, "b": 2}),
        ("a max-slots=3\n", {"a": 3}),
        ("a\na\na\nb\n", {"a": 3, "b": 1}),
        ("a\nb slots=3\na\n", {"a": 2, "b": 3}),
    ],
)
def test_slots_are_those_that_open_mpi_counts(text: str, slots: dict[str, int]) -> None:
    entries = parse(text)
    assert {entry.address: entry.slots for entry in entries} == slots
    assert dialect(entries) == "openmpi"
    again = parse(render_entries(entries, "openmpi"))
    assert {entry.address: entry.slots for entry in again} == slots


@pytest.mark.parametrize(
    "text", ["a slots=2\na slots=3\n", "a\na slots=3\n", "a\nroot@a\n", "a slots=2\na\n"]
)
def test_a_count_next_to_another_line_of_the_node_is_refused(text: str) -> None:
    with pytest.raises(InputFaults, match="a is on line 1 too"):
        parse(text)


def test_slots_in_two_ways_are_no_launchers_file() -> None:
    with pytest.raises(InputFaults, match="no launcher reads both"):
        parse("a slots=8\nb:8\n")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("-oProxyCommand=reboot slots=8", "can't begin with '-'"),
        ("node1;reboot slots=8", "not a valid node name"),
        ("$(reboot) slots=8", "not a valid node name"),
        ("`id` slots=8", "not a valid node name"),
        ("node1 slots=0", "slots=0"),
        ("10.0.0.999 slots=8", "not an IPv4 address"),
        ("10.0.0.01 slots=8", "not an IPv4 address"),
        ("10.0.0 slots=8", "not an IPv4 address"),
        ("a:b:c slots=8", "not an IPv6 address"),
        ("node1 slots=x", "not a number"),
        ("node1 slots=٣", "not a number"),
        ("node1 slots=08x", "not a number"),
        ("node1 slots=99999", "slots=99999"),
        ("node1 slots = 4", "unexpected 'slots', '=', '4'"),
        ("node1 a b c d e", "unexpected 'a', 'b', 'c' and 2 more words"),
        ("node1 slts=4", "unexpected 'slts=4'"),
        ("node1:0", "slots=0"),
        ("node1:8 slots=8", "repeated"),
        ("node[0-3] slots=8", "DeepSpeed reads one name"),
        ("[fd00::1]:8", "without brackets"),
        ("node\x1b1 slots=8", "not a valid node name"),
    ],
)
def test_a_line_that_is_no_node_is_refused_with_its_number(line: str, word: str) -> None:
    with pytest.raises(InputFaults) as caught:
        parse(f"good slots=8\n{line}\n", "hosts")
    (fault,) = caught.value.faults
    assert fault.where == "hosts:2" and word in fault.what and fault.remedy


def test_all_faults_come_at_once_and_duplicates_name_both_lines() -> None:
    with pytest.raises(InputFaults) as caught:
        parse("a slots=0\nb slots=2\nb slots=2\n", "hosts")
    assert [fault.where for fault in caught.value.faults] == ["hosts:1", "hosts:3"]
    assert "line 2" in caught.value.faults[1].what


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("10.0.0.999 slots=x", ["'10.0.0.999' is not an IPv4", "slots='x'"]),
        ("b;c slots=0 gpus=8", ["not a valid node name", "slots=0", "unexpected 'gpus=8'"]),
        ("10.0.0.999:0", ["slots=0", "'10.0.0.999' is not an IPv4"]),
        ("b slots=x max_slots=0", ["slots='x'", "max_slots=0"]),
        ("a slots=0", ["slots=0", "a is on line 1 too"]),
        ("a:x slots=0", ["slots='x'", "slots are repeated", "a is on line 1 too"]),
    ],
)
def test_all_errors_of_a_line_come_at_once(line: str, problems: list[str]) -> None:
    with pytest.raises(InputFaults) as caught:
        parse(f"a slots=8\n{line}\n", "hosts")
    faults = caught.value.faults
    assert len(faults) == len(problems) and {fault.where for fault in faults} == {"hosts:2"}
    for fault, problem in zip(faults, problems, strict=True):
        assert problem in fault.what and fault.remedy


def test_an_empty_hostfile_is_a_fault() -> None:
    with pytest.raises(InputFaults, match="lists no nodes"):
        parse("# nobody\n")


def test_files_are_read_with_their_name_in_every_message(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(deepspeed(cluster(8, 4)))
    assert [entry.address for entry in inspect(path)[0]] == ["10.0.0.1", "10.0.0.2"]
    path.write_bytes(b"node\xff slots=8\n")
    assert "UTF-8" in inspect(path)[1][0].what
    with pytest.raises(UsageError, match="No such file"):
        inspect(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        inspect(tmp_path)


def test_another_hostfile_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    assert save_new(path, "a slots=1\n") and not save_new(path, "a slots=1\n")
    with pytest.raises(UsageError, match="another file"):
        save_new(path, "b slots=1\n")
    assert save_new(path, "b slots=1\n", force=True) and path.read_text() == "b slots=1\n"


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=20),
    st.sampled_from(["deepspeed", "openmpi", "mpich"]),
)
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back(slots: list[int], form: str) -> None:
    nodes = cluster(*[1] * len(slots))
    text = render(nodes, form, dict(zip(nodes.names, slots, strict=True)))
    assert [(entry.address, entry.slots) for entry in parse(text)] == [
        (node.address, count) for node, count in zip(nodes.nodes, slots, strict=True)
    ]


@given(st.text(alphabet="ab1 \t\r\n#=:.-@slotx[]٣\x00", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        parse(text)
    except InputFaults as error:
        assert error.faults


@pytest.mark.parametrize(
    ("one", "other"), [("Node1", "node1"), ("fd00::2", "FD00:0::2"), ("gpu.lab", "gpu.lab.")]
)
def test_one_machine_in_two_spellings_is_one_machine(one: str, other: str) -> None:
    with pytest.raises(InputFaults, match=r"hostfile:2: .* is on line 1 too"):
        parse(f"{one} slots=8\n{other} slots=8\n")
