"""Slurm's node lists and counts of tasks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import UsageError
from clusterctl.hostfile.formats import Entry
from clusterctl.hostfile.node_lists import (
    expand,
    fold,
    from_variables,
    inspect_text,
    looks_like,
    read_tasks,
    render,
    render_tasks,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("linux[0-2,128]", "linux0 linux1 linux2 linux128"),
        ("lx[15,18,32-33]", "lx15 lx18 lx32 lx33"),
        ("r[0-1]_b[0-1]", "r0_b0 r0_b1 r1_b0 r1_b1"),
        ("linux[0009-0011]", "linux0009 linux0010 linux0011"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("tux[2,1-2]", "tux2 tux1 tux2"),
        ("big,n[1-2],x9", "big n1 n2 x9"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ],
)
def test_a_list_opens_in_its_own_order(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    "text",
    ["", ",a", "a,", "a,,b", "n[1-2", "n]1", "n[]", "n[2-1]", "n[1-2/2]", "n[a]", "n[[1]]", "-n[1-2]",
     "n[1];id", "$(id)", "a b", "n*", "@g", "a!b", "n[1]" * 9, "n[٣]"],
)  # fmt: skip
def test_what_slurm_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert caught.value.hint


def test_a_list_without_end_is_refused_at_once() -> None:
    began = time.monotonic()
    for text in ("n[1-999999999999]", "a[1-99999]b[1-99999]", ",".join(["n[1-9999]"] * 50)):
        with pytest.raises(UsageError, match="more than 100,000 nodes"):
            expand(text)
    assert time.monotonic() - began < 1


@given(st.lists(st.from_regex(r"(n|rack1_b|x)[0-9]{0,3}\Z", fullmatch=True), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_what_is_folded_opens_to_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert expand(fold(names)) == names


def test_a_fold_is_as_short_as_the_order_lets_it_be() -> None:
    assert fold(["n08", "n09", "n10", "big", "n1", "n3", "n2"]) == "n[08-10],big,n[1,3,2]"


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_counts_of_tasks_are_read_as_they_are_written(counts: list[int]) -> None:
    assert read_tasks(render_tasks(counts)) == counts


def test_counts_of_tasks_are_slurms() -> None:
    assert read_tasks("8(x4),4") == [8, 8, 8, 8, 4] and render_tasks([8, 8, 8, 8, 4]) == "8(x4),4"
    for text in ("", "0", "8(x0)", "8(x)", "8x4", "99999", "-1", "8(x4", "1(x999999),1(x999999)", "8,,4"):
        with pytest.raises(UsageError, match=r"is not a number of tasks|more than 100,000 nodes"):
            read_tasks(text)


def test_variables_as_env_prints_them_are_read_and_others_passed_over() -> None:
    text = "SLURM_JOB_ID=7\nexport SLURM_JOB_NODELIST='n[1-2],x'\nSLURM_TASKS_PER_NODE=8(x2),4\n"
    entries, faults = inspect_text(text, "env")
    assert not faults and [(one.address, one.slots) for one in entries] == [("n1", 8), ("n2", 8), ("x", 4)]
    assert inspect_text(render(entries), "again")[0][2].slots == 4


def test_all_faults_of_an_allocation_come_at_once_by_the_variables_names() -> None:
    variables = {"SLURM_JOB_NODELIST": "n[1-2],n2,-x", "SLURM_TASKS_PER_NODE": "0", "OTHER": "1"}
    faults = from_variables(variables)[1]
    assert [fault.where for fault in faults] == ["$SLURM_JOB_NODELIST", "$SLURM_TASKS_PER_NODE"]
    (fault,) = from_variables({"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"})[1]
    assert fault.where == "$SLURM_HET_SIZE" and "heterogeneous" in fault.what
    faults = from_variables({"SLURM_JOB_NODELIST": "n[1-2],n2"})[1]
    assert [(fault.where, fault.what) for fault in faults] == [
        ("$SLURM_JOB_NODELIST", "n2 is listed twice here")
    ]
    (fault,) = from_variables({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "8(x2)"})[1]
    assert "has counts for 2 nodes, but the list has 3" in fault.what


def test_lists_a_line_each_are_slurms_and_a_set_with_slots_is_not() -> None:
    assert looks_like("# ours\nn[1-2]\nbig\n") and looks_like("a,b") and looks_like("SLURM_NODELIST=a")
    assert not looks_like("n[1-2] slots=8\n") and not looks_like("a\nb\n") and not looks_like("a:8,b:4")
    entries, faults = inspect_text("n[1-2]\nbig\n", "list")
    assert not faults and entries[2] == Entry("big", None, line=2)
    (fault,) = inspect_text("SLURM_JOB_NODELIST=a\nb\n", "f")[1]
    assert fault.where == "f:2" and "not both" in fault.remedy


def test_brackets_count_in_slurms_own_order() -> None:
    assert expand("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]
    # Of the brackets before the last, the first counts fastest.
    assert expand("a[1-2]b[3-4]c[5-6]") == [
        "a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6",
    ]  # fmt: skip


def test_text_after_the_last_bracket_is_refused_as_in_slurm() -> None:
    with pytest.raises(UsageError, match="no text after the last bracket"):
        expand("node[1-2]-ib")
