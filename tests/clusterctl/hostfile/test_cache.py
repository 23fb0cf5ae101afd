"""An inventory that was remembered is the file's, as it is now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults
from clusterctl.hostfile.cache import Inventories, Which


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "id").write_text("a key")
    return written(tmp_path / "lab.yaml", "nodes: {a: {host: h1, key: ./id}}\n", age=10)


def written(path: Path, text: str, age: float) -> Path:
    path.write_text(text)
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


def test_what_is_remembered_is_not_read_again(lab: Path) -> None:
    known, read = Inventories(), []
    known.on_read = read.append
    first = known.load(Path("lab.yaml"), "cpu")
    assert read == [Which(str(lab.parent), "lab.yaml", "cpu")]
    known.remember(read[0])
    assert known.load(Path("lab.yaml"), "cpu") == first and len(read) == 1


def test_a_changed_file_is_read_again(lab: Path) -> None:
    known = Inventories()
    known.remember(Which(str(lab.parent), "lab.yaml", "cpu"))
    written(lab, "nodes: {b: {host: h2}}\n", age=5)
    assert known.load(Path("lab.yaml"), "cpu").names == ["b"]
    written(lab, "nodes: {b: {hots: h2}}\n", age=4)
    with pytest.raises(InputFaults):
        known.load(Path("lab.yaml"), "cpu")


def test_an_identity_file_that_went_missing_is_a_fault_all_the_same(lab: Path) -> None:
    known = Inventories()
    known.remember(Which(str(lab.parent), "lab.yaml", "cpu"))
    assert known.load(Path("lab.yaml"), "cpu").names == ["a"]
    (lab.parent / "id").unlink()
    with pytest.raises(InputFaults, match="no identity file"):
        known.load(Path("lab.yaml"), "cpu")


def test_the_same_name_in_another_folder_or_of_another_kind_is_another_inventory(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Inventories()
    known.remember(Which(str(tmp_path), "lab.yaml", "cpu"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "id").write_text("another")
    # The same file, but its paths mean another place.
    (other / "lab.yaml").hardlink_to(lab)
    here = known.load(Path("lab.yaml"), "cpu").nodes[0].key
    monkeypatch.chdir(other)
    there = known.load(Path(str(other / "lab.yaml")), "cpu").nodes[0].key
    assert here != there == str(other / "id")


def test_a_file_that_was_just_written_or_that_is_wrong_is_not_remembered(lab: Path, tmp_path: Path) -> None:
    known, read = Inventories(), []
    known.on_read = read.append
    written(lab, "nodes: {a: {host: h1}}\n", age=0)
    known.remember(Which(str(tmp_path), "lab.yaml", "cpu"))
    known.remember(Which(str(tmp_path), "missing.yaml", "cpu"))
    known.remember(Which(str(tmp_path / "gone"), "lab.yaml", "cpu"))
    written(tmp_path / "wrong.yaml", "nodes: 3\n", age=10)
    known.remember(Which(str(tmp_path), "wrong.yaml", "cpu"))
    known.load(Path("lab.yaml"), "cpu")
    assert len(read) == 1
