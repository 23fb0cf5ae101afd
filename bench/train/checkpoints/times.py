"""Save and load times of a GPT-2 124M with AdamW on two ranks, compared with torch's distributed checkpoints.

    python -m bench.train.checkpoints times [--size gpt2-124M] [--rounds 5] [--folder /dev/shm]

It prints a JSON object: the median of each time in seconds; the least processor time of both ranks, for machines on
which other programs run; and the ratios. Both programs write 12 bytes per parameter to the same disk, in turn; ours
hashes everything, torch hashes nothing. A load reads what a rank of ZeRO 1 needs to continue: all weights and its share
of the moments. `torch_load_own` only reads what the rank saved, half of the weights; a training would still have to
exchange them. With `--folder /dev/shm` no disk is written.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import native
from bench.field import Option, free_port, read_options, scratch
from trainer.checkpoint.checkpointer import Checkpointer, Progress
from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.env import Env
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config
from trainer.train.assemble import build_model

RANKS = 2


def config_of(size: str, background: str) -> TrainConfig:
    raw = {
        "model": size,
        "data": {"prefix": "none"},
        "steps": 1000,
        "micro_batch": 1,
        "global_batch": RANKS,
        "zero": 1,
        "save": {"background": background, "keep": 1},
    }
    return read_config(raw, RANKS)


@dataclass
class Times:
    """The seconds of each round by what is timed: of the clock, and of the processors of all ranks."""

    clock: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    processors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, key: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        began, processor = time.monotonic(), time.process_time()
        result = work()
        used = torch.tensor(time.process_time() - processor)
        dist.all_reduce(used)
        self.clock[key].append(time.monotonic() - began)
        self.processors[key].append(float(used))
        return result


def rank_main(rank: int, size: str, folder: str, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    device = Device("cpu")
    group = Group.join(Env(rank, rank, RANKS, RANKS, "127.0.0.1", port), device)
    config = config_of(size, "never")
    groups = Groups.of(group, config.layout(RANKS))
    engine = TorchEngine(build_model(config, native.choose("cpu"), groups), config, groups, device)
    times = Times()
    ours, theirs = Path(folder) / "ours", Path(folder) / "torch"
    savers = {
        background: Checkpointer(
            config_of(size, background), engine, group, ours / background, DataIdentity()
        )
        for background in ("never", "always")
    }
    # A piece that both ranks have has the same key: torch saves it once, and each rank loads it.
    state = {f"{part.key} {part.box}": part.tensor for part in engine.parts()}
    own = {f"{part.key} {part.box}": part.tensor for part in engine.parts() if part.owned}
    processes = dist.new_group(backend="gloo")
    for number in range(1, rounds + 2):
        measure_ours(savers, number, group, times)
        measure_torch(state, own, theirs, number, processes, times)
        if rank == 0:
            shown = {key: round(found[-1], 2) for key, found in times.clock.items()}
            print(f"round {number}: {shown}", file=sys.stderr)
    if rank == 0:
        # The first round fills memory and caches of the disk.
        medians = {key: statistics.median(found[1:]) for key, found in times.clock.items()}
        least = {key: round(min(found), 3) for key, found in times.processors.items()}
        bytes_ours = sum(file.stat().st_size for file in (ours / "never").rglob("*") if file.is_file())
        found = {
            "seconds": medians,
            "processor seconds": least,
            "bytes_per_parameter": bytes_ours / config.model.parameters(),
            "ratios": ratios(medians, least),
        }
        print(json.dumps(found, indent=2))
    group.barrier()
    os._exit(0)


def ratios(seconds: dict[str, float], processor: dict[str, float]) -> dict[str, float]:
    best = min(seconds["torch_thread_stall"], seconds["torch_process_stall"])
    return {
        "stall / torch's best stall (at most 0.6)": seconds["stall"] / best,
        "save / torch's save (at most 1.3)": seconds["save"] / seconds["torch_save"],
        "load / torch's load (at most 1.2)": seconds["load"] / seconds["torch_load"],
        "load / torch's load of what each rank saved": seconds["load"] / seconds["torch_load_own"],
        "processor time of a save / torch's": processor["save"] / processor["torch_save"],
        "processor time of a load / torch's": processor["load"] / processor["torch_load"],
    }


def measure_ours(savers: dict[str, Checkpointer], number: int, group: Group, times: Times) -> None:
    times.add("save", lambda: savers["never"].save(Progress(number)))
    began = time.monotonic()
    times.add("stall", lambda: savers["always"].save(Progress(number)))
    savers["always"].finish()
    group.barrier()
    times.clock["background_total"].append(time.monotonic() - began)
    times.add("load", lambda: savers["never"].resume())


def measure_torch(
    state: dict[str, Any],
    own: dict[str, Any],
    folder: Path,
    number: int,
    processes: Any,
    times: Times,
) -> None:
    paths = {kind: str(folder / f"{kind}-{number}") for kind in ("save", "thread", "process")}
    times.add("torch_save", lambda: dcp.save(state, checkpoint_id=paths["save"]))
    times.add("torch_load", lambda: dcp.load(state, checkpoint_id=paths["save"]))
    times.add("torch_load_own", lambda: dcp.load(own, checkpoint_id=paths["save"]))
    times.add("torch_clone", lambda: {key: tensor.clone() for key, tensor in state.items()})
    for kind, of in (("thread", AsyncCheckpointerType.THREAD), ("process", AsyncCheckpointerType.PROCESS)):
        began = time.monotonic()
        future = times.add(
            f"torch_{kind}_stall",
            lambda kind=kind, of=of: dcp.async_save(
                state, checkpoint_id=paths[kind], process_group=processes, async_checkpointer_type=of
            ),
        )
        future.result()
        dist.barrier()
        times.clock[f"torch_{kind}_total"].append(time.monotonic() - began)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in paths.values():
            shutil.rmtree(path)
    dist.barrier()


def main() -> None:
    options = read_options(__doc__, size="gpt2-124M", rounds=5, folder=Option(Path, "where to save"))
    with scratch("checkpoints", options.folder) as folder:
        mp.spawn(rank_main, (options.size, str(folder), free_port(), options.rounds), nprocs=RANKS)
