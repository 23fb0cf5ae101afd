"""DeepSpeed's include and exclude, as its documentation promises them."""

from __future__ import annotations

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.hostfile.filter import chosen

THERE = {"w0": (0, 1, 2, 3), "w1": (0, 1, 2, 3), "w2": (0, 1)}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        # Releases of DeepSpeed gave {}.
        ("w1", {"w1": (0, 1, 2, 3)}),
        # And only w1 here.
        ("w1:0,2@w0", {"w0": (0, 1, 2, 3), "w1": (0, 2)}),
        ("w2@w0:3,1,1", {"w0": (1, 3), "w2": (0, 1)}),
        ("w1:0@w1:2", {"w1": (0, 2)}),
        ("w1@w1:0", {"w1": (0, 1, 2, 3)}),
    ],
)
def test_an_include_keeps_whole_nodes_and_slots_in_the_hostfiles_order(
    text: str, left: dict[str, tuple[int, ...]]
) -> None:
    found = chosen(THERE, text, None)
    assert found == left and list(found) == list(left)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("w1", {"w0": (0, 1, 2, 3), "w2": (0, 1)}),
        ("w0:0,3@w2", {"w0": (1, 2), "w1": (0, 1, 2, 3)}),
        # DeepSpeed takes away slot 0 alone.
        ("w1@w1:0", {"w0": (0, 1, 2, 3), "w2": (0, 1)}),
        ("w2:0,1", {"w0": (0, 1, 2, 3), "w1": (0, 1, 2, 3)}),
    ],
)
def test_an_exclude_takes_away_what_it_names(text: str, left: dict[str, tuple[int, ...]]) -> None:
    assert chosen(THERE, None, text) == left


def test_no_filter_leaves_everything() -> None:
    assert chosen(THERE, None, None) == THERE


def test_all_faults_of_a_filter_come_at_once() -> None:
    with pytest.raises(InputFaults) as caught:
        chosen(THERE, "w0:5@w9@w1:0-3@w1:@@w1:a:b@w2: 1", None)
    said = [fault.what for fault in caught.value.faults]
    assert said[:2] == ["w0 has no slot 5", "no node 'w9'"]
    assert len(said) == 7 and all(fault.where == "--include" for fault in caught.value.faults)


def test_both_filters_or_nothing_left_are_refused() -> None:
    with pytest.raises(UsageError, match="can't be given together"):
        chosen(THERE, "w0", "w1")
    with pytest.raises(UsageError, match="leaves no slot"):
        chosen(THERE, None, "w0@w1@w2")
