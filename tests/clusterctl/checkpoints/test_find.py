"""Checkpoints of several machines, put together: which are complete, and who has which file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList, Health, combine
from clusterctl.checkpoints.find import is_folder, of_folder
from clusterctl.checkpoints.holder import Disk, Entry, Holder, Listing, NodeHolder
from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Connection
from tests.support import checkpoints as made


def holder(name: str) -> Holder:
    return NodeHolder(Node(name=name, host=name, address="127.0.0.1"), Connection(name))


def entry(step: int, *have: str, digest: str = "d", count: int = 2, **more: object) -> Entry:
    return replace(
        Entry(f"step-{step:08d}", f"/run/step-{step:08d}", step, digest, have, count=count),
        **more,  # type: ignore[arg-type]
    )


def together(**nodes: list[Entry]) -> tuple[Checkpoint, ...]:
    return combine(
        [
            (holder(name), Listing("/run", False, "", tuple(entries), Disk(1, 2)))
            for name, entries in nodes.items()
        ]
    )


def test_a_checkpoint_is_complete_when_the_nodes_together_have_every_file() -> None:
    newest, older = together(node1=[entry(2, "a"), entry(1, "a")], node2=[entry(1, "b")])
    assert (newest.step, newest.health, newest.missing) == (2, Health.INCOMPLETE, 1)
    assert (older.step, older.health, older.copies) == (1, Health.COMPLETE, 1)
    assert [holding.holder.name for holding in older.holders_of("b")] == ["node2"]


def test_copies_counts_the_file_with_the_fewest() -> None:
    (found,) = together(node1=[entry(1, "a", "b")], node2=[entry(1, "a", "b")], node3=[entry(1, "a")])
    assert found.copies == 2
    assert found.nodes == ("node1", "node2", "node3")


def test_a_step_that_was_saved_again_is_not_mixed_with_the_older_one() -> None:
    found = together(node1=[entry(1, "a", digest="new")], node2=[entry(1, "b", digest="old")])
    assert [checkpoint.health for checkpoint in found] == [Health.INCOMPLETE, Health.INCOMPLETE]


def test_a_damaged_manifest_is_a_fault_of_its_node_and_hides_no_other_copy() -> None:
    broken = entry(1, digest="", faults=("manifest.json: damaged",), count=0)
    (found,) = together(node1=[broken], node2=[entry(1, "a", "b")])
    assert found.health is Health.COMPLETE
    assert found.faults == ("node1: manifest.json: damaged",)
    (alone,) = together(node1=[broken])
    assert alone.health is Health.DAMAGED


def test_weights_alone_can_not_be_resumed_from() -> None:
    (found,) = together(node1=[entry(1, "a", "b", state="weights")])
    assert found.health is Health.COMPLETE
    assert not found.is_resumable


def test_a_folder_is_read_here_and_the_newest_complete_one_is_the_default(tmp_path: Path) -> None:
    for step in (1, 2):
        made.saved(tmp_path, step, ranks=2)
    (tmp_path / "step-00000002" / "part-00000.safetensors").unlink()
    found = of_folder(tmp_path)
    assert [checkpoint.health for checkpoint in found.checkpoints] == [Health.INCOMPLETE, Health.COMPLETE]
    assert found.newest().step == 1
    assert found.chosen(2).step == 2
    with pytest.raises(UsageError, match="no checkpoint of step 7"):
        found.chosen(7)
    assert is_folder(str(tmp_path))
    assert is_folder(str(tmp_path / "step-00000001"))
    assert of_folder(tmp_path / "step-00000001").newest().step == 1


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in it"):
        of_folder(tmp_path)


def test_a_run_whose_nodes_do_not_answer_may_have_checkpoints() -> None:
    with pytest.raises(UsageError, match=r"run-1: no checkpoint was found: n\[1-2\] not reached") as caught:
        CheckpointList("run-1", (), unreachable={"n1": "no answer", "n2": "no answer"}).chosen(None)
    assert "clusterctl doctor" in caught.value.hint
