from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import UsageError
from clusterctl.inventory.nodeset import (
    LIMIT,
    expand,
    expand_all,
    fold,
    name_fault,
    select,
)

NODES = [f"node{number}" for number in (3, 1, 2, 10)]
GROUPS = {
    "old": ("node1", "node2"),
    "new": "node[3,10]",
    "both": "@old,@new",
    "loop": "@pool",
    "pool": "@loop",
}


@pytest.mark.parametrize(
    ("expression", "names", "folded"),
    [
        ("node[1-4,7]", "node1 node2 node3 node4 node7", "node[1-4,7]"),
        ("node[08-11]", "node08 node09 node10 node11", "node[08-11]"),
        ("node[0-00]", "node0", "node0"),
        ("node[099-101]", "node099 node100 node101", "node[099-101]"),
        ("node[1,01,001]", "node1 node01 node001", "node[1,01,001]"),
        ("node[0-6/2]", "node0 node2 node4 node6", "node[0,2,4,6]"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02", "r[1-2]n[01-02]"),
        ("r1n1,r1n2,r2n1,r2n2,r3n2", "r1n1 r1n2 r2n1 r2n2 r3n2", "r[1-2]n[1-2],r3n2"),
        ("10.0.0.[1-2],10.0.1.1", "10.0.0.1 10.0.0.2 10.0.1.1", "10.0.0.[1-2],10.0.1.1"),
        ("b,a,c1,a2,a10,a9", "a a2 a9 a10 b c1", "a,a[2,9-10],b,c1"),
        ("n[98-100],n099", "n98 n99 n099 n100", "n[98-99,099-100]"),
        ("n[08-09],n10,n[99-100]", "n08 n09 n10 n99 n100", "n[08-10,99-100]"),
        ("n[98-99],n09,n100", "n09 n98 n99 n100", "n[09,98-99,100]"),
        ("node[1-3]!node2", "node1 node3", "node[1,3]"),
        ("node[1-5]&node[3-9]", "node3 node4 node5", "node[3-5]"),
        ("node[1-3]^node[2-4]", "node1 node4", "node[1,4]"),
        ("a,b!b,c", "a c", "a,c"),
        ("a%s1,a%d2", "a%d2 a%s1", "a%d2,a%s1"),
        ("n5[8-11]", "n58 n59 n510 n511", "n[58-59,510-511]"),
        (" node1 , node2 ", "node1 node2", "node[1-2]"),
        ("", "", ""),
    ],
)
def test_a_set_expands_and_folds(expression: str, names: str, folded: str) -> None:
    assert " ".join(expand(expression)) == names
    assert fold(names.split()) == folded
    assert expand(folded) == names.split()


@pytest.mark.parametrize(
    ("expression", "column", "word"),
    [
        ("node[1-4", 5, "never closed"),
        ("node1-4]", 8, "closing bracket"),
        ("node[[1]]", 6, "inside a bracket"),
        ("node[1-2][3-4]", 1, "without text between"),
        ("node[]", 1, "empty range"),
        ("node1,node[a]", 7, "not a range"),
        ("node[4-1]", 1, "from 4 to 1"),
        ("node[1-4/0]", 1, "by 0"),
        ("node[5/2]", 1, "not a range"),
        ("node[-2]", 1, "not a range"),
        ("@rack[1-9]", 1, "no group 'rack1'"),
        ("n[1-20000]*", 1, "20,000 wildcards"),
        ("node[01-3]", 1, "different widths"),
        ("node[٣]", 1, "not a range"),
        ("node1,,node2", 7, "',' needs a name on both sides"),
        ("!node1", 1, "'!' needs a name on both sides"),
        ("node1&", 7, "'&' needs a name on both sides"),
        ("node1 node2", 1, "can't contain ' '"),
        ("-oProxyCommand=x", 1, "can't begin with '-'"),
        ("node1;reboot", 1, "can't contain ';'"),
        ("$(id)", 1, "can't contain '$'"),
        ("node\x1b1", 1, "can't contain '\\x1b'"),
        ("node\n1", 1, "can't contain '\\n'"),
        ("@nobody", 1, "no group"),
        ("node*", 1, "matches no node"),
    ],
)
def test_what_is_no_set_is_refused_at_its_place(expression: str, column: int, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(expression)
    assert f"column {column}:" in caught.value.message and word in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "expression",
    [
        "n[1-99999999]",
        "n[1-999999999999999999]",
        "n[1-1000]m[1-1000]k[1-2]",
        "n[1-600000],m[1-600000]",
        "@big",
    ],
)
def test_too_many_names_are_refused_before_they_are_made(expression: str) -> None:
    start = time.perf_counter()
    with pytest.raises(UsageError, match=f"{LIMIT:,}"):
        expand(expression, {"big": "n[1-9],@half", "half": "n[1-99999999]"})
    assert time.perf_counter() - start < 1.0


def test_a_million_names_come_in_a_second_or_so_and_one_more_is_refused() -> None:
    start = time.process_time()
    names = expand("n[0000001-1000000]")
    assert len(names) == LIMIT and names[-1] == "n1000000" and time.process_time() - start < 2.0
    for more in ("n[0-1000000]", "n[1-1000000],m", "m,n[1-1000000]"):
        with pytest.raises(UsageError, match=f"{LIMIT:,}"):
            expand(more)


def test_groups_of_groups_are_read_once_each() -> None:
    groups = {f"g{level}": ",".join([f"@g{level + 1}"] * 9) for level in range(15)}
    start = time.process_time()
    assert expand("@g0!n2", {**groups, "g15": "n[1-3]"}) == ["n1", "n3"]
    assert time.process_time() - start < 1.0


def test_a_groups_name_may_hold_a_range() -> None:
    groups = {"rack1": "n[1-2]", "rack2": "n[3-4]", "rack3": "n5"}
    assert expand("@rack[1-2]", groups) == ["n1", "n2", "n3", "n4"]
    assert expand("@rack[1-3/2]!n1", groups) == ["n2", "n5"]


def test_nodes_are_selected_in_the_inventorys_order() -> None:
    assert select("node[1-3]", NODES) == ["node3", "node1", "node2"]
    assert select("*", NODES) == select("all", NODES) == select("@*", NODES) == NODES
    assert select("node?", NODES) == ["node3", "node1", "node2"]
    assert select("*!node[1-2]", NODES) == ["node3", "node10"]


def test_groups_may_hold_groups_but_not_themselves() -> None:
    assert select("@both!@old", NODES, GROUPS) == ["node3", "node10"]
    with pytest.raises(UsageError, match="@loop -> @pool -> @loop"):
        select("@loop", NODES, GROUPS)
    with pytest.raises(UsageError) as caught:
        select("@odl", NODES, GROUPS)
    assert "'old'" in caught.value.hint


def test_an_unknown_node_names_the_near_miss() -> None:
    with pytest.raises(UsageError) as caught:
        select("node1,noed2", NODES)
    assert "column 7" in caught.value.message and "node2" in caught.value.hint
    with pytest.raises(UsageError, match=r"node\[4-9\]"):
        select("node[1-10]", NODES)
    with pytest.raises(UsageError, match="no node 'node9'"):
        select("*!node9", NODES)


def test_an_empty_selection_is_an_error() -> None:
    for expression in ("", "node1!node1"):
        with pytest.raises(UsageError, match="matches no node"):
            select(expression, NODES)


def test_a_node_called_all_is_only_itself() -> None:
    assert select("all", ["all", "node1"]) == ["all"]


def test_several_sets_are_one() -> None:
    assert expand_all(["node[1-2]", "node[2-3]"]) == ["node1", "node2", "node3"]


def test_names_are_held_to_what_a_shell_and_ssh_take_as_names() -> None:
    assert not any(map(name_fault, ("node1", "10.0.0.1", "fe80::1%eth0", "user@node", "a_b-c.d")))
    assert all(map(name_fault, ("", "-v", "@x", "a b", "a'b", "a\u202eb", "ä", "a/b", "a\x00")))
    with pytest.raises(UsageError, match="'a b': a name can't contain ' '"):
        fold(["node1", "a b"])


names = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,4}){0,2}[a-z]?", fullmatch=True)


@given(st.sets(names, max_size=30))
@settings(max_examples=100, deadline=None)
def test_folding_loses_and_adds_no_name(some: set[str]) -> None:
    assert set(expand(fold(some))) == some
    assert fold(expand(fold(some))) == fold(some)


@given(st.text(alphabet="n1230-9[],!&^@*?%/ \t-ab.:\u0663", max_size=24))
@settings(max_examples=300, deadline=1000)
def test_any_text_is_answered_or_refused_in_words(text: str) -> None:
    try:
        expand(text, GROUPS, NODES)
    except UsageError as error:
        assert error.message and error.hint
