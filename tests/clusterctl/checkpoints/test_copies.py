"""Copies of checkpoints on other nodes, and what a restart moves: decided on values, done by real agents."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList, Health
from clusterctl.checkpoints.find import of_nodes, with_copies_here
from clusterctl.checkpoints.holder import SavedLayout
from clusterctl.checkpoints.moves import copies_wanted, move_all
from clusterctl.checkpoints.restart import moves_for
from clusterctl.cli.views.checkpoints import list_table
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import plan as plans
from clusterctl.jobs.job import Job
from clusterctl.jobs.run_folder import RunDir
from clusterctl.transport.fanout import Connections
from clusterctl.transport.local import LocalTransport
from clusterctl.wire.saved import MANIFEST
from tests.clusterctl.checkpoints.test_find import entry, together
from tests.support import checkpoints as made
from tests.support.nodes import local_node

PARTS = [f"part-{rank:05d}.safetensors" for rank in range(3)]


def folders(*names: str) -> dict[str, tuple[Node, str]]:
    return {name: (Node(name=name, host=name, address=name), f"/{name}") for name in names}


def as_text(moves: object) -> list[str]:
    return [f"{m.source.holder.name}>{m.target.name}:{','.join(m.names)}" for m in moves]  # type: ignore[attr-defined]


def test_each_file_goes_to_the_next_node() -> None:
    (found,) = together(
        node1=[entry(1, "a", count=3)], node2=[entry(1, "b", count=3)], node3=[entry(1, "c", count=3)]
    )
    names = folders("node1", "node2", "node3")
    assert as_text(copies_wanted(found, names, 2)) == ["node1>node2:a", "node2>node3:b", "node3>node1:c"]
    assert len(copies_wanted(found, names, 3)) == 6
    # There are no more nodes than three.
    assert len(copies_wanted(found, names, 9)) == 6


def test_files_with_enough_copies_stay() -> None:
    (found,) = together(node1=[entry(1, "a", "b")], node2=[entry(1, "a", "b")])
    assert not copies_wanted(found, folders("node1", "node2"), 2)


def planned(*names: str) -> plans.Plan:
    nodes = tuple(Node(name=name, host=name, address=name, devices=(0,)) for name in names)
    return plans.make_plan(Cluster("lab", nodes), Job(name="j", command=("true",)))


def of_three(**nodes: list[str]) -> Checkpoint:
    listed = {name: [entry(1, *have, count=3, layout=SavedLayout(world=3))] for name, have in nodes.items()}
    (found,) = together(**listed)
    return found


def test_a_new_node_gets_the_file_of_its_rank_alone() -> None:
    found = of_three(node2=[PARTS[1], PARTS[0]], node3=[PARTS[2], PARTS[1]])
    moves = moves_for(found, planned("node4", "node2", "node3"), folders("node4", "node2", "node3"))
    assert as_text(moves) == [f"node2>node4:{PARTS[0]}"]


def test_files_of_nodes_that_left_go_to_some_node_of_another_layout() -> None:
    found = of_three(node1=[PARTS[0]], node2=[PARTS[1]], node3=[PARTS[2]])
    moves = moves_for(found, planned("node2", "node4"), folders("node2", "node4"))
    assert as_text(moves) == [f"node1>node2:{PARTS[0]}", f"node3>node2:{PARTS[2]}"]


def test_where_nothing_is_missing_nothing_moves() -> None:
    found = of_three(node1=[PARTS[0]], node2=[PARTS[1]], node3=[PARTS[2]])
    assert not moves_for(found, planned("node1", "node2", "node3"), folders("node1", "node2", "node3"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[list[tuple[Node, str]], Connections]]:
    found = []
    for name in ("node1", "node2", "node3"):
        (tmp_path / name).mkdir()
        found.append((local_node(tmp_path / name, name), str(tmp_path / name / "checkpoints")))
    with Connections(LocalTransport(home=tmp_path)) as connections:
        yield found, connections


def newest(nodes: list[tuple[Node, str]], connections: Connections) -> Checkpoint:
    return of_nodes(nodes, connections).checkpoints[0]


def test_copies_survive_the_loss_of_any_node(nodes: tuple[list[tuple[Node, str]], Connections]) -> None:
    held, connections = nodes
    made.save_with([Path(folder) for _, folder in held], 5)
    found = newest(held, connections)
    assert (found.health, found.copies) == (Health.COMPLETE, 1)
    moves = copies_wanted(found, {node.name: (node, folder) for node, folder in held}, 2)
    outcomes = move_all(found, moves, connections)
    assert all(outcome.get() > 0 for outcome in outcomes)
    assert newest(held, connections).copies == 2
    for lost in range(3):
        living = [node for at, node in enumerate(held) if at != lost]
        assert newest(living, connections).health is Health.COMPLETE
    # The trainer loads what is left, with the ranks of two nodes.
    loaded = made.load_with([Path(folder) for _, folder in held[1:]])
    assert [step for step, _, _ in loaded] == [5, 5]


def test_a_node_without_the_checkpoint_gets_it_with_its_manifest(
    nodes: tuple[list[tuple[Node, str]], Connections],
) -> None:
    held, connections = nodes
    made.save_with([Path(folder) for _, folder in held[:2]], 5)
    found = newest(held, connections)
    target, folder = held[2]
    source = found.holdings[0]
    from clusterctl.checkpoints.moves import Move

    move_all(found, [Move(source, target, folder, source.entry.have)], connections)
    (own,) = of_nodes([held[2]], connections).checkpoints
    assert own.digest == found.digest
    assert own.facts.have == source.entry.have


def test_copies_of_a_step_that_was_saved_again_are_dropped(
    nodes: tuple[list[tuple[Node, str]], Connections],
) -> None:
    held, connections = nodes
    made.save_with([Path(folder) for _, folder in held], 5)
    found = newest(held, connections)
    moves = copies_wanted(found, {node.name: (node, folder) for node, folder in held}, 2)
    stale = replace(found, digest="0" * 64)
    outcomes = move_all(stale, moves, connections)
    assert all("saved again" in str(outcome.error) for outcome in outcomes)
    assert newest(held, connections).copies == 1


def test_a_damaged_manifest_is_replaced_by_a_copy_on_another_machine(
    nodes: tuple[list[tuple[Node, str]], Connections], tmp_path: Path
) -> None:
    held, connections = nodes
    made.save_with([Path(folder) for _, folder in held], 5)
    here = RunDir(tmp_path / "run")
    for _, folder in held:
        shutil.copytree(folder, here.checkpoints, dirs_exist_ok=True)
        Path(folder, "step-00000005", MANIFEST).write_text("{}")
    found = with_copies_here(of_nodes(held, connections), here)
    (checkpoint,) = found.checkpoints
    assert checkpoint.is_resumable and len(checkpoint.faults) == 3
    assert "damaged on node[1-3]" in list_cells(found)
    folders = {node.name: (node, folder) for node, folder in held}
    moves = moves_for(checkpoint, planned("node1", "node2", "node3"), folders)
    assert {move.source.holder.name for move in moves} == {"here"}
    outcomes = move_all(checkpoint, moves, connections)
    assert all(outcome.get() > 0 for outcome in outcomes)
    again = newest(held, connections)
    assert (again.digest, again.faults, again.health) == (checkpoint.digest, (), Health.COMPLETE)
    assert [step for step, _, _ in made.load_with([Path(folder) for _, folder in held])] == [5, 5, 5]


def list_cells(found: CheckpointList) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(list_table(found))
    return console.export_text()
