"""Files that DeepSpeed keeps on a disk are removed when no process of their run is alive, and never before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.deepspeed import OFFLOADED
from trainer.engine.nvme_folders import RunFolders
from trainer.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from trainer.engine.nvme_folders import RunFolders
place, run, rank = sys.argv[1:]
part = {"device": "nvme", "nvme_path": place}
RunFolders({"zero_optimization": {"offload_optimizer": part}}, run, int(rank))
print("holds", flush=True)
time.sleep(60)
"""


def given(place: Path) -> dict[str, object]:
    return {"zero_optimization": {part: {"device": "nvme", "nvme_path": str(place)} for part in OFFLOADED}}


def file_of(place: Path, run: str, rank: int) -> Path:
    """Write a file where DeepSpeed writes those of a rank."""
    file = place / run / "zero_stage_3" / "optimizer" / f"rank{rank}" / "1.tensor.swp"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(100))
    return file


def holder(place: Path, run: str, rank: int) -> subprocess.Popen[str]:
    """Return a process that holds the folder of a run as its rank does."""
    argv = [sys.executable, "-c", HOLD, str(place), run, str(rank)]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout and process.stdout.readline() == "holds\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_the_next_start_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    foreign = tmp_path / "photos" / "zero_stage_3" / "optimizer" / "rank0" / "kept"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    process = holder(tmp_path, "killed", 0)
    try:
        file = file_of(tmp_path, "killed", 0)
        RunFolders(given(tmp_path), "next", 0).remove()
        assert file.exists(), "its run is alive"
    finally:
        kill(process)
    RunFolders(given(tmp_path), "after", 0).remove()
    # A folder that no run of ours made stays.
    assert [each.name for each in tmp_path.iterdir()] == ["photos"] and foreign.exists()


def test_an_attempt_with_fewer_ranks_removes_the_files_of_all(tmp_path: Path) -> None:
    process = holder(tmp_path, "run", 1)
    files = [file_of(tmp_path, "run", rank) for rank in (0, 1)]
    kill(process)
    own = RunFolders(given(tmp_path), "run", 0)
    assert not any(file.exists() for file in files)
    own.remove()


def test_a_rank_that_ends_first_removes_its_own_files_alone(tmp_path: Path) -> None:
    process = holder(tmp_path, "run", 1)
    try:
        theirs = file_of(tmp_path, "run", 1)
        own, mine = RunFolders(given(tmp_path), "run", 0), file_of(tmp_path, "run", 0)
        own.remove()
        assert theirs.exists() and not mine.exists()
    finally:
        kill(process)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=r"nvme_path: files in .*file/run cannot be written: Not a directory"
    ):
        RunFolders(given(tmp_path / "file"), "run", 0)
