"""What a node keeps of a run on a disk that is full: nothing is lost, and nobody dies of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.agent.records import Records, fullness, read_json, remove_halves, write_json


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "disk", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no disk of one's own here: {done.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"\0" * 4096)
    return ballast


def test_a_file_that_is_there_is_written_over_on_a_full_disk_and_nothing_lies_beside_it(disk: Path) -> None:
    path = disk / "node.json"
    write_json(str(path), {"state": "running", "more": "x" * 500})
    fill(disk)
    assert fullness(str(disk)) == {"full": str(disk)}
    write_json(str(path), {"state": "failed"})
    assert read_json(str(path)) == {"state": "failed"}
    assert sorted(os.listdir(disk)) == ["ballast", "node.json"]
    with pytest.raises(OSError, match="No space"):
        write_json(str(disk / "new.json"), {"state": "running"})
    assert sorted(os.listdir(disk)) == ["ballast", "node.json"]


def test_half_a_checkpoint_goes_and_whole_ones_stay(tmp_path: Path) -> None:
    for name in ("step-00000005", ".tmp-step-00000010-77"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "model").write_text("x")
    remove_halves(str(tmp_path))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005"]
    remove_halves(str(tmp_path / "none"))


def test_what_can_not_be_written_is_written_when_there_is_room_again(disk: Path) -> None:
    ballast, records = fill(disk), Records()
    records.write(str(disk / "0.json"), {"state": "starting"})
    records.write(str(disk / "0.json"), {"state": "exited"})
    records.again()
    assert list(records.waiting) == [str(disk / "0.json")]
    ballast.unlink()
    records.finish()
    assert read_json(str(disk / "0.json")) == {"state": "exited"}
    assert not records.waiting
    assert fullness(str(disk)) == {}
    assert fullness(str(disk / "none")) == {}
