"""Continue a training of 4 ranks on 2, compared with DeepSpeed: from the command to the end of the first step.

A GPT-2 124M with AdamW and ZeRO 1 on four ranks takes a step and saves, with the trainer and with DeepSpeed itself.
Ours is `python -m trainer train` on two ranks, until its first step is done. DeepSpeed's is its offline conversion to a
universal checkpoint (ds_to_universal.py with its defaults), and then two ranks that import torch and DeepSpeed, build
the model, load the universal checkpoint and take a step. Other load on the machine makes both times longer.

    python -m bench.train.checkpoints reshard
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.field import Option, read_options
from bench.field import run as run_command
from bench.runs.times import first_step
from bench.train.checkpoints.deepspeed import GLOBAL_BATCH, SEQUENCE, start_ranks
from bench.train.ranks import ROOT, run, write_config

RANKS, FEWER = 4, 2


def config_of(size: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"name": size, "sequence": SEQUENCE},
        "steps": steps,
        "micro_batch": 1,
        "global_batch": GLOBAL_BATCH,
        "engine": "torch",
        "zero": 1,
        "eval": {"batches": 0},
        "save": {"keep": 9},
    }


def continue_with_ours(folder: Path, size: str) -> tuple[float, Mapping[str, float]]:
    """Return the seconds from the command to the end of the first step on fewer ranks, and the parts of the start."""
    file = folder / "train.json"
    data = json.loads(file.read_text())["data"]
    file.write_text(json.dumps({**config_of(size, 2), "data": data}))
    (folder / "metrics.jsonl").unlink()
    # Remove the results of an earlier round.
    shutil.rmtree(folder / "checkpoints" / "step-00000002", ignore_errors=True)
    began = time.time()
    run([sys.executable, "-m", "trainer", "train", str(file)], FEWER, folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = next(record for record in records if record["event"] == "start")
    assert start["step"] == 1, "it started from step 0"
    return (first_step(records) or 0.0) - began, start["startup"]


def convert(folder: Path) -> float:
    """Return the seconds of DeepSpeed's conversion."""
    argv = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(folder / "global_step1"), "--output_folder", str(folder / "universal")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    shutil.rmtree(folder / "universal", ignore_errors=True)
    return run_command(argv, env=environment).wall


@dataclass(frozen=True)
class Round:
    """The seconds of one continuation with each program."""

    ours: float
    startup: Mapping[str, float]
    conversion: float
    start: float


def take_round(folder: Path, theirs: Path, size: str) -> Round:
    ours, startup = continue_with_ours(folder, size)
    conversion = convert(theirs)
    began = time.time()
    start = start_ranks("continue", FEWER, size, theirs)["time"] - began
    return Round(ours, startup, conversion, start)


def main() -> int:
    options = read_options(
        __doc__, size="gpt2-124M", rounds=Option(3, "of each program in turn; medians are shown")
    )
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = write_config(folder, config_of(options.size, 1))
        run([sys.executable, "-m", "trainer", "train", str(file)], RANKS, folder)
        theirs = folder / "deepspeed"
        theirs.mkdir()
        start_ranks("save", RANKS, options.size, theirs)
        rounds = [take_round(folder, theirs, options.size) for _ in range(options.rounds)]
    ours = [each.ours for each in rounds]
    conversions, starts = [each.conversion for each in rounds], [each.start for each in rounds]
    result = {
        "rounds": options.rounds,
        "ours": statistics.median(ours),
        "all of ours": ours,
        "of the last": rounds[-1].startup,
        "deepspeed's conversion": statistics.median(conversions),
        "its start, load and step": statistics.median(starts),
        "all of its starts": starts,
        "times as fast (at least 5)": statistics.median(
            [(each.conversion + each.start) / each.ours for each in rounds]
        ),
    }
    print(json.dumps(result, indent=2))
    return 0
