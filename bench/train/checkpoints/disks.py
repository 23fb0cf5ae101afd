"""Fill a disk during saves, then load the checkpoints.

It mounts a small tmpfs and a small ext4 image (needs root). Before each save a file takes all space except a random
rest, which is between nothing and a little more than the save needs. The save must succeed, or fail on all ranks with
the path and a remedy; it must leave nothing unfinished, and the newest acknowledged step must load with its numbers.

    python -m bench.train.checkpoints disks --count 200
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from tests.support.checkpoints import load_with, save_with, state_at, whole_state
from trainer.checkpoint.store import UNFINISHED
from trainer.config.parts import KeepConfig
from trainer.errors import TrainerError

# 5 MB in total.
ROWS = 60_000
SIZE = 32 << 20
KINDS = ("tmpfs", "ext4")


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


def attempt(disk: Path, step: int, least: int, random: Random) -> tuple[bool, str]:
    """Save a step on a nearly full disk; return whether it was saved, and a fault or ""."""
    ranks = random.randint(1, 3)
    folder = disk / "checkpoints"
    need = 4 * sum(tensor.numel() for tensor in state_at(0, ROWS).values())
    filler = leave(disk, int(random.uniform(0.4, 1.4) * need))
    results = save_with([folder] * ranks, step, KeepConfig(2), rows=ROWS)
    failures = [result for result in results if isinstance(result, BaseException)]
    fault = ""
    if failures and (len(failures) < ranks or len({str(failure) for failure in failures}) > 1):
        fault = f"different results on the ranks: {results}"
    elif any("No space left" not in str(failure) for failure in failures):
        fault = f"another failure: {failures[0]}"
    elif list(folder.glob(f"{UNFINISHED}*")):
        fault = "an unfinished folder was left"
    # A load needs no space.
    fault = fault or _load(folder, step if not failures else least)
    filler.unlink()
    return not failures, fault


def _load(folder: Path, least: int) -> str:
    try:
        loaded = load_with([folder] * 2, rows=ROWS)
    except TrainerError as error:
        return f"does not load: {error.message}"
    step, _, notes = loaded[0]
    state, expected = whole_state(loaded), state_at(step, ROWS)
    if step < least or notes:
        return f"loaded {step}, acknowledged {least}: {notes}"
    return (
        "" if not step or all(torch.equal(state[key], expected[key]) for key in expected) else "other numbers"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="saves on each of the two disks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, wrong = Counter[str](), 0
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder, mounted(kind, Path(folder)) as disk:
            least = 0
            for step in range(1, options.count + 1):
                saved, fault = attempt(disk, step, least, Random(f"{options.seed}-{kind}-{step}"))
                least = step if saved else least
                counts[f"{kind}: {'saved' if saved else 'refused'}"] += 1
                if fault:
                    wrong += 1
                    sys.stderr.write(f"{kind}, step {step}: {fault}\n")
    print(json.dumps({"saves": dict(counts), "wrong": wrong}))
    return 1 if wrong else 0
