"""Flip single bits of a checkpoint's files, one at a time; each flip must be noticed.

The checkpoint has three ranks and a tokenizer. The bits are drawn from all files in proportion to their sizes, and also
from each file separately. `verify` (SHA-256) and a load of all tensors (checksums) must notice each flip and name the
file. After every hundredth flip the loader must skip the damaged checkpoint and load the previous one.

    python -m bench.train.checkpoints flips --count 10000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import torch

from tests.support.checkpoints import load_with, saved, state_at, whole_state
from trainer.checkpoint.store import Checkpoint, open_checkpoint, verify
from trainer.errors import CheckpointError
from trainer.side_files import TOKENIZER

RANKS = 3
ROWS = 600


def draw(files: dict[Path, bytes], random: Random) -> tuple[Path, int]:
    """Return a random file, and a random bit of it."""
    names = sorted(files)
    weights = [len(files[file]) for file in names] if random.random() < 0.5 else None
    (file,) = random.choices(names, weights)
    return file, random.randrange(8 * len(files[file]))


def notice(folder: Path, file: Path) -> str:
    """Return why a flip in `file` was not noticed correctly, or ""."""
    readers = {"verify": verify, "a load": read_all}
    if file.name == TOKENIZER:
        # A load of tensors does not read this file.
        del readers["a load"]
    for name, reader in readers.items():
        try:
            reader(folder)
        except CheckpointError as error:
            if file.name in error.message:
                continue
            return f"{name} names another file: {error.message}"
        return f"not noticed by {name}"
    return ""


def read_all(folder: Path) -> Checkpoint:
    """Load all tensors and compare the checksums of their pieces; return the checkpoint."""
    checkpoint = open_checkpoint(folder)
    checkpoint.read(list(checkpoint.table))
    return checkpoint


def pass_over(base: Path, folder: Path) -> str:
    """Return a fault of a load that should skip the damaged checkpoint, or ""."""
    loaded = load_with([base] * RANKS, rows=ROWS)
    step, _, notes = loaded[0]
    state, expected = whole_state(loaded), state_at(step, ROWS)
    if step != 1 or not any(folder.name in note for note in notes):
        return f"loaded step {step}, notes {notes}"
    return "" if all(torch.equal(state[key], expected[key]) for key in expected) else "other numbers"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random, counts, wrong = Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as text:
        base = Path(text)
        tokenizer = base / "words.json"
        tokenizer.write_text(json.dumps({f"word {number}": number for number in range(200)}))
        for step in (1, 2):
            folder = saved(base, step, RANKS, tokenizer=tokenizer, rows=ROWS).path
        files = {file: file.read_bytes() for file in folder.iterdir()}
        for number in range(options.count):
            file, bit = draw(files, random)
            content = bytearray(files[file])
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            fault = notice(folder, file) or (pass_over(base, folder) if number % 100 == 0 else "")
            file.write_bytes(files[file])
            counts[file.name] += 1
            if fault:
                wrong += 1
                sys.stderr.write(f"{file.name}, bit {bit}: {fault}\n")
        verify(folder)
        read_all(folder)
    print(json.dumps({"flips": dict(sorted(counts.items())), "all": sum(counts.values()), "wrong": wrong}))
    return 1 if wrong else 0
