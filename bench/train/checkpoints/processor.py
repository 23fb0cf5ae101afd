"""Compare the processor time of loads, saves and stalls with torch's: a GPT-2 124M with AdamW on two ranks, in turn.

It is for busy machines, on which processor time varies less than wall time; everything else is as in `times`. It prints
the least of several rounds, summed over both ranks, in seconds. With `--folder /dev/shm` no disk is written.

    python -m bench.train.checkpoints processor --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import native
from bench.train.checkpoints.times import RANKS, config_of, free_port
from trainer.checkpoint.checkpointer import Checkpointer, Progress
from trainer.config.data import DataIdentity
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.env import Env
from trainer.parallel.group import Group, Groups
from trainer.train.assemble import build_model

Times = dict[str, list[float]]


def measured(times: Times, key: str, work: Callable[[], Any]) -> None:
    """Record the processor time of all ranks, and the longest wall time."""
    dist.barrier()
    began, processor = time.monotonic(), time.process_time()
    work()
    mine, longest = torch.tensor(time.process_time() - processor), torch.tensor(time.monotonic() - began)
    dist.all_reduce(mine)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    times[key].append(float(mine))
    times[f"{key}, by the clock"].append(float(longest))


def rank_main(rank: int, size: str, folder: str, port: int, rounds: int, saves: bool) -> None:
    torch.set_num_threads(1)
    device = Device("cpu")
    group = Group.join(Env(rank, rank, RANKS, RANKS, "127.0.0.1", port), device)
    config = config_of(size, "never")
    groups = Groups.of(group, config.layout(RANKS))
    engine = TorchEngine(build_model(config, native.choose("cpu"), groups), config, groups, device)
    ours, theirs = Path(folder) / "ours", Path(folder) / "torch"
    identity = DataIdentity()
    at_once = Checkpointer(config, engine, group, ours / "never", identity)
    later = Checkpointer(config_of(size, "always"), engine, group, ours / "always", identity)
    state: dict[str, torch.Tensor] = {part.key: part.tensor for part in engine.parts()}
    times: Times = defaultdict(list)
    for number in range(1, rounds + 1):
        step = number if saves else 1
        if saves or number == 1:
            measured(times, "save", lambda step=step: at_once.save(Progress(step)))
            measured(times, "torch's save", lambda: dcp.save(state, checkpoint_id=str(theirs)))
            measured(times, "stall", lambda step=step: later.save(Progress(step)))
            later.finish()
        measured(times, "load", lambda: at_once.resume())
        measured(times, "torch's load", lambda: dcp.load(state, checkpoint_id=str(theirs)))
        measured(times, "torch's clone", lambda: {key: tensor.clone() for key, tensor in state.items()})
    if rank == 0:
        least = {key: round(min(found), 3) for key, found in sorted(times.items())}
        ratios = {
            "load / torch's": least["load"] / least["torch's load"],
            "save / torch's": least["save"] / least["torch's save"],
        }
        print(json.dumps({"least seconds": least, "ratios": ratios}, indent=2))
    group.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="gpt2-124M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to save (default: the folder for temporary files)")
    parser.add_argument("--saves", action="store_true", help="save in every round, not only in the first")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder)
    try:
        mp.spawn(rank_main, (options.size, folder, free_port(), options.rounds, options.saves), nprocs=RANKS)
    finally:
        shutil.rmtree(folder)
    return 0
