"""Continue a training of 4 ranks on 2: ours next to DeepSpeed's, from the command to the end of the first step.

A GPT-2 124M with AdamW and ZeRO 1 on four ranks takes a step and saves, with the trainer and with DeepSpeed itself.
Ours: `python -m trainer train` on two ranks, until its first step is done. DeepSpeed's: its offline conversion to a
universal checkpoint (ds_to_universal.py, with its own defaults), and then two ranks that import torch and DeepSpeed,
build the model, load the universal checkpoint and take a step. The times are the machine's: on a machine with other
work both are longer.

python -m bench.train.checkpoints reshard
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def continue_with_ours(folder: Path, size: str) -> tuple[float, dict[str, Any]]:
    """Return the seconds from the command to the end of the first step on fewer ranks, and what the start took."""
    file = folder / "train.json"
    data = json.loads(file.read_text())["data"]
    file.write_text(json.dumps({**config_of(size, 2), "data": data}))
    (folder / "metrics.jsonl").unlink()
    began = time.time()
    run([sys.executable, "-m", "trainer", "train", str(file)], FEWER, folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = next(record for record in records if record["event"] == "start")
    assert start["step"] == 1, "it began anew"
    return (first_step(records) or 0.0) - began, start["startup"]


def convert(folder: Path) -> float:
    """Return the seconds of DeepSpeed's conversion."""
    argv = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(folder / "global_step1"), "--output_folder", str(folder / "universal")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="gpt2-124M")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = write_config(folder, config_of(options.size, 1))
        run([sys.executable, "-m", "trainer", "train", str(file)], RANKS, folder)
        theirs = folder / "deepspeed"
        theirs.mkdir()
        start_ranks("save", RANKS, options.size, theirs)
        ours, startup = continue_with_ours(folder, options.size)
        conversion = convert(theirs)
        began = time.time()
        start = start_ranks("continue", FEWER, options.size, theirs)["time"] - began
    result = {
        "ours": ours,
        "of it": startup,
        "deepspeed's conversion": conversion,
        "its start, load and step": start,
        "times as fast (at least 5)": (conversion + start) / ours,
    }
    print(json.dumps(result, indent=2))
    return 0
