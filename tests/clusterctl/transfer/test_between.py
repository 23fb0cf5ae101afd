"""Files copied from one node to another, with real agents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.transfer.between import End, copy_between
from clusterctl.transport.link import RequestFailed
from tests.support.nodes import connect, local_node


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[End, End]]:
    made = []
    for name in ("node1", "node2"):
        (tmp_path / name).mkdir()
        made.append(End(local_node(tmp_path / name, name), connect(tmp_path / name)))
    yield made[0], made[1]
    for end in made:
        end.connection.close()


def source(tmp_path: Path) -> Path:
    folder = tmp_path / "from"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(9_000_000))
    (folder / "small").write_bytes(b"small")
    (folder / "other").write_bytes(b"not wanted")
    return folder


def test_files_go_from_node_to_node_and_leave_no_record(tmp_path: Path, ends: tuple[End, End]) -> None:
    folder, dest = source(tmp_path), tmp_path / "to" / "copy"
    result = copy_between(ends[0], str(folder), ["large", "small"], ends[1], str(dest))
    assert sorted(path.name for path in dest.iterdir()) == ["large", "small"]
    assert (dest / "large").read_bytes() == (folder / "large").read_bytes()
    # Nothing came through this machine.
    assert (result.bytes_sent, result.bytes_relayed) == (0, 9_000_005)
    assert not list(tmp_path.glob("node2/work/trees/*"))


def test_nodes_that_can_not_reach_each_other_are_served_through_this_machine(
    tmp_path: Path, ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dest = source(tmp_path), tmp_path / "to" / "copy"
    from clusterctl.transfer import between

    monkeypatch.setattr(between.Offer, "listen", lambda offer, terms: 1)
    result = copy_between(ends[0], str(folder), ["large", "small"], ends[1], str(dest))
    assert (dest / "large").read_bytes() == (folder / "large").read_bytes()
    assert (result.bytes_sent, result.bytes_relayed) == (9_000_005, 0)


def test_a_file_that_is_missing_is_named_and_nothing_is_written(
    tmp_path: Path, ends: tuple[End, End]
) -> None:
    folder, dest = source(tmp_path), tmp_path / "to" / "copy"
    with pytest.raises(RequestFailed, match="has no file gone"):
        copy_between(ends[0], str(folder), ["large", "gone"], ends[1], str(dest))
    assert not dest.exists()
