"""Continue a training of 4 ranks on 2: ours from the command to the first step, next to DeepSpeed's offline conversion.

A GPT-2 124M with AdamW and ZeRO 1 on four ranks takes a step and saves, with the trainer and with DeepSpeed itself.
Ours: `python -m trainer train` on two ranks, until its first step is done. DeepSpeed's: only the conversion to a
universal checkpoint (ds_to_universal.py), without the start that would follow. The times are the machine's: on a
machine with other work both are longer.

python -m bench.train.checkpoints reshard
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import native
from bench.runs.times import first_step
from bench.train.ranks import ROOT, run, write_config
from trainer.device import Device
from trainer.engine.deepspeed_engine import DeepSpeedEngine
from trainer.env import Env
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config
from trainer.train.assemble import build_model

RANKS, FEWER = 4, 2
SEQUENCE = 64


def config_of(size: str, steps: int, engine: str = "torch") -> dict[str, Any]:
    return {
        "model": {"name": size, "sequence": SEQUENCE},
        "steps": steps,
        "micro_batch": 1,
        "global_batch": RANKS,
        "engine": engine,
        "zero": 1,
        "eval": {"batches": 0},
        "save": {"keep": 9},
    }


def save_with_deepspeed(rank: int, size: str, folder: str, port: int) -> None:
    """Take a step and save as a user of DeepSpeed does."""
    torch.set_num_threads(1)
    device = Device("cpu")
    group = Group.join(Env(rank, rank, RANKS, RANKS, "127.0.0.1", port), device)
    config = read_config({**config_of(size, 1, "deepspeed"), "data": {"prefix": "none"}}, RANKS)
    groups = Groups.of(group, config.layout(RANKS))
    engine = DeepSpeedEngine(build_model(config, native.choose("cpu"), groups), config, groups, device)
    tokens = torch.randint(1000, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    loss = engine.engine(tokens)
    engine.engine.backward(loss)
    engine.engine.step()
    engine.engine.save_checkpoint(folder, tag="global_step1")
    group.barrier()
    os._exit(0)


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        theirs = folder / "deepspeed"
        mp.spawn(save_with_deepspeed, (options.size, str(theirs), port), nprocs=RANKS)
        seconds, startup = continue_with_ours(folder, options.size)
        conversion = convert(theirs)
    result = {"ours": seconds, "of it": startup, "deepspeed's conversion": conversion}
    print(json.dumps({**result, "times as fast (at least 5)": conversion / seconds}, indent=2))
    return 0
