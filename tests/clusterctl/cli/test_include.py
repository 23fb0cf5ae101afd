"""`launch --include`: DeepSpeed's filter over an inventory, for those who come from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterctl.cli.commands import application
from clusterctl.errors import UsageError


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    (here / "hosts").write_text("w0 slots=4\nw1 slots=4\nw2 slots=2\n")
    return here


def ranks(*words: str) -> list[tuple[str, int]]:
    """The node and the device of each rank of a plan."""
    line = ["launch", "--dry-run", "-c", "hosts", "--no-code", "--json", *words, "--", "true"]
    result = CliRunner().invoke(application(), line)
    if result.exception:
        raise result.exception
    nodes = json.loads(result.stdout)["nodes"]
    return [(node["node"], one["device"]) for node in nodes for one in node["processes"]]


def test_a_whole_node_stays_whole_beside_slots_of_another() -> None:
    assert ranks("--include", "w1:2,0@w0") == [*(("w0", one) for one in range(4)), ("w1", 0), ("w1", 2)]
    assert ranks("-i", "w2@w2:0") == [("w2", 0), ("w2", 1)]


def test_it_narrows_the_nodes_that_were_chosen() -> None:
    assert ranks("-n", "w[0-1]", "-i", "w1:3") == [("w1", 3)]
    with pytest.raises(UsageError, match="no node 'w2'"):
        ranks("-n", "w[0-1]", "-i", "w2")


def test_what_it_names_wrong_is_told_at_once_and_devices_are_chosen_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)no node 'x'.*w0 has no slot 9"):
        ranks("-i", "x@w0:9")
    with pytest.raises(UsageError, match="cannot be combined"):
        ranks("-i", "w0", "--devices", "2")


@pytest.mark.parametrize("option", ["-n", "-x"])
@pytest.mark.parametrize("filter", ["w1:0", "w0@w1:0,2"])
def test_a_filter_where_a_node_set_belongs_is_told_of_the_door(option: str, filter: str) -> None:
    with pytest.raises(UsageError) as caught:
        ranks(option, filter)
    assert "use --include" in caught.value.hint


def test_a_wrong_node_set_is_not() -> None:
    with pytest.raises(UsageError) as caught:
        ranks("-x", "w9")
    assert "--include" not in caught.value.hint
