"""Fill a disk during saves, then load the checkpoints. Needs root.

    python -m pytest tests/trainer/checkpoint/test_disks.py --cases 100

Before each save on a small tmpfs or ext4 a file takes all space except a random rest, which is between nothing and a
little more than the save needs. The save must succeed, or fail on all ranks with the path and a remedy; it must leave
nothing unfinished, and the newest acknowledged step must load with its numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from clusterctl.wire.saved import UNFINISHED
from tests.conftest import Cases
from tests.support.checkpoints import load_with, save_with, state_at, whole_state
from trainer.config.parts import KeepConfig

# 5 MB in total.
ROWS = 60_000
SIZE = 32 << 20


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """Mount a small disk and yield its path; unmount it when the block ends."""
    disk, image = folder / kind, folder / "image"
    disk.mkdir()
    if kind == "tmpfs":
        argv = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    else:
        with image.open("wb") as stream:
            stream.truncate(SIZE)
        # The saves run as root: leave no space that only root may use.
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        argv = ["mount", "-o", "loop", str(image), str(disk)]
    subprocess.run(argv, check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def leave(disk: Path, rest: int) -> Path:
    """Write a file that takes all free space of a disk except `rest` bytes; return it."""
    file, status = disk / "filler", os.statvfs(disk)
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, status.f_bavail * status.f_frsize - rest))
    return file


def save_on(disk: Path, step: int, least: int, random: Random) -> bool:
    """Save a step on a nearly full disk; return whether it was saved."""
    ranks, folder = random.randint(1, 3), disk / "checkpoints"
    need = 4 * sum(tensor.numel() for tensor in state_at(0, ROWS).values())
    filler = leave(disk, int(random.uniform(0.4, 1.4) * need))
    results = save_with([folder] * ranks, step, KeepConfig(2), rows=ROWS)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        assert len(failures) == ranks and len({str(failure) for failure in failures}) == 1, results
        assert "No space left" in str(failures[0])
    assert not list(folder.glob(f"{UNFINISHED}*"))
    # A load needs no space.
    loaded = load_with([folder] * 2, rows=ROWS)
    found, _, notes = loaded[0]
    assert found >= (least if failures else step) and not notes
    state, expected = whole_state(loaded), state_at(found, ROWS)
    assert not found or all(torch.equal(state[key], expected[key]) for key in expected)
    filler.unlink()
    return not failures


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("kind", ("tmpfs", "ext4"))
def test_a_save_on_a_full_disk_fails_on_all_ranks_and_the_acknowledged_step_loads(
    kind: str, tmp_path: Path, cases: Cases
) -> None:
    if kind == "ext4" and not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4 is missing")
    least = 0
    with mounted(kind, tmp_path) as disk:
        for number, random in cases(5):
            is_saved = save_on(disk, number + 1, least, random)
            print(f"case {number}: {'saved' if is_saved else 'refused'}")
            least = number + 1 if is_saved else least
